"""The documentation builds without a broken link, and what it tells people to run runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedfac.cli import main

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["tutorial.md", "command-line.md", "extending.md"])
def test_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, text in BLOCK.findall((ROOT / "docs" / page).read_text()):
        if kind == "python":
            exec(compile(text, page, "exec"), names)
            continue
        for line in text.splitlines():
            if line.startswith("fedfac "):
                assert main(shlex.split(line, comments=True)[1:]) == 0, line
    if page == "tutorial.md":
        assert names["result"].accuracy > 0.6
        assert Path("runs/clinics/report.html").exists()
        assert Path("north.pt2").exists()


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'fedfac[docs]'")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in (tmp_path / "site").glob("*.html")}
    assert "Train a personalised model for every client" in pages["api.html"]
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(https?:)?//""")
    assert [name for name, text in pages.items() if loaded.search(text)] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_no_text_has_the_marks_of_a_merge() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml", ".txt", ".yml"} or not path.suffix:
            assert not re.search(r"^(<{7}|>{7}|\|{7}) ", path.read_text(), re.MULTILINE), name
