"""Every example runs as it stands, for a few rounds."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest

from fedfac import methods
from fedfac.comparison import _expand
from fedfac.config import read_toml

EXAMPLES = Path(__file__).parent.parent / "examples"
SAID = {
    "digits.py": "fedavg",
    "own_module.py": "R²",
    "hospitals.py": "switzerland",
    "phones.py": "people who came later, ensemble",
    "custom_method.py": "gentle-fedper keeps the laws",
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAID.keys()


@pytest.mark.parametrize("name", list(SAID))
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--rounds", "2"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert SAID[name] in capsys.readouterr().out
    if name == "digits.py":
        assert Path("runs/example-digits/report.html").stat().st_size > 50_000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_a_config_file_is_understood(path: Path, tmp_path: Path) -> None:
    tables = read_toml(path)
    grid = tables.pop("compare")
    wanted = {"seeds": [0], "vary": {}, "time_rounds": 0, **grid, "tables": tables}
    cells = _expand(tmp_path, wanted, trust_code=False).cells
    settings = math.prod(len(values) for values in wanted["vary"].values())
    assert len(cells) == len(grid["methods"]) * settings * len(wanted["seeds"])
    for cell in cells:
        methods.build(cell.config.method_name, cell.config.method_options)
