"""The report: what it says is what the run directories say, it holds no markup from data, and it stays small."""

from __future__ import annotations

import base64
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import message

import fedfac
from fedfac import comparison, methods, report
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.errors import RunError
from fedfac.run import RunDirectory

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "report.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "grid"
    tables = {
        "data": {"clients": 20},
        "train": {"rounds": 3, "cohort": 4, "epochs": 1, "batch_size": 16, "evaluate_every": 1},
        "method": {"layers": ["fc1"]},
    }
    methods = ["fedavg", "fedper", "fedfac-static", "fedfac", "variance"]
    planned = comparison.plan(out, methods=methods, tables=tables, seeds=[0, 1])
    assert comparison.train(planned) == {}
    return out


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    return report.gather([folder])


def one(facts: dict[str, Any], method: str, seed: int = 0) -> dict[str, Any]:
    found = [run for run in facts["runs"] if (run["method"], run["seed"]) == (method, seed)]
    assert len(found) == 1
    return dict(found[0])


def test_curves_and_clients_are_those_of_the_runs(facts: dict[str, Any], folder: Path) -> None:
    assert len(facts["runs"]) == 10
    run, saved = one(facts, "fedfac", 1), RunDirectory.read(folder / "fedfac" / "seed-1")
    records = saved.records()
    rounds, values = run["curves"]["accuracy"]
    assert rounds == [1, 2, 3]
    assert values == pytest.approx([r["test"]["accuracy"] for r in records], abs=1e-5)
    assert run["curves"]["train_loss"][1] == pytest.approx([r["train_loss"] for r in records], abs=1e-5)
    assert run["clients"]["accuracy"] == pytest.approx([row["accuracy"] for row in saved.clients()], abs=1e-5)
    partition = facts["partitions"][run["partition"]]
    assert partition["names"] == [str(i) for i in range(20)]
    assert sum(partition["train"]) + sum(partition["test"]) == sum(map(sum, partition["counts"]))
    assert len(facts["partitions"]) == 2  # a seed cuts its own; all methods of a seed share it


def test_the_split_can_be_unpacked_to_masks_and_scores(facts: dict[str, Any], folder: Path) -> None:
    saved = RunDirectory.read(folder / "fedfac" / "seed-0")
    (layer,) = one(facts, "fedfac")["layers"]
    frames = layer["frames"]
    assert frames["rounds"] == layer["rounds"] == [1, 2, 3]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(frames["sides"]), np.uint8), bitorder="little")
    codes = np.frombuffer(base64.b64decode(frames["scores"]), np.uint8).reshape(3, 64)
    low, high = frames["range"]
    for i, number in enumerate(frames["rounds"]):
        assert bits[64 * i : 64 * (i + 1)].tolist() == [int(b) for b in saved.masks()[number]["fc1"]]
        assert low + codes[i] / 255 * (high - low) == pytest.approx(saved.scores()[number]["fc1"], abs=0.003)
    assert layer["kept"] == [r["split"]["fc1"]["kept"] for r in saved.records()]
    assert layer["factors"] == [r["split"]["fc1"]["factors"] for r in saved.records()]
    (static,) = one(facts, "fedfac-static")["layers"]
    assert static["frames"]["rounds"] == [0]
    assert one(facts, "fedper")["personal"] == ["fc2.bias", "fc2.weight"]


def test_bytes_are_those_of_the_shared_part_and_the_moments(facts: dict[str, Any]) -> None:
    """By hand; ``test_traffic`` weighs real packets. Single precision down, double precision up."""
    whole, fc1, moments = 38_282, 64 * 512 + 64, 64 * 67 // 2
    rounds, cohort, tested = 3, 4, 20
    down = rounds * (cohort + tested) * 4 * whole  # every round is evaluated
    plain = one(facts, "fedavg")["bytes"]
    assert plain == {
        "values": whole,
        "up": 8 * whole,
        "for_split": 0,
        "down": 4 * whole,
        "total": rounds * cohort * 8 * whole + down,
    }
    assert one(facts, "fedper")["bytes"]["values"] == whole - (10 * 64 + 10)
    assert one(facts, "fedper")["bytes"]["down"] == 4 * whole  # the whole state all the same
    dynamic = one(facts, "fedfac")["bytes"]
    assert dynamic["values"] == whole - fc1 / 2
    assert dynamic["up"] == 8 * (whole - fc1 / 2 + moments)
    assert dynamic["for_split"] == 8 * moments
    assert one(facts, "fedfac-static")["bytes"]["for_split"] == pytest.approx(8 * moments / 4)  # once in four visits
    assert one(facts, "variance")["bytes"]["for_split"] == 8 * (64 * 512 + 64)


