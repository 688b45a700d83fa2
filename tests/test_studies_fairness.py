"""The study of fairness, in its quick form: what it draws is what was measured, and its words follow the numbers."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import check_readable
from matplotlib.patches import PathPatch

from fedfac import experiment
from fedfac.studies import fairness, frame
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.training import Level, config, dirichlet

ASK = Ask(quick=True)
LEVEL = Level("a", {})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finding, Path]:
    return frame.run("fairness", ASK, tmp_path_factory.mktemp("studies"))


def test_every_client_of_every_method(found: tuple[Finding, Path]) -> None:
    finding, folder = found
    rows = pq.read_table(folder / "clients.parquet").to_pylist()
    assert rows == [dict(row) for row in finding.tables["clients"]]
    assert {row["method"] for row in rows} == set(fairness.METHODS)
    (level,) = dirichlet(0.1)
    again = experiment.run(config(ASK, level, {"name": "fedfac"}, 0, evaluate_every=1000))
    ours = {row["client"]: row["accuracy"] for row in rows if row["method"] == "fedfac"}
    assert ours == {c["client"]: c["accuracy"] for c in again.clients if c["accuracy"] is not None}
    assert len(ours) > 15


def test_boxes_are_ordered_by_median_and_ours_is_orange(found: tuple[Finding, Path]) -> None:
    finding, folder = found
    figure = finding.figures["fairness"]()
    check_readable(figure)
    (axes,) = figure.axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    rows: list[Row] = list(finding.tables["clients"])
    medians = [statistics.median(r["accuracy"] for r in rows if r["method"] == name) for name in names]
    assert medians == sorted(medians)
    boxes = [patch for patch in axes.patches if isinstance(patch, PathPatch)]
    assert len(boxes) == len(names) == len(fairness.METHODS)
    orange = [
        names[i] for i, box in enumerate(boxes) if box.get_facecolor()[:3] == pytest.approx((0.9, 0.62, 0), abs=0.01)
    ]
    assert orange == ["fedfac"]
    for name, box in zip(names, boxes, strict=True):
        own = [r["accuracy"] for r in rows if r["method"] == name]
        low, _, high = statistics.quantiles(own, n=4, method="inclusive")
        edges = np.asarray(box.get_path().vertices)[:, 0]
        assert (edges.min(), edges.max()) == pytest.approx((low, high))
    assert (folder / "fairness.png").stat().st_size > 5000
    assert ">fedfac-static</text>" in (folder / "fairness.svg").read_text()


def test_the_words_follow_the_numbers(found: tuple[Finding, Path]) -> None:
    page = (found[1] / "page.md").read_text()
    summary = found[0].summary["methods"]
    place = [row["method"] for row in summary].index("fedfac") + 1
    assert f"**FedFac is number {place} of {len(summary)} by its median**" in page

    def rows(fedfac: list[float], fedavg: list[float]) -> str:
        made = [
            {"level": "a", "method": m, "accuracy": a} for m, o in (("fedfac", fedfac), ("fedavg", fedavg)) for a in o
        ]
        spread = [fairness.spread(made, LEVEL, name) for name in ("fedfac", "fedavg")]
        return fairness._said(sorted(spread, key=lambda row: -row["median"]))

    good = rows([0.8, 0.9, 1.0], [0.1, 0.5, 0.9])
    assert "number 1 of 2 by its median** (0.900; as in the paper)" in good
    assert good.endswith("both hold here against FedAvg.")
    bad = rows([0.1, 0.5, 0.9], [0.8, 0.9, 1.0])
    assert "number 2 of 2 by its median** (0.500; not first, as the paper has it; the first is fedavg)" in bad
    assert bad.endswith("against FedAvg that does not hold here.")
    tied = rows([0.6, 0.9, 0.9], [0.7, 0.9, 1.0])
    assert "(0.900, which 1 other has too: the mean decides; " in tied
