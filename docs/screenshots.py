"""Takes the pictures of the report that the documentation shows, from a comparison that is there already.

make demo && python docs/screenshots.py runs/demo-1
"""

from __future__ import annotations

import runpy
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from fedfac import report

HERE = Path(__file__).parent
SECTIONS = {"results": ["results", "filters", "curves"], "clients": ["clients"], "split": ["split"]}


def main(folder: str) -> None:
    """One picture for each group of sections, and the whole page in the dark."""
    browser = runpy.run_path(str(HERE.parent / "benchmarks" / "report.py"))["chromium"]("--hide-scrollbars")
    try:
        page = report.write(folder)
        browser.get(page.absolute().as_uri())
        for name, parts in SECTIONS.items():
            picture(browser, f"report-{name}.png", parts)
        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        browser.refresh()
        picture(browser, "report-dark.png", ["run", "results", "filters", "curves"])
    finally:
        browser.quit()


def picture(browser: Any, name: str, parts: list[str]) -> None:
    """The page with only these sections, as a PNG of few colours."""
    script = """for (const part of document.querySelectorAll('main > *, nav, footer'))
        part.style.display = arguments[0].includes(part.id) ? '' : 'none';
        return document.body.scrollHeight"""
    size = {"width": 1100, "height": 400, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(0.4)  # the page draws itself anew a moment after its width has changed
    size["height"] = browser.execute_script(script, parts)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    shot = Image.open(BytesIO(browser.get_screenshot_as_png()))
    target = HERE / "images" / name
    target.parent.mkdir(exist_ok=True)
    shot.convert("RGB").quantize(256).save(target, optimize=True)
    print(target, target.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])
