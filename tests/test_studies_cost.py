"""The study of convergence and cost, in its quick form; bytes by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import check_readable, heights

from fedfac import experiment
from fedfac.studies import cost, frame
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.training import IID, Level, config

ASK = Ask(quick=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finding, Path]:
    return frame.run("cost", ASK, tmp_path_factory.mktemp("studies"))


def test_the_curves_are_those_of_the_runs(found: tuple[Finding, Path]) -> None:
    rows = pq.read_table(found[1] / "curves.parquet").to_pylist()
    result = experiment.run(config(ASK, IID, {"name": "fedfac"}, 0, evaluate_every=1000))
    own = [row["loss"] for row in rows if (row["level"], row["method"]) == ("IID", "fedfac")]
    assert own == [record["train_loss"] for record in result.records]
    figure = found[0].figures["loss"]()
    check_readable(figure)
    assert [axes.get_title() for axes in figure.axes] == ["Dir(0.1)", "IID"]
    line = next(line for line in figure.axes[1].lines if line.get_label() == "FedFac")
    assert np.asarray(line.get_ydata()).tolist() == own
    top = max(np.asarray(line.get_ydata(), dtype=float).max() for axes in figure.axes for line in axes.lines)
    assert all(axes.get_ylim()[1] >= top for axes in figure.axes)  # nothing is cut off


def test_bytes_of_the_paper_s_layers(found: tuple[Finding, Path]) -> None:
    rows = {row["data"]: row for row in pq.read_table(found[1] / "layers.parquet").to_pylist()}
    # d × fan-in, and d(d+1)/2 + d
    assert (rows["CIFAR-10"]["weights"], rows["CIFAR-10"]["moments"]) == (512 * 512 * 9, 512 * 513 // 2 + 512)
    assert rows["CIFAR-100"]["weights"] == 4096 * 4096
    assert (rows["FEMNIST"]["weights_bytes"], rows["FEMNIST"]["moments_bytes"]) == (4 * 64 * 800, 8 * 2144)
    assert rows["Shakespeare"]["ratio"] > 1  # fan-in 256 < (512 + 3)/2: the moments are larger
    assert [data for data, row in rows.items() if row["ratio_bytes"] > 1] == ["CIFAR-100", "Shakespeare"]
    text = (found[1] / "page.md").read_text()
    assert "fewer values than the weights in 3 of 4 cases (not for Shakespeare" in text
    assert "they are less in 2 of 4" in text


def test_the_picture_of_bytes_shows_the_table(found: tuple[Finding, Path]) -> None:
    rows = {row["data"]: row for row in pq.read_table(found[1] / "layers.parquet").to_pylist()}
    figure = found[0].figures["bytes"]()
    check_readable(figure)
    assert heights(figure.axes[0]) == pytest.approx(
        [row[key] / 1e6 for key in ("weights_bytes", "moments_bytes") for row in rows.values()]
    )


def test_bytes_of_the_runs_by_hand(found: tuple[Finding, Path]) -> None:
    rows = pq.read_table(found[1] / "bytes.parquet").to_pylist()
    fedavg = next(row for row in rows if row["method"] == "fedavg")
    assert (fedavg["relative"], fedavg["moments"]) == (1.0, 0.0)
    ours = next(row for row in rows if row["method"] == "fedfac")
    model = (16 * 9 + 16) + (32 * 16 * 9 + 32) + (64 * 512 + 64) + (10 * 64 + 10)
    half = 32 * 512 + 32  # half of fc1 is personal
    assert ours["shared"] == model - half
    assert ours["moments"] == 64 + 64 * 65 / 2
    assert ours["relative"] == pytest.approx((ours["shared"] + ours["moments"]) / model)
    assert (ours["up"], ours["down"]) == (8 * (ours["shared"] + ours["moments"]), 4 * model)
    assert (fedavg["up"], fedavg["down"]) == (8 * model, 4 * model)
    assert ours["relative_layers"] == pytest.approx((model - 32) / model)  # everything but the personal biases


def test_times_are_relative_to_fedavg(found: tuple[Finding, Path]) -> None:
    rows = pq.read_table(found[1] / "times.parquet").to_pylist()
    assert [row["method"] for row in rows] == list(cost.TIMED)
    assert rows[0] == {"method": "fedavg", "relative": 1.0, "paper": None}
    assert all(row["relative"] > 0 for row in rows)
    figure = found[0].figures["times"]()
    check_readable(figure)
    assert heights(figure.axes[0]) == [row["relative"] for row in rows]


def test_the_words_follow_the_curves() -> None:
    def curves(level: str, method: str, losses: list[float]) -> list[Row]:
        return [{"level": level, "method": method, "seed": 0, "round": t, "loss": x} for t, x in enumerate(losses, 1)]

    one, two = Level("one", {}), Level("two", {})
    rows = curves("one", "fedavg", [2, 1, 1]) + curves("one", "fedfac", [2, 0.9, 0.5])
    rows += curves("two", "fedavg", [2, 1, 1]) + curves("two", "fedfac", [2, 2, 2])
    gaps = cost.convergence(rows, [one, two])
    assert [row["difference"] for row in gaps] == [0.5, -1.0]
    assert [row["reached"] for row in gaps] == [2, None]
    assert [row["lower"] for row in gaps] == pytest.approx([2 / 3, 0])
    assert [row["rough_fedavg"] for row in gaps] == [1, 1]
    assert gaps[1]["rough_fedfac"] == 0
    times: list[Row] = [{"method": "fedfac", "relative": 1.5, "paper": 1.84}]
    sent: list[Row] = [
        {"method": "fedfac", "relative": 0.6, "relative_layers": 1.0, "up": 48e3, "down": 40e3},
        {"method": "fedavg", "relative": 1.0, "relative_layers": 1.0, "up": 80e3, "down": 40e3},
    ]
    page = cost.page(ASK, [0], gaps, times, sent, cost.paper_layers())
    assert "lower at the end at **1 of 2** levels" in page
    assert "The difference falls from the most heterogeneous level" in page
    assert "is -1.000 for IID clients" in page
    assert "smoother at 2 of 2 levels" in page
    assert "sends 0.60 of the values that a FedAvg client sends" in page
    assert "48 kB up by client and round, and 80 kB for FedAvg" in page
