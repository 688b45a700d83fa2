"""Methods that train alike are trained once, and each becomes the run that it would have become by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import message

from fedfac import comparison, experiment, methods
from fedfac.anatomy import Anatomy
from fedfac.comparison import Cell, Comparison
from fedfac.conformance import small_model
from fedfac.engine.lanes import LaneEngine
from fedfac.errors import ConfigError
from fedfac.method import Training
from fedfac.run import RunDirectory
from fedfac.state import same

TRAIN = {"rounds": 4, "cohort": 3, "epochs": 1, "batch_size": 16, "newcomers": 0.2, "evaluate_every": 2}
GROUPS = [
    ["fedavg", "fedavg+:refresh=2", "fedavg+:refresh=1:average=0.5", "fedavg:average=0.9"],
    ["fedavg:server_momentum=0.5", "fedavg+:refresh=1:server_momentum=0.5:average=0.9"],
    ["fedprox:mu=0.1", "fedprox+:mu=0.1:refresh=1", "fedprox:mu=0.1:average=0.9"],
    [
        "fedfac-plus:proximal=0.1",
        "fedfac-plus:proximal=0.1:tau=inf",
        "fedfac-plus:proximal=0.1:tau=0:refresh_trains=head",
    ],
    ["fedper:warmup=1", "fedper:warmup=1:refresh=1:average=0.5"],
    ["fedrep:server_momentum=0.5", "fedrep:refresh=2:average=0.5:server_momentum=0.5"],
    ["fedbabu:refresh=1", "fedbabu:refresh=1:refresh_trains=head"],
    ["fedfac", "fedfac:refresh=1:average=0.9"],
    ["fedfac-static:refresh=1", "fedfac-static"],
    [
        "fedfac-plus:warmup=1:head=personal:proximal=0.01",
        "fedfac-plus:warmup=1:head=personal:proximal=0.01:refresh_trains=all",
        "fedfac-plus:warmup=1:head=personal:proximal=0.01:average=0:refresh=0",
        "fedfac:head=personal:warmup=1:joint=true:prior=1:average=0.5:server_momentum=0.5:proximal=0.01",
    ],
    ["fedfac-plus:warmup=1", "fedfac-plus:warmup=1:refresh_trains=head", "fedfac-plus:warmup=1:refresh=0"],
    [  # what all clients train: everyone decides for itself, what it measures is not what the first one does
        "fedfac-plus",
        "fedfac-plus:decay=0:hysteresis=0:kappa=0.6",
        "fedfac-plus:tau=inf",
        "fedfac-plus:layers=2:on=updates:norm=shared",
        "fedfac-plus:warmup=2",
        "fedfac-plus:warmup=2:tau=75%",
        "fedfac-plus:tau=0:refresh_trains=head:refresh_shrinkage=0.5",
    ],
    ["fedfac-plus:tau=0:refresh_trains=head", "fedfac-plus:tau=10%"],
    ["fedfac-plus:prior_smoothing=learned:tau=25%", "fedfac-plus:prior_smoothing=learned:layers=2"],
    [
        "fedavg+:refresh=1:server_momentum=0.5",
        "fedfac-plus:proximal=0:prior=0",
        "fedfac:joint=true:server_momentum=0.5",
    ],
]


def planned(out: Path, labels: list[str]) -> Comparison:
    tables: dict[str, Any] = {"data": {"clients": 6}, "train": TRAIN}
    if any(label.startswith("fedfac") for label in labels):
        tables["method"] = {"layers": [3]}
    return comparison.plan(out, methods=labels, tables=tables)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that are trained."""
    seen: list[int] = []
    usually = LaneEngine.train

    def train(self: LaneEngine, round: int, *rest: Any) -> Any:
        seen.append(round)
        return usually(self, round, *rest)

    monkeypatch.setattr(LaneEngine, "train", train)
    return seen


def same_run(cell: Cell, folder: Path) -> None:
    """Records, states, decisions, clients' parts: all that two runs have."""
    one, other = RunDirectory.read(cell.folder), RunDirectory.read(folder)
    assert one.records() == other.records()
    assert one.masks() == other.masks()
    assert one.clients() == other.clients()
    a, b = one.checkpoint(), other.checkpoint()
    assert a is not None
    assert b is not None
    assert same(a.server, b.server)
    assert same(a.averaged, b.averaged)
    assert same(a.velocity, b.velocity)
    assert same(a.memory, b.memory)
    for client in range(6):
        mine, theirs = one.get(client), other.get(client)
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or same(mine, theirs)


