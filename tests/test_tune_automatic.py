"""Λ from two rounds: what is measured, from what, and at which cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise, message

from fedfac import experiment
from fedfac.aggregate import Sums
from fedfac.anatomy import Anatomy
from fedfac.cli import main
from fedfac.config import Config
from fedfac.errors import ConfigError
from fedfac.method import check_method
from fedfac.models import build
from fedfac.moments import Spread
from fedfac.rounds import Session
from fedfac.rules import Asked
from fedfac.tuning import automatic

CONFIG = Config.from_dict(
    {
        "data": {"clients": 8, "partition": "pathological"},
        "train": {"rounds": 30, "cohort": 6, "epochs": 1, "batch_size": 8},
    }
)


def spread_of(updates: list[list[float]]) -> Spread:
    """Clients whose layer of one element has these updates."""
    layer = Anatomy.of(torch.nn.Sequential(torch.nn.Linear(2, 1))).layers[0]
    zero = {"0.weight": torch.zeros(1, 2)}
    parts = [Spread.of(layer, {"0.weight": torch.tensor([u])}, minus=zero) for u in updates]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize(
    ("updates", "power", "between"),
    [
        ([[3, 4], [3, 4]], 25, 0),  # all clients agree
        ([[1, 0], [-1, 0]], 1, 2),  # they cancel: nothing in common; K/(K−1) = 2
        ([[1, 0], [0, 1], [1, 0], [0, 1]], 1, 2 / 3),  # half of the power is in the mean
    ],
)
def test_what_is_not_in_common(updates: list[list[float]], power: float, between: float) -> None:
    notes = automatic.UpdateRule({}).score(Asked("fc1", 1, spread_of(updates), seed=0, round=1)).notes
    assert notes == pytest.approx({"power": power, "between": between})


def test_independent_updates_have_nothing_in_common() -> None:
    draws = torch.randn(4, 5, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratios = []
    for sample in draws:
        total = Spread(5, sample.sum(0, keepdim=True), sample.square().sum().reshape(1))
        notes = automatic.UpdateRule({}).score(Asked("fc1", 1, total, seed=0, round=1)).notes
        ratios.append(notes["between"] / notes["power"])
    assert sum(ratios) / 4 == pytest.approx(1, abs=0.02)  # without K/(K−1) it would be .8


def test_the_probe_is_fedavg_that_measures() -> None:
    check_method(automatic.probe())
    asked = experiment.session(CONFIG, method=automatic.probe(), rounds=2)
    usual = Config.from_dict({**CONFIG.to_dict(), "method": {"name": "fedavg"}})
    plain = experiment.session(usual, rounds=2)
    asked.drive()
    plain.drive()
    assert bitwise(asked.server, plain.server)


def test_two_rounds_and_only_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    crossed: list[Any] = []
    step = Session.step

    def listened(call: Any) -> Any:
        def ask(what: Any) -> Any:
            crossed.append(call(what))
            return crossed[-1]

        return ask

    def watched(self: Session) -> dict[str, Any]:
        if not steps:
            for name in ("moments", "collect"):
                setattr(self.engine, name, listened(getattr(self.engine, name)))
        steps.append(self.next_round)
        return step(self)

    monkeypatch.setattr(Session, "step", watched)
    choice = automatic.choose(CONFIG)
    assert steps == [1, 2]  # and not the 30 of the config
    assert list(choice.scores) == ["conv1", "conv2", "fc1"]
    assert choice.layer == max(choice.scores, key=lambda name: choice.scores[name])
    assert all(0 < score < 1.3 for score in choice.scores.values())
    for found in crossed:
        if isinstance(found, Sums):
            continue
        for total in found.values():
            assert isinstance(total, Spread)
            assert total.clients == 6  # a sum over the whole cohort, not a client's own


def test_sets_of_layers_are_taken_together() -> None:
    both = automatic.choose(CONFIG, layers=["conv1", "fc1", "conv1+fc1"]).scores
    low, high = sorted((both["conv1"], both["fc1"]))
    assert low < both["conv1+fc1"] < high


def test_a_choice_is_kept(tmp_path: Path) -> None:
    assert automatic.saved(tmp_path) is None
    choice = automatic.Choice("fc1", {"conv1": 0.5, "fc1": 0.75})
    automatic.save(choice, tmp_path)
    assert automatic.saved(tmp_path) == automatic.load(tmp_path) == choice


def test_a_model_without_hidden_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    _, federation, _ = experiment.build(CONFIG)
    monkeypatch.setattr(experiment, "build", lambda config, federation=None: (flat, federation, None))
    said = message(ConfigError, lambda: automatic.choose(CONFIG, federation))
    assert said.startswith("the model has no hidden layer, so there is none to split")
    assert build("mlp", shape=(4,), classes=2, seed=0) is not None


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--clients", "8", "--partition", "pathological", "--cohort", "6", "--epochs", "1", "--batch-size", "8"]
    asked = ["tune", "--auto", "--parameters", "layers", *flags, "--out", str(tmp_path / "s")]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "Λ, from 2 rounds" in shown
    assert "updates not in common" in shown
    assert main([*asked, "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tables"] == {}  # nothing was searched
    tuned = Config.from_dict({**CONFIG.to_dict(), "data": {**CONFIG.to_dict()["data"], "validation_share": 0.2}})
    assert said["automatic"]["scores"] == automatic.choose(tuned).scores
    assert said["config"]["method"]["layers"] == [said["automatic"]["layer"]]
