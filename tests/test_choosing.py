"""Choosing a method: what it looks at, what it picks where the answer is clear, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bitwise, message
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.choosing import trials
from fedfac.choosing.candidates import candidates, is_open, warmup_of
from fedfac.choosing.choice import Choice
from fedfac.choosing.choose import for_trials, settle
from fedfac.cli import main
from fedfac.commands.flags import of_one_method
from fedfac.config import Config
from fedfac.errors import ConfigError, DataError, TrainingError
from fedfac.method import Method, Phase, Plan, Step, Training
from fedfac.progress import RoundProgress
from fedfac.rounds import Session
from fedfac.settings import Settings
from fedfac.split import Split
from fedfac.switches import Proximal, Refresh, ServerMomentum, Warmup
from fedfac.training import Local
from fedfac.tuning import automatic

LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 16, "lr": 0.01}
QUICK = ["--clients", "8", "--cohort", "4", "--epochs", "1", "--rounds", "10", "--model", "mlp", "--quiet"]


def mlp(hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def federation(rule: str, *, clients: int = 10, test_flipped: bool = False, **more: Any) -> fedfac.Federation:
    """Clients of 40 samples that agree on what is a 1, or each the other way round than its neighbour."""
    draws = torch.Generator().manual_seed(1)
    made = []
    for number in range(clients):
        x = torch.randn(60, 6, generator=draws)
        score = x[:, 0] + x[:, 1] - x[:, 2]
        y = ((score > 0) ^ (rule == "contradictory" and number % 2 == 1)).long()
        y_test = 1 - y[40:] if test_flipped else y[40:]
        made.append((x[:40], y[:40], x[40:], y_test))
    return fedfac.Federation.from_arrays(made, **more)


def plus(**options: Any) -> Method:
    return methods.build("fedfac-plus", options)


def choose(rule: str, **more: Any) -> Choice:
    given = {key: more.pop(key) for key in ("clients", "test_flipped", "validation_share") if key in more}
    return fedfac.choose(mlp(), federation(rule, **given), **({"rounds": 40, "cohort": 5, **LOCAL} | more))


def test_clients_that_agree_keep_hardly_anything_for_themselves_and_lose_nothing_by_it() -> None:
    choice = choose("common")
    (chosen,) = [trial for trial in choice.trials if trial.verdict == "chosen"]
    assert chosen.personal is not None
    assert chosen.personal < 0.01
    fit: dict[str, Any] = {"rounds": 20, "cohort": 5, **LOCAL}
    found, plain = (
        fedfac.fit(mlp(), federation("common"), method=method, **fit).accuracy
        for method in (choice.method, methods.fedavg())
    )
    assert found > plain - 0.02


def test_clients_that_contradict_each_other_get_something_personal_and_it_is_better() -> None:
    choice = choose("contradictory")
    by_name = {trial.label.partition(":")[0]: trial for trial in choice.trials}
    assert choice.method.name not in ("fedavg", "fedavg+")
    assert (by_name["fedavg"].figure or 0) < 0.65
    fit: dict[str, Any] = {"rounds": 20, "cohort": 5, **LOCAL}
    chosen = fedfac.fit(mlp(), federation("contradictory"), method=choice.method, **fit)
    assert (
        chosen.accuracy > fedfac.fit(mlp(), federation("contradictory"), method=methods.fedavg(), **fit).accuracy + 0.2
    )


def test_test_samples_make_no_difference() -> None:
    assert choose("contradictory").to_dict() == choose("contradictory", test_flipped=True).to_dict()


def test_the_same_seed_chooses_the_same_with_any_number_of_lanes() -> None:
    first = choose("contradictory", lanes=1).to_dict()
    assert choose("contradictory", lanes=2).to_dict() == first
    assert choose("contradictory", lanes=1, seed=1).to_dict()["trials"] != first["trials"]


def test_what_trials_train_on() -> None:
    whole = federation("common")
    held = for_trials(whole, seed=0)
    for client in range(len(whole)):
        data = held.client(client)
        assert len(data.test) == 0
        assert len(data.validation) == 8  # a fifth
        together = torch.cat([data.train, data.validation]).sort().values
        assert torch.equal(together, whole.client(client).train.sort().values)
    given = federation("common", validation_share=0.5)
    assert len(for_trials(given, seed=0).client(0).validation) == len(given.client(0).validation) == 20


@pytest.mark.parametrize(
    ("method", "trunk"),
    [
        (plus(warmup=3, server_momentum=0, proximal=0, prior=0), automatic.probe()),
        (methods.fedper() | Warmup(3), methods.fedavg()),
        # with momentum, class frequencies, the term and a mean over rounds
        (plus(warmup=3), plus(tau=0, refresh_trains="head")),
        (plus(warmup=3, joint=False, refresh_trains="head"), plus()),
        (plus(warmup=3, head="personal", prior=2), plus(prior=2)),
    ],
)
def test_a_session_that_goes_on_from_the_trunk_is_the_one_that_warmed_up(method: Method, trunk: Method) -> None:
    settings = Settings(rounds=5, cohort=5, evaluate_every=9, stack=False)
    local = Local(**LOCAL)
    with Session(mlp(), federation("contradictory"), method, local, settings) as straight:
        while not straight.finished:
            straight.step()
    with Session(mlp(), federation("contradictory"), trunk, local, settings) as begun:
        for _ in range(3):
            begun.step()
    with Session(mlp(), federation("contradictory"), method, local, settings) as branch:
        branch.go_on_from(begun)
        while not branch.finished:
            branch.step()
        assert bitwise(branch.server, straight.server)
        assert bitwise(branch.velocity, straight.velocity)
        assert branch.split == straight.split
        if branch.server.keys() == begun.server.keys() and trunk.name != "probe":
            assert bitwise(branch.averaged, straight.averaged)
        words = message(ConfigError, lambda: branch.go_on_from(begun))
    assert words == "a session goes on from another one of the same model, and before its own first round"


def test_who_begins_like_whom() -> None:
    """One trunk for all that do the same while everything is shared; none for those that cannot."""

    def begins(method: Method) -> Any:
        return trials.begins_as(trials.planned(method, mlp()))

    groups: list[list[Method]] = [
        [methods.fedavg(), methods.fedavg_plus(), methods.fedper(), methods.fedfac(), methods.random_split()],
        [plus(), plus(tau=0, refresh_trains="head"), plus(joint=False, layers=[1])],
        [plus(prior_smoothing="learned"), plus(prior_smoothing="learned", tau="inf")],
        [methods.fedprox(mu=0.5), methods.fedprox_plus(mu=0.5), methods.fedper() | Proximal(0.5)],
        [methods.fedper() | Proximal(0.5) | ServerMomentum(0.5)],
        [methods.fedrep()],
    ]
    for one in groups:
        for other in groups:
            alike = {begins(a) == begins(b) for a in one for b in other}
            assert alike == {one is other}
    assert begins(methods.fedavg()) == trials.FEDAVG
    assert [begins(m) for m in (methods.ditto(), methods.apfl(), methods.pfedme(), methods.fedem())] == [None] * 4
    # what was left to the network is what it decides
    normal = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    free = plus(proximal=0)
    assert trials.planned(plus(), normal).training == trials.planned(free, normal).training
    assert trials.planned(plus(), mlp()).training != trials.planned(free, mlp()).training


def test_a_candidate_is_tried_as_it_is() -> None:
    """Its server and its loss are the run's; only what a client would have kept is caught up with."""
    anatomy = Anatomy.of(mlp())
    trial = trials.OnTrial(trunk=7, alone=3)
    for method in (plus(prior=0), plus(tau=0, refresh_trains="head", prior=0)):
        tried, asked = (method | trial).plan(anatomy), method.plan(anatomy)
        assert tried.training == asked.training
        assert tried.training.server.momentum == 0.5
        assert tried.prediction.refresh == asked.prediction.refresh
    kept = (methods.fedper() | Refresh(1, shrinkage=0.5) | trial).plan(anatomy)
    assert (kept.warmup, kept.training.warmup) == (7, 7)
    assert [(phase.epochs, phase.shrinkage) for phase in kept.prediction.refresh] == [(None, 0.5)] * trials.CATCH_UP
    alone = (methods.local() | trials.OnTrial(trunk=7, alone=4)).plan(anatomy)
    assert alone.prediction.refresh == (Phase(trains="personal"),) * 4
    twin = methods.ditto() | trial
    assert twin.plan(Anatomy.of(twin.wrapped(mlp()))).warmup == 0