@pytest.mark.parametrize("labels", GROUPS, ids=lambda labels: labels[0])
def test_each_is_the_run_that_it_is_alone(labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = planned(tmp_path / "together", labels)
    assert [len(group) for group in comparison.groups(together)] == [len(labels)]
    rounds = watch(monkeypatch)
    assert comparison.train(together) == {}
    assert [r for r in rounds if r] == [1, 2, 3, 4]
    for number, cell in enumerate(together.cells):
        experiment.run(cell.config, out=tmp_path / str(number))
        same_run(cell, tmp_path / str(number))
    accuracies = {str(RunDirectory.read(cell.folder).records()[-1]["test"]["loss"]) for cell in together.cells}
    assert len(accuracies) == len(labels)  # what they predict is not the same


def test_what_differs_in_training_is_not_alike() -> None:
    def training(name: str, **options: Any) -> Training:
        method = methods.build(name, options)
        return method.plan(Anatomy.of(method.wrapped(small_model()))).training

    assert training("fedavg") != training("fedprox", mu=0.0)  # the same numbers, but nobody promised it
    assert training("fedavg") != training("fedavg", server_rate=0.5)
    assert training("fedper") != training("fedper", warmup=1)
    assert training("fedper") != training("fedper", prior=1.0)
    assert training("fedfac") != training("fedfac-static")
    assert training("fedfac", tau="50%") != training("fedfac", tau="75%")
    assert training("fedfac-plus") != training("fedfac-plus", prior=0.0)
    assert training("fedfac-plus") != training("fedfac-plus", prior_smoothing="learned")
    assert training("fedfac-plus") != training("fedfac-plus", server_momentum=0.0)
    for options in ({"joint": False}, {"schedule": "static"}):
        assert training("fedfac-plus", **options) != training("fedfac-plus", **options, tau="75%")
    assert training("random") != training("random-redrawn")
    assert training("fedem") != training("fedem", component_seed=1)
    assert training("apfl") != training("apfl", mix=0.4)  # which only the network that it makes tells


def test_jointly_trained_elements_say_nothing_about_the_training_whatever_else_is_personal() -> None:
    def training(**options: Any) -> Training:
        method = methods.build("fedfac-plus", options)
        return method.plan(Anatomy.of(method.wrapped(small_model()))).training

    for options in ({}, {"head": "personal"}, {"prior": 0}):
        assert training(**options) == training(**options, tau="75%") == training(**options, layers=[1], on="updates")


def test_a_run_that_is_ahead_goes_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill may leave one of them a round further than the other."""
    labels = ["fedper", "fedper:refresh=1", "fedper:average=0.5"]
    together = planned(tmp_path / "together", labels)
    first = together.cells[0]
    stops = iter([False, True])
    experiment.run(first.config, out=first.folder, should_stop=lambda: next(stops))
    assert comparison.rounds_done(first) == 2
    assert [[cell.method for cell in group] for group in comparison.groups(together)] == [labels[:1], labels[1:]]
    rounds = watch(monkeypatch)
    assert comparison.train(together) == {}
    assert rounds == [3, 4, 1, 2, 3, 4]
    for number, cell in enumerate(together.cells):
        experiment.run(cell.config, out=tmp_path / str(number))
        same_run(cell, tmp_path / str(number))


@pytest.mark.parametrize(
    "labels",
    [
        ["fedfac-plus:warmup=1", "fedfac-plus:warmup=1:refresh_shrinkage=0.5"],
        [
            "fedavg:server_momentum=0.5",
            "fedfac-plus:proximal=0:prior=0:layers=2",
            "fedfac-plus:proximal=0:prior=0:decay=0:tau=75%",
        ],
    ],
    ids=lambda labels: labels[0],
)
def test_stopped_in_between_they_go_on_together(
    labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = planned(tmp_path / "together", labels)
    answers = iter([False, False, True, True])
    comparison.train(together, should_stop=lambda: next(answers))
    assert [comparison.rounds_done(cell) for cell in together.cells] == [2] * len(labels)
    rounds = watch(monkeypatch)
    assert comparison.train(together) == {}
    assert rounds == [3, 4]
    for number, cell in enumerate(together.cells):
        experiment.run(cell.config, out=tmp_path / str(number))
        same_run(cell, tmp_path / str(number))


def test_if_the_one_that_trains_fails_the_next_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = planned(tmp_path / "together", ["fedavg", "fedavg+:refresh=1", "fedavg+:refresh=2"])
    usually = LaneEngine.evaluate

    def breaks(self: LaneEngine, round: int, *rest: Any) -> Any:
        if not self.plan.prediction.refresh:
            raise RuntimeError("no room")
        return usually(self, round, *rest)

    monkeypatch.setattr(LaneEngine, "evaluate", breaks)
    failed = comparison.train(together)
    assert failed == {together.cells[0].folder: "RuntimeError: no room"}
    assert [comparison.is_finished(cell) for cell in together.cells] == [False, True, True]
    for number, cell in enumerate(together.cells[1:]):
        experiment.run(cell.config, out=tmp_path / str(number))
        same_run(cell, tmp_path / str(number))


def test_a_session_repeats_only_what_trains_as_it_does(tmp_path: Path) -> None:
    cells = planned(tmp_path / "x", ["fedavg", "fedper", "fedavg+:refresh=1"]).cells
    one, other, late = (experiment.session(cell.config) for cell in cells)
    with one, other, late:
        one.step()
        assert message(ConfigError, lambda: other.step(like=one)) == "fedper cannot repeat round 1 of fedavg"
        one.step()
        assert message(ConfigError, lambda: late.step(like=one)) == "fedavg+ cannot repeat round 2 of fedavg"


@pytest.mark.parametrize(
    ("labels", "sets"),
    [
        (["fedavg+:refresh=1", "fedfac-plus:proximal=0:prior=0:server_momentum=0", "fedavg"], 1),
    ],
)
def test_those_that_take_turns_have_one_set_of_lanes(
    labels: list[str], sets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    usually = LaneEngine._made_lanes

    def counts(self: LaneEngine, model: Any) -> Any:
        made.append(model)
        return usually(self, model)

    monkeypatch.setattr(LaneEngine, "_made_lanes", counts)
    together = planned(tmp_path / "together", labels)
    assert [len(group) for group in comparison.groups(together)] == [len(labels)]
    assert comparison.train(together) == {}
    assert len(made) == sets
