"""The committed comparison on the digits is what the command gives: one of its cells, trained again."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from fedfac import comparison, experiment
from fedfac.config import read_toml

ROOT = Path(__file__).parent.parent


def test_a_cell_of_the_table_comes_out_again(tmp_path: Path) -> None:
    tables = read_toml(ROOT / "examples" / "digits.toml")
    grid = tables.pop("compare")
    planned = comparison.plan(tmp_path / "c", methods=grid["methods"], tables=tables, seeds=grid["seeds"])
    rows = list(csv.DictReader(io.StringIO((ROOT / "docs" / "digits.csv").read_text())))
    assert [(row["method"], int(row["seed"])) for row in rows] == [(c.method, c.seed) for c in planned.cells]
    cell = planned.of("", "fedper")[1]
    (row,) = [row for row in rows if (row["method"], row["seed"]) == ("fedper", "1")]
    result = experiment.run(cell.config)
    # other processors round differently, and sixty rounds magnify that: a few of 288 test images may flip
    assert result.headline["last"] == pytest.approx(float(row["last"]), abs=0.03)
    assert result.headline["best"] == pytest.approx(float(row["best"]), abs=0.03)
    assert result.records[-1]["test"]["samples"] == int(row["samples"])


def test_the_table_in_the_page_is_the_one_of_the_figures() -> None:
    page = (ROOT / "docs" / "digits.md").read_text()
    rows = list(csv.DictReader(io.StringIO((ROOT / "docs" / "digits.csv").read_text())))
    for method in {row["method"] for row in rows}:
        lasts = [float(row["last"]) for row in rows if row["method"] == method]
        assert any(
            f"| {method} |" in line and f"{sum(lasts) / len(lasts):.3f}" in line for line in page.splitlines()
        ), method