def test_differences_are_paired_by_client_and_weighted_by_samples() -> None:
    best = {0: (9.0, 10.0), 1: (24.0, 30.0)}
    other = {0: (6.0, 10.0), 1: (23.0, 30.0)}
    behind, error = trials.paired(best, other)  # gaps of 3 and 1 in 40 samples; 10 and 30 of them expect 1 and 3
    assert behind == pytest.approx(4 / 40)
    assert error == pytest.approx(math.sqrt(2 * (2**2 + 2**2)) / 40)
    assert trials.paired({0: (9.0, 10.0)}, {0: (6.0, 10.0)})[1] == math.inf  # one client cannot tell


def test_the_simpler_one_is_chosen_within_noise_and_the_reason_says_so() -> None:
    choice = choose("common", candidates=[methods.fedper() | Refresh(1), methods.fedavg_plus(), methods.fedavg()])
    rows = {trial.label: trial for trial in choice.trials}
    assert [rows[name].personal for name in ("fedavg", "fedavg+")] == [0, 0]
    assert (rows["fedper"].personal or 0) > 0
    best = max(rows.values(), key=lambda row: row.figure or 0)
    chosen = rows[choice.method.name]
    if chosen.behind:
        assert (chosen.behind or 0) <= (chosen.error or 0)
        assert f"{best.label} is ahead of {chosen.label} by" in choice.reason
        assert "within noise" in choice.reason
    else:
        assert f"{chosen.label} does best on validation samples" in choice.reason


