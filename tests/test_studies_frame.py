"""The frame of all studies: what is written, that it is written whole, and that it is the same every time."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from helpers import check_readable, drawn, message
from PIL import Image

from fedfac.cli import main
from fedfac.errors import ConfigError, RunError
from fedfac.studies import STUDIES, Known, figures, frame
from fedfac.studies.frame import Ask, Finding, Row, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS: list[Row] = [{"round": t, "accuracy": 0.5 + 0.1 * t} for t in range(4)]


def draw(rows: list[Row]) -> Figure:
    figure, axes = figures.panel()
    axes.plot([r["round"] for r in rows], [r["accuracy"] for r in rows], label="fedfac")
    figures.label(axes, "round", "accuracy", "all clients")
    axes.legend()
    return figure


def small(ask: Ask) -> Finding:
    """A study of nothing much."""
    rows = ROWS[: 2 if ask.quick else 4]
    with ask.steps("small", len(rows)) as progress:
        for row in rows:
            progress.step(f"round {row['round']}")
    page = f"# Small\n\nAccuracy rises.\n\n![accuracy](accuracy.png)\n\n{markdown(rows)}\n"
    return Finding(
        tables={"curve": rows}, figures={"accuracy": partial(draw, rows)}, page=page, summary={"last": rows[-1]}
    )


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "small", Known("small.study", "a study of nothing much"))
    monkeypatch.setitem(sys.modules, "fedfac.studies.small", type(sys)("small"))
    monkeypatch.setattr(sys.modules["fedfac.studies.small"], "study", small, raising=False)


def test_a_study_is_a_folder_of_tables_figures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "small", "--seed", "3", "--out", str(tmp_path)]) == 0
    shown, progress = capsys.readouterr()
    folder = tmp_path / "small"
    assert sorted(p.name for p in folder.iterdir()) == ["accuracy.png", "accuracy.svg", "curve.parquet", "page.md"]
    assert pq.read_table(folder / "curve.parquet").to_pylist() == ROWS
    page = (folder / "page.md").read_text()
    assert page.startswith("# Small\n")
    assert "fedfac study small --seed 3\n" in page
    assert "| 3 | 0.800 |" in page
    assert "Accuracy rises." in shown
    assert "4/4 round 3" in progress
    with Image.open(folder / "accuracy.png") as image:
        assert len({*image.convert("RGB").get_flattened_data()}) > 10  # something is on it
    assert ">fedfac</text>" in (folder / "accuracy.svg").read_text()


def test_json_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "small", "--quick", "--json", "--quiet", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    said = json.loads(out)
    assert said["study"] == "small"
    assert said["last"] == ROWS[1]
    assert "page.md" in said["files"]


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    one, two = (frame.run("small", Ask(), tmp_path / name)[1] for name in "ab")
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_a_study_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Figure:
        raise ZeroDivisionError

    finding = Finding(tables={"curve": ROWS}, figures={"broken": broken}, page="# Broken")
    with pytest.raises(ZeroDivisionError):
        frame.write("small", finding, Ask(), tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_errors_come_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert message(ConfigError, lambda: frame.find("smal")) == "there is no study 'smal'. Did you mean 'small'?"
    assert "seeds is 0; it is a whole number from 1 up" in message(ConfigError, lambda: Ask(seeds=0))
    (tmp_path / "small").mkdir()
    said = message(RunError, lambda: frame.run("small", Ask(), tmp_path))
    assert said == f"{tmp_path / 'small'} exists already: choose another --out, or remove it first"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = message(ConfigError, lambda: frame.run("small", Ask(), tmp_path / "other"))
    assert said.endswith("not installed: pip install 'fedfac[studies]'")
    assert not (tmp_path / "other").exists()


def test_the_judge_of_figures_can_fail() -> None:
    check_readable(draw(ROWS))
    figure = draw(ROWS)
    figure.axes[0].set_xlabel("")
    with pytest.raises(AssertionError, match="no x label"):
        check_readable(figure)
    figure, axes = figures.panel()
    figures.label(axes, "round", "accuracy")
    assert drawn(axes) == 0
    with pytest.raises(AssertionError, match="nothing is drawn"):
        check_readable(figure)
