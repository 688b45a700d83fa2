"""The report in a real browser: it draws, sorts and slides, says nothing on the console, and runs no text from data."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfac
from fedfac import methods, report
from fedfac.seeds import global_stream

pytest.importorskip("selenium", reason="selenium is not installed: pip install 'fedfac[dev]'")
pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is not installed: make browser",
)
EVIL = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    draws = torch.Generator().manual_seed(0)
    clients = {}
    for number, name in enumerate([EVIL, "north", "<i>south</i>", "east", "10", "9"]):
        x = torch.randn(30 + 10 * number, 6, generator=draws)
        clients[name] = (x, (x[:, number] > 0).long() + (number % 2))
    federation = fedfac.Federation.from_arrays(clients, classes=3)
    with global_stream(0, "report"):
        model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    runs = []
    for method in (methods.fedavg(), methods.fedper(), methods.fedfac(layers=[1])):
        for seed in (0, 1):
            runs.append(folder / f"{method.name}-{seed}")
            how: dict[str, Any] = {"rounds": 6, "epochs": 2, "cohort": 4, "evaluate_every": 1, "lr": 0.02}
            fedfac.fit(model, federation, method=method, seed=seed, out=runs[-1], **how)
    return report.write(runs, folder / "page.html")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    start = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "report.py"))["chromium"]
    browser = start("--window-size=1200,900")
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium: Any, page: Path) -> Iterator[Any]:
    chromium.get(page.as_uri())
    assert chromium.execute_script("return document.documentElement.dataset.ready") == "true"
    yield chromium
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return window.broken") is None


def column(browser: Any, number: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#client-table tbody tr')].map(r => r.children[arguments[0]].textContent)"
    )
    return list(browser.execute_script(script, number))


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def test_everything_is_drawn_with_a_text_alternative(browser: Any) -> None:
    sections = browser.execute_script(
        "return [...document.querySelectorAll('main > section')].filter(s => s.hidden).length"
    )
    assert sections == 0
    charts = "[...document.querySelectorAll('main svg[role=img], main canvas[role=img]')]"
    labels = browser.execute_script(f"return {charts}.map(c => c.getAttribute('aria-label'))")
    assert len(labels) >= 8
    assert all(label and len(label) > 30 for label in labels)
    assert "accuracy over all test samples over rounds. At the end: fedavg" in labels[0]
    bands = browser.execute_script("return document.querySelectorAll('#curve-one path[opacity]').length")
    assert bands == 3  # two seeds each
    drawn = """const c = document.querySelector('#partition canvas');
    return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"""
    assert browser.execute_script(drawn) > 5


def test_the_table_of_clients_sorts_by_every_column_and_finds(browser: Any) -> None:
    names = column(browser, 0)
    assert sorted(names) == sorted([EVIL, "north", "<i>south</i>", "east", "10", "9"])
    assert names.index("9") < names.index("10")  # as numbers
    button = "#client-table th:nth-child({}) button"
    click(browser, button.format(2))
    assert column(browser, 1) == ["80", "70", "60", "50", "40", "30"]
    click(browser, button.format(2))
    assert column(browser, 1) == ["30", "40", "50", "60", "70", "80"]
    sort = browser.execute_script(
        "return document.querySelector('#client-table th:nth-child(2)').getAttribute('aria-sort')"
    )
    assert sort == "ascending"
    assert browser.execute_script("return document.activeElement.textContent") == "samples"
    click(browser, button.format(4))
    accuracies = [float(text) for text in column(browser, 3)]
    assert accuracies == sorted(accuracies, reverse=True)
    search = browser.find_element("css selector", "#client-table input[type=search]")
    search.send_keys("SOUTH")
    assert column(browser, 0) == ["<i>south</i>"]


def test_gains_are_differences_to_fedavg(browser: Any) -> None:
    heads = browser.execute_script(
        "return [...document.querySelectorAll('#client-table thead th')].map(h => h.textContent)"
    )
    assert heads == ["client", "samples", "classes", "fedavg", "fedper", "gain", "fedfac", "gain"]
    for base, own, gain in zip(column(browser, 3), column(browser, 6), column(browser, 7), strict=True):
        assert float(gain) == pytest.approx(float(own) - float(base), abs=0.0015)


def test_the_slider_moves_through_the_rounds_by_keyboard(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    said = "return document.getElementById('round-said').textContent"
    frame = "return document.querySelector('.layer canvas').dataset.frame"
    assert browser.execute_script(said).startswith("round 6 · 0: 10 of 20 shared")
    slider = browser.find_element("id", "round")
    slider.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert browser.execute_script(said).startswith("round 4 · ")
    assert browser.execute_script(frame) == "3"
    slider.send_keys(Keys.HOME)
    assert browser.execute_script(said).startswith("round 1 · ")
    assert browser.execute_script(
        "return document.getElementById('round').getAttribute('aria-valuetext')"
    ) == browser.execute_script(said)
    pixels = "const c = document.querySelector('.layer canvas'); return c.toDataURL()"
    before = browser.execute_script(pixels)
    click(browser, "#by-score")
    assert browser.execute_script(pixels) != before


def test_charts_are_read_by_keyboard_and_methods_can_be_hidden(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    chart = browser.find_element("css selector", "#curve-one svg")
    chart.send_keys(Keys.HOME)
    readout = "return document.querySelector('#curve-one output').textContent"
    assert browser.execute_script(readout).startswith("round 1: fedavg ")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(readout).startswith("round 2: fedavg ")
    click(browser, "#filters input[type=checkbox]")
    lines = browser.execute_script("return document.querySelectorAll('#curve-one path[fill=none]').length")
    assert lines == 2
    assert "fedavg" not in browser.execute_script("return document.querySelector('#cost-table tbody').textContent")


def test_dark_light_and_a_phone(browser: Any) -> None:
    back = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(back)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    dark = browser.execute_script(back)
    assert dark != light
    click(browser, "#theme")  # auto, dark, light
    click(browser, "#theme")
    assert browser.execute_script(back) == light
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    click(browser, "#theme")
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.refresh()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert browser.execute_script("return document.querySelector('#curve-one svg').clientWidth") > 250
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