@pytest.mark.parametrize(
    ("simple", "going"),
    [
        ([9.0, 6.0, 8.5], ["simple", "rich"]),  # behind by .5 of 30, with a standard error of 1.1 or so: it stays
        ([5.0, 5.0, 5.0], ["rich", "middle"]),  # clearly behind
        ([9.0, 2.0, 9.0], ["simple", "rich"]),  # far behind, but too uncertain to say so
    ],
)
def test_ranking(simple: list[float], going: list[str]) -> None:
    """The rule by itself, on tallies made by hand: the simplest within one standard error stays, then the best."""
    labels = ["simple", "middle", "rich"]

    class Fixed:
        def __init__(self, place: int, hits: list[float]) -> None:
            self.place, self.label, self.rounds = place, labels[place], 9
            self.tally = {client: (hit, 10.0) for client, hit in enumerate(hits)}
            self.score, self.simplicity = sum(hits) / 30, (place / 10, place)

    entrants: list[Any] = [Fixed(0, simple), Fixed(1, [7.0, 7.0, 7.0]), Fixed(2, [8.0, 8.0, 8.0])]
    judge = trials.Trials(lambda method: pytest.fail("nothing is trained"), budget=1, trunk=1)
    assert [entrant.label for entrant in judge._ranked(entrants, 2, "accuracy")] == going
    assert [judge._ranked(entrants, 1, "accuracy")[0].label] == going[:1]
    assert judge.rows[going[0]].verdict == "chosen"
    further_behind_and_as_good = sum(simple) < 21 and going[0] == "simple"
    assert judge.rows["middle"].verdict == ("as good within noise" if further_behind_and_as_good else "not as good")


def test_targets_that_are_numbers_are_judged_by_loss() -> None:
    draws = torch.Generator().manual_seed(0)
    clients = []
    for number in range(8):
        x = torch.randn(50, 6, generator=draws)
        clients.append((x, x[:, :1] * (1 if number % 2 else -1)))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    choice = fedfac.choose(
        model, fedfac.Federation.from_arrays(clients), rounds=40, loss=nn.functional.mse_loss, **LOCAL
    )
    assert choice.metric == "loss"
    assert choice.method.name not in ("fedavg", "fedavg+")
    figures = {trial.label: trial.figure or 0 for trial in choice.trials}
    assert min(figures.values()) < 0.7 < figures["fedavg"]


