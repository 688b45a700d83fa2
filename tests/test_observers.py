"""Observers are told what the run records; those of other tools write it where these tools read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import message

import fedfac
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError, TrainingError
from fedfac.observers import MLflow, TensorBoard, WandB, scalars
from fedfac.records import Record

ARGUMENTS: dict[str, Any] = {"rounds": 3, "epochs": 1, "cohort": 3, "method": fedfac.methods.fedfac(layers=[1])}


class Listener:
    def __init__(self, fails_in: int | None = None) -> None:
        self.heard: list[Any] = []
        self.fails_in = fails_in

    def begin(self, about: Mapping[str, Any]) -> None:
        if self.fails_in == 0:
            raise OSError("no route to host")
        self.heard.append(about["method"]["name"])

    def round(self, record: Record) -> None:
        if record["round"] == self.fails_in:
            raise OSError("no route to host")
        self.heard.append(record["round"])

    def end(self, finished: bool) -> None:
        self.heard.append(finished)


def test_an_observer_of_your_own_hears_the_whole_run(tmp_path: Path) -> None:
    one, two = Listener(), Listener()
    out = tmp_path / "r"
    fedfac.fit(small_model(), small_federation(), **ARGUMENTS, observers=[one], should_stop=lambda: True, out=out)
    assert one.heard == ["fedfac", 1, False]
    fedfac.fit(small_model(), small_federation(), **ARGUMENTS, observers=[two], out=out, resume=True)
    assert two.heard == ["fedfac", 2, 3, True]


def test_one_that_fails_does_not_stop_the_training() -> None:
    good, bad = Listener(), Listener(fails_in=2)
    with pytest.warns(RuntimeWarning, match="Listener failed and follows the run no longer: no route to host"):
        result = fedfac.fit(small_model(), small_federation(), **ARGUMENTS, observers=[bad, good])
    assert result.finished
    assert good.heard == ["fedfac", 1, 2, 3, True]
    assert bad.heard == ["fedfac", 1]


def test_one_that_cannot_begin_stops_the_run_before_its_first_round() -> None:
    good = Listener()
    text = message(
        ConfigError,
        lambda: fedfac.fit(small_model(), small_federation(), **ARGUMENTS, observers=[good, Listener(fails_in=0)]),
    )
    assert text == "Listener cannot follow the run: no route to host"
    assert good.heard == ["fedfac", False]


def test_a_run_that_breaks_off_is_ended() -> None:
    one = Listener()
    with pytest.raises(TrainingError):
        fedfac.fit(small_model(), small_federation(), **ARGUMENTS, lr=1e30, optimizer="sgd", observers=[one])
    assert one.heard[-1] is False


def test_scalars_are_the_numbers_of_the_record() -> None:
    told: list[Record] = []
    fedfac.fit(small_model(), small_federation(), **ARGUMENTS, on_round=told.append)
    found = scalars(told[-1])
    assert found["test/accuracy"] == told[-1]["test"]["accuracy"]
    assert found["split/0/factors"] == told[-1]["split"]["0"]["factors"]
    assert found["timing/train"] > 0
    assert not any(name.startswith(("cohort", "round")) for name in found)


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> list[dict[str, Any]]:
    """A run followed by one tool; its metrics.jsonl is what the tool must have been told."""
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--clients", "6", "--rounds", "2", "--cohort", "3", "--epochs", "1", "--evaluate-every", "1"]
    arguments += ["--out", "r", "--quiet"]
    assert main([*arguments, flag]) == 0
    return [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = train(tmp_path, monkeypatch, "--tensorboard")
    assert main(["resume", "r", "--rounds", "3", "--tensorboard", "--quiet"]) == 0
    events = EventAccumulator("r/tensorboard").Reload()
    found = events.Scalars("test/accuracy")
    assert [event.step for event in found] == [1, 2, 3]
    assert found[1].value == pytest.approx(records[1]["test"]["accuracy"])


@pytest.mark.filterwarnings("ignore")  # of MLflow about its own dependencies
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    records = train(tmp_path, monkeypatch, "--mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("fedfac")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "fedfac"
    history = sorted(client.get_metric_history(run.info.run_id, "test/accuracy"), key=lambda m: m.step)
    assert [m.step for m in history] == [1, 2]
    assert [m.value for m in history] == [r["test"]["accuracy"] for r in records]


@pytest.mark.filterwarnings("ignore")  # of Weights & Biases about its own dependencies
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    records = train(tmp_path, monkeypatch, "--wandb")
    (log,) = Path("r/wandb").glob("offline-run-*/run-*.wandb")
    written = log.read_bytes()
    assert b"test/accuracy" in written
    for record in records:  # values are kept as JSON text
        assert json.dumps(record["test"]["accuracy"]).encode() in written
    assert b'"name":"fedfac"' in written.replace(b" ", b"")  # the method, in the config


@pytest.mark.parametrize(
    ("build", "module", "extra"),
    [
        (lambda: TensorBoard("x"), "torch.utils.tensorboard", "tensorboard"),
        (lambda: MLflow("x"), "mlflow", "mlflow"),
        (lambda: WandB("x"), "wandb", "wandb"),
    ],
)
def test_what_is_not_installed_is_named(build: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text = message(ConfigError, build)
    assert f"{extra} is not installed" in text
    assert text.endswith(f"pip install 'fedfac[{extra}]'")


def test_a_comparison_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedfac import comparison

    comparison.plan(tmp_path / "c", methods=["fedavg"], tables={"data": {"clients": 4}})
    assert main(["resume", str(tmp_path / "c"), "--wandb"]) == 1
    assert "'fedfac report' shows it" in capsys.readouterr().err