def test_the_table_of_results_is_that_of_compare(facts: dict[str, Any], folder: Path) -> None:
    from fedfac import tables

    block = tables.blocks(comparison.load(folder))[0]
    rows = {row["method"]: [cell["text"] for cell in row["cells"]] for row in facts["tables"][0]["rows"]}
    for method, entries in block.rows.items():
        assert rows[method] == [entries[column].text(("", "")) for column in block.columns]
    page = report.html(facts)
    assert '<th scope="row">fedfac-static</th>' in page
    assert "worst decile" in page


def test_the_command_writes_one_file_that_fetches_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    page = Path(said["path"])
    assert page == folder / "report.html"
    text = page.read_text()
    assert said["bytes"] == page.stat().st_size < 300_000
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_text_from_runs_is_never_markup(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    federation = fedfac.Federation.from_arrays({name: (x, (x[:, 0] > 0).long()), "b": (x, (x[:, 1] > 0).long())})
    out = tmp_path / "<b>&run"
    fedfac.fit(torch.nn.Linear(4, 2), federation, method=methods.fedavg(), rounds=1, epochs=1, out=out)
    text = report.write(out).read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "<b>" not in text
    assert text.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert name in json.loads(data[1])["partitions"].popitem()[1]["names"]


def test_runs_given_one_by_one_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for name, method, epochs in [
        ("a", methods.fedfac(layers=[1], tau="25%"), 1),
        ("b", methods.fedfac(layers=[1], tau="50%"), 1),
        ("c", methods.fedavg(), 2),
        ("d", methods.fedavg(), 2),
    ]:
        out = tmp_path / name
        fedfac.fit(small_model(), small_federation(), method=method, rounds=1, epochs=epochs, cohort=3, out=out)
    facts = report.gather([tmp_path / name for name in "abcd"])
    labels = [run["method"] for run in facts["runs"]]
    assert labels[:3] == ["fedfac tau=25% epochs=1", "fedfac tau=50% epochs=1", "fedavg epochs=2"]
    assert labels[3] == f"fedavg epochs=2 ({tmp_path / 'd'})"
    assert facts["settings"] == [""]
    fedfac.fit(small_model(), small_federation(clients=4), rounds=1, epochs=1, cohort=3, out=tmp_path / "e")
    assert report.gather([tmp_path / "a", tmp_path / "e"])["settings"] == ["clients=5", "clients=4"]


def test_regression_and_lazy_clients_have_a_page_too(tmp_path: Path) -> None:
    def load(i: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(i))
        y = x.sum(1, keepdim=True) * (i + 1)
        return x[:15], y[:15], x[15:], y[15:]

    federation = fedfac.Federation.lazy(3, load)  # type: ignore[arg-type]
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    fedfac.fit(model, federation, rounds=2, epochs=1, loss=torch.nn.functional.mse_loss, out=tmp_path / "r")
    facts = report.gather([tmp_path / "r"])
    (run,) = facts["runs"]
    assert {"mse", "r2", "loss"} <= run["curves"].keys()
    assert run["clients"]["accuracy"] == [None] * 3
    (partition,) = facts["partitions"].values()
    assert partition["train"] == [None] * 3
    assert partition["counts"] is None
    assert "mse" in report.html(facts)
    assert "Accuracy over all test samples" not in facts["note"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "holds no run" in message(RunError, lambda: report.write(tmp_path))
    planned = comparison.plan(tmp_path / "c", methods=["fedavg"], tables={"data": {"clients": 4}})
    assert "no run in it has finished its first round yet" in message(RunError, lambda: report.write(planned.out))


def test_a_hundred_clients_and_five_hundred_rounds_are_small(tmp_path: Path) -> None:
    big_run = runpy.run_path(str(BENCHMARK))["big_run"]
    big_run(tmp_path / "big", method="fedfac", clients=100, rounds=500, elements=512)
    path = report.write(tmp_path / "big")
    assert path.stat().st_size < 5_000_000
    (run,) = report.gather([tmp_path / "big"])["runs"]
    assert len(run["layers"][0]["frames"]["rounds"]) == 500  # nothing had to be left out
    assert len(run["clients"]["accuracy"]) == 100


def test_more_than_fits_is_thinned_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfac.report.facts.MOST_FRAMES", 60)
    fedfac.fit(
        small_model(),
        small_federation(),
        method=methods.fedfac(layers=[1]),
        rounds=21,
        epochs=1,
        cohort=3,
        out=tmp_path / "r",
    )
    (layer,) = report.gather([tmp_path / "r"])["runs"][0]["layers"]
    assert len(layer["frames"]["rounds"]) == 10  # 60 // 6 elements
    assert (layer["frames"]["rounds"][0], layer["frames"]["rounds"][-1]) == (1, 21)
    assert len(layer["kept"]) == 21