def test_a_model_without_hidden_layers_has_fewer_candidates() -> None:
    choice = fedfac.choose(nn.Sequential(nn.Linear(6, 2)), federation("common"), rounds=20, cohort=5, **LOCAL)
    assert [trial.label for trial in choice.trials] == ["fedavg", "fedavg+", "local"]


def test_methods_of_your_own_choosing_and_a_method_that_fails() -> None:
    def broken(step: Step) -> Tensor:
        return step.loss(step.model(step.inputs), step.targets) * torch.nan

    def base(anatomy: Anatomy) -> Plan:
        return Plan(training=Training(split=Split.of(anatomy), phases=(Phase(objective=broken),)))

    bad = Method(name="bad", base=base)
    choice = choose("contradictory", candidates=[methods.fedprox(mu=1.0), methods.ditto(), bad], rounds=20)
    rows = {trial.label: trial for trial in choice.trials}
    assert choice.method.name == "ditto"  # two models a client, trained from the start
    assert rows["bad"].verdict.startswith("failed: round 1: no client of the cohort trained to finite numbers")
    words = message(TrainingError, lambda: choose("common", candidates=[bad, replace(bad, name="worse")]))
    assert words.startswith("no candidate could be trained. The first one: round 1")


def test_what_it_costs() -> None:
    seen: list[tuple[str, int]] = []
    short = {"clients": 10, "rounds": 60}
    choice = choose("common", on_round=lambda label, cost, most, record: seen.append((label, cost)), **short)
    labels = [label for label, _ in seen]
    # half of 60 rounds, for FedAvg's beginning and for FedFac+'s, each once for all that begin so
    assert labels[:30] == ["all alike"] * 15 + ["fedfac-plus:tau=0:refresh_trains=head"] * 15
    first_stage = labels[30 : labels.index("fedfac-plus:layers=2:joint=False:refresh_trains=head:warmup=6")]
    assert list(dict.fromkeys(first_stage)) == [  # fedavg+ is trained with fedavg, one FedFac+ with the other
        "fedavg",
        "fedper:warmup=6:refresh=3",
        "fedfac-plus:tau=0:refresh_trains=head",
    ]
    assert [cost for _, cost in seen] == sorted(cost for _, cost in seen)
    assert seen[-1][1] <= choice.cost
    for most in (45, 60, 120):  # 45 is the least that is taken; without a word it is about as much as the run
        assert choose("common", trial_rounds=most, **short).cost <= most
    assert choice.cost < choose("common", trial_rounds=120, **short).cost


def test_candidates_that_train_alike_are_judged_as_if_each_had_trained() -> None:
    """The lead may be dropped, and another one go on by itself: no figure depends on who leads."""
    alike = [
        plus(tau=0, refresh_trains="head"),
        plus(),
        plus(layers=[1], tau="75%"),
    ]
    together = choose("contradictory", candidates=alike)
    turned = choose("contradictory", candidates=alike[::-1])
    figures, others = ({trial.label: trial.figure for trial in c.trials} for c in (together, turned))
    assert len(figures) == 3
    assert figures == others


@pytest.mark.parametrize(("layers", "probed"), [("auto", 2), (["fc1"], 0)])
def test_the_elements_of_one_method_are_chosen_in_one_training(layers: Any, probed: int) -> None:
    """FedFac+'s Λ and τ say what its clients refresh, not what they train; FedAvg is there for the probe only."""
    seen: list[str] = []
    asked = {"name": "fedfac-plus", "layers": layers, "tau": "auto"}
    data, train = {"clients": 6}, {"rounds": 30, "epochs": 1, "cohort": 3}
    choice = settle(
        Config.from_dict({"data": data, "train": train, "method": asked}), on_round=lambda *told: seen.append(told[0])
    )
    trained = max(trial.rounds for trial in choice.trials)
    assert seen[:probed] == ["all alike"] * probed
    assert len(seen) == probed + trained  # each round once
    assert trained >= 10
    assert len(choice.trials) >= 4


