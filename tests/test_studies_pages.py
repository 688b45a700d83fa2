"""The pages in docs/studies are what their tables say, and what the code would write today."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fedfac.studies import ablation, cost, fairness, frame, simulation, theory
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.training import Level

DOCS = Path(__file__).parent.parent / "docs" / "studies"


def tables(name: str) -> dict[str, list[Row]]:
    return {path.stem: pq.read_table(path).to_pylist() for path in (DOCS / name).glob("*.parquet")}


def of_simulation() -> Finding:
    found = tables("simulation")
    order = ("curves", "kept", "recovery", "labels")
    seeds = sorted({row["seed"] for row in found["curves"]})
    return simulation.present({key: found[key] for key in order}, simulation.FULL, seeds)


def of_theory() -> Finding:
    found = tables("theory")
    order = ("convergence", "effects", "generalisation")
    seeds = sorted({row["seed"] for row in found["effects"]})
    return theory.present({key: found[key] for key in order}, theory.FULL, seeds)


def of_cost() -> Finding:
    found = tables("cost")
    order = ("curves", "convergence", "bytes", "layers", "times")
    seeds = sorted({row["seed"] for row in found["curves"]})
    text = cost.page(Ask(), seeds, *(found[key] for key in ("convergence", "times", "bytes", "layers")))
    return Finding(tables={key: found[key] for key in order}, figures={}, page=text)


def of_ablation() -> Finding:
    found = tables("ablation")
    seeds = sorted({row["seed"] for row in found["masked"]})
    text = ablation.page(Ask(), seeds, found["masked"], found["splits"])
    return Finding(tables={key: found[key] for key in ("masked", "splits")}, figures={}, page=text)


def of_fairness() -> Finding:
    found = tables("fairness")
    seeds = sorted({row["seed"] for row in found["clients"]})
    levels = [Level(title, {}) for title in dict.fromkeys(row["level"] for row in found["methods"])]
    text = fairness.page(Ask(), seeds, levels, found["methods"])
    return Finding(tables={key: found[key] for key in ("clients", "methods")}, figures={}, page=text)


MADE = {
    "simulation": of_simulation,
    "theory": of_theory,
    "cost": of_cost,
    "ablation": of_ablation,
    "fairness": of_fairness,
}


@pytest.mark.parametrize(("name", "made"), MADE.items())
def test_the_page_is_made_of_the_tables_beside_it(name: str, made: Callable[[], Finding]) -> None:
    assert (DOCS / name / "page.md").read_text() == frame.page(name, made(), Ask())


def test_full_settings_are_what_was_run() -> None:
    curves = tables("simulation")["curves"]
    assert max(row["round"] for row in curves) == simulation.FULL.rounds
    assert len({row["seed"] for row in curves}) == simulation.FULL.seeds
    assert max(row["round"] for row in tables("theory")["convergence"]) == theory.FULL.rounds


def test_every_picture_of_a_page_is_there_and_the_folder_is_small() -> None:
    pages = sorted(DOCS.glob("*/page.md"))
    assert {page.parent.name for page in pages} >= {"simulation", "theory"}
    for page in pages:
        shown = re.findall(r"\]\((\w+\.png)\)", page.read_text())
        assert shown
        assert all((page.parent / picture).stat().st_size > 5000 for picture in shown)
    assert sum(path.stat().st_size for path in DOCS.rglob("*")) < 2_000_000