def test_the_short_list() -> None:
    anatomy = Anatomy.of(mlp())
    found = candidates({"name": "auto"}, anatomy, rounds=50, picked="0")
    assert [c.label for c in found] == [
        "fedavg",
        "fedavg+",
        "fedper:warmup=5:refresh=3",
        "fedfac-plus:tau=0:refresh_trains=head",
        "fedfac-plus:layers=2",
        "fedfac-plus:layers=1",
        "fedfac-plus:layers=2:joint=False:refresh_trains=head:warmup=5",
        "fedfac-plus:layers=1:joint=False:refresh_trains=head:warmup=5",
        "local",
    ]
    fewer = candidates({"name": "auto", "layers": [1], "tau": "50%", "warmup": 0}, anatomy, rounds=50, picked=None)
    assert [c.label for c in fewer][2:6] == [
        "fedper:warmup=0:refresh=3",
        "fedfac-plus:tau=50%:refresh_trains=head:layers=1:warmup=0",
        "fedfac-plus:layers=1:tau=50%:warmup=0",
        "fedfac-plus:layers=1:joint=False:refresh_trains=head:warmup=0:tau=50%",
    ]
    own = candidates({"name": "auto", "head": "personal"}, anatomy, rounds=50, picked=None)
    assert [c.asked["head"] for c in own if c.asked["name"] == "fedfac-plus"] == ["personal"] * 3
    left = candidates({"name": "auto", "tau": "auto"}, anatomy, rounds=50, picked="0")
    assert [c.label for c in left] == [c.label for c in found]  # the variants have some
    one = candidates({"name": "fedfac", "layers": ["auto"], "kappa": 0.9}, anatomy, rounds=50, picked="0")
    assert [c.asked for c in one] == [{"name": "fedfac", "layers": [number], "kappa": 0.9} for number in (2, 1)]
    assert [c.asked["tau"] for c in candidates({"name": "fedfac", "tau": "auto"}, anatomy, rounds=9, picked=None)] == [
        "0",
        "25%",
        "50%",
        "75%",
    ]
    assert [warmup_of(rounds) for rounds in (10, 50, 500)] == [2, 5, 10]
    assert is_open({"name": "fedfac", "layers": "auto"})
    assert not is_open({"name": "fedfac", "layers": [2], "tau": "50%"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"rounds": 9},
            "a run of 9 rounds is too short to choose a method for: give it 10 rounds or more, or name the method, the "
            "layers and tau",
        ),
        (
            {"trial_rounds": 20},
            "trial_rounds is 20; up to 9 candidates take 45 rounds at least. Raise it, or leave less open: --layers "
            "and --tau take values, too",
        ),
        (
            {"candidates": []},
            "candidates is empty: give at least one method, or leave it out for the short list",
        ),
        (
            {"candidates": [methods.fedavg(), methods.fedavg()]},
            "candidates has fedavg() twice: give each method once",
        ),
    ],
)
def test_errors(arguments: dict[str, Any], words: str) -> None:
    assert message(ConfigError, lambda: choose("common", **arguments)) == words


def test_clients_too_small_to_hold_anything_out() -> None:
    x = np.ones((2, 6), dtype=np.float32)
    tiny = fedfac.Federation.from_arrays([(x, np.array([0, 1]))] * 3, test_share=0)
    assert message(DataError, lambda: fedfac.choose(mlp(), tiny)) == (
        "no client has samples enough to hold some out for validation, and a choice looks at nothing else: name a "
        "method, or cut the data into fewer clients"
    )


# --- the command line ----------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_auto_is_an_ordinary_run_of_the_chosen_method(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "run", "--method", "auto", *QUICK, "--alpha", "0.05", "--json", "--out", "a")
    assert status == 0
    said = json.loads(out)
    choice = said["choice"]
    assert said["method"] == choice["method"]["name"] != "fedavg"
    assert choice["metric"] == "validation accuracy"
    assert sum(trial["verdict"] == "chosen" for trial in choice["trials"]) == 1
    saved = json.loads((folder / "a/config.json").read_text())
    assert saved["choice"] == choice
    assert saved["origin"]["method"] == choice["method"]
    # it trains on everything: the very bytes of a run that was asked for by name
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in choice["method"].items())
    Path("b.toml").write_text(f"[method]\n{table}\n")
    assert main(["run", "--config", "b.toml", *QUICK, "--alpha", "0.05", "--out", "b"]) == 0
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()
    capsys.readouterr()
    # resume goes on with it and chooses nothing
    status, out, _ = call(capsys, "resume", "a", "--rounds", "11", "--json", "--quiet")
    assert (status, json.loads(out)["rounds"], json.loads(out)["choice"]) == (0, 11, choice)
    assert fedfac.load("a").accuracy > 0
    status, out, _ = call(capsys, "inspect", "a")
    assert choice["reason"] in out
    assert json.loads(call(capsys, "inspect", "b", "--json")[1])["choice"] is None


def test_a_config_file_and_a_table_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("auto.toml").write_text('[method]\nname = "fedfac-plus"\nlayers = "auto"\ntau = "auto"\nwarmup = 3\n')
    status, out, err = call(capsys, "run", "--config", "auto.toml", *QUICK[:-1], "--trial-rounds", "50")
    assert status == 0
    assert "choosing holds out 20% of each client's training samples for validation; the run has them again" in err
    assert "validation accuracy" in out
    assert "fedfac-plus:layers=fc1:tau=25%:warmup=3" in out
    chosen = json.loads(Path("runs/digits-fedfac-plus-1/config.json").read_text())["origin"]["method"]
    assert chosen["name"] == "fedfac-plus"
    assert chosen["tau"] in ("0", "25%", "50%", "75%")
    assert chosen["warmup"] == 3


def test_a_file_for_a_comparison_gives_its_options_to_the_candidates_that_have_them() -> None:
    tables = {"compare": {}, "method": {"name": "auto", "layers": ["fc1"], "head_epochs": 2, "trial_rounds": 60}}
    assert of_one_method(tables)["method"] == {"name": "auto", "layers": ["fc1"], "trial_rounds": 60}


def test_an_interrupted_choice_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = RoundProgress.__call__

    def interrupted(self: RoundProgress, record: dict[str, Any]) -> None:
        told(self, record)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RoundProgress, "__call__", interrupted)
    status, _, err = call(capsys, "run", "--method", "auto", *QUICK[:-1], "--out", "a")
    assert status == 130
    assert "stopped while choosing; nothing was written. The same command begins again" in err
    assert not (folder / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "--method", "auto", "--head-epochs", "2"],
            "none of the methods that 'auto' chooses from (fedavg, fedavg+, fedper, fedfac-plus, local) has an option "
            "'head_epochs'.",
        ),
        (
            ["run", "--method", "fedavg", "--trial-rounds", "5"],
            "trial_rounds goes with a choice: --method auto, --layers auto or --tau auto",
        ),
        (["run", "--method", "auto", "--layers", "fc9"], "the model has no layer 'fc9'"),
        (["run", "--method", "fedper", "--tau", "auto"], "method 'fedper' has no option 'tau'"),
        (
            ["compare", "--methods", "auto,fedavg"],
            "'auto' is a choice among methods, which 'fedfac run --method auto' (in Python fedfac.choose) makes; here, "
            "name the method that it chose",
        ),
    ],
)
def test_errors_of_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status, _, err = call(capsys, *arguments)
    assert status == 1
    assert words in err
    assert list(folder.iterdir()) == []


def test_choosing_needs_no_extra() -> None:
    program = (
        "import sys, fedfac.choosing.choose, fedfac.commands.run; "
        "print([m in sys.modules for m in ('optuna', 'flwr', 'datasets')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False, False]\n"
