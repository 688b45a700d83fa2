"""The search for Λ, τ and κ: its order, its tables, that it sees no test data, and that a kill changes nothing."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from helpers import message
from torch import nn

from fedfac import experiment
from fedfac.anatomy import Anatomy
from fedfac.cli import main
from fedfac.config import Config
from fedfac.data import sources
from fedfac.data.pool import ArrayPool, ClientData
from fedfac.data.samples import Samples
from fedfac.engine.lane import Lane
from fedfac.errors import ConfigError, DataError, RunError, TrainingError
from fedfac.records import Record
from fedfac.tuning import plan as plans
from fedfac.tuning import stages, worker
from fedfac.tuning.plan import Search

TABLES: dict[str, Any] = {
    "data": {"clients": 8, "partition": "pathological"},
    "model": {"name": "mlp", "hidden": 8},
    "train": {"rounds": 2, "cohort": 4, "epochs": 1, "batch_size": 8, "lr": 0.01, "evaluate_every": 1, "stack": False},
}
SPACE: Mapping[str, Any] = {"tau": ["25%", "50%"], "kappa": [0.75, 0.85]}
FLAGS = "--clients 8 --partition pathological --model mlp --hidden 8 --cohort 4 --epochs 1 --batch-size 8 --lr 0.01"


def search(out: Path, **changes: Any) -> Search:
    return plans.plan(out, **{"tables": TABLES, "space": SPACE, **changes})


def scores(found: stages.Outcome) -> dict[str, dict[plans.Value, float | None]]:
    return {name: {row.value: row.score for row in rows} for name, rows in found.tables.items()}


def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The methods of all sessions from now on."""
    made: list[dict[str, Any]] = []
    original = experiment.session

    def watched(config: Config, **options: Any) -> Any:
        made.append(dict(config.method))
        return original(config, **options)

    monkeypatch.setattr(experiment, "session", watched)
    return made


def test_one_parameter_after_the_other_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained(monkeypatch)
    found = worker.run(search(tmp_path / "s", space={**SPACE, "layers": ["fc1", "fc2", "fc1+fc2"]}))
    assert found.finished
    assert list(found.tables) == ["layers", "tau", "kappa"]
    table = scores(found)
    for name, best in found.best.items():
        known = {value: score for value, score in table[name].items() if score is not None}
        assert len(known) == len(table[name])
        assert known[best] == max(known.values())
    # Λ at τ = 50 %, κ = .85; then the other τ; then the other κ: what an earlier stage trained is not trained again
    layers = found.chosen.method["layers"]
    assert [m["layers"] for m in made[:3]] == [["fc1"], ["fc2"], ["fc1", "fc2"]]
    assert [(m["layers"], m["tau"], m["kappa"]) for m in made[3:]] == [
        (layers, "25%", 0.85),
        (layers, found.best["tau"], 0.75),
    ]
    assert table["tau"]["50%"] == table["layers"][found.best["layers"]]
    assert not (tmp_path / "s" / "trials").exists()


def test_a_score_is_the_mean_validation_accuracy_of_the_last_ten_rounds(tmp_path: Path) -> None:
    tables = {**TABLES, "train": {**TABLES["train"], "rounds": 14, "evaluate_every": 3}}
    found = worker.run(search(tmp_path / "s", tables=tables, parameters=["tau"], space={"tau": ["75%"]}))
    config = Config.from_dict({**tables, "method": {"tau": "75%"}})
    config = replace(config, data=replace(config.data, validation_share=plans.VALIDATION_SHARE))
    records = experiment.run(config).records
    held = [records[number - 1]["validation"]["accuracy"] for number in (6, 9, 12, 14)]
    assert scores(found) == {"tau": {"75%": pytest.approx(sum(held) / 4)}}


def test_no_test_sample_is_ever_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = worker.run(search(tmp_path / "usual", auto=True))

    def poisoned(config: Any) -> Samples:
        samples = load(config)
        assert isinstance(samples.pool, ArrayPool)
        inputs, targets = samples.pool.inputs.clone(), samples.pool.targets.clone()
        tested = [index for _, test in sources.cut(samples, config, seed=0).values() for index in test]
        assert len(tested) > 300
        inputs[tested], targets[tested] = torch.nan, 9
        return replace(samples, pool=ArrayPool(inputs, targets, samples.pool.prepare))

    load = sources.load_samples
    monkeypatch.setattr(sources, "load_samples", poisoned)
    seen: list[int] = []

    usually = Lane.test

    def watched(self: Lane, client: int, data: ClientData, metrics: Any) -> None:
        seen.extend([*data.test.tolist(), *data.validation.tolist()])
        usually(self, client, data, metrics)

    monkeypatch.setattr(Lane, "test", watched)
    assert worker.run(search(tmp_path / "poisoned", auto=True)) == usual
    search_config = Config.from_dict(TABLES).data
    tested = {int(i) for _, test in sources.cut(load(search_config), search_config, seed=0).values() for i in test}
    assert seen
    assert not tested.intersection(seen)


def test_validation_data_is_held_out_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS.split(), "--rounds", "1", "--parameters", "tau", "--try-tau", "25%"]
    assert main(["tune", *flags, "--out", str(tmp_path / "none")]) == 0
    assert "20% of each client's training samples for validation" in capsys.readouterr().err
    assert main(["tune", *flags, "--validation-share", "0.5", "--out", str(tmp_path / "half")]) == 0
    assert "for validation" not in capsys.readouterr().err
    assert plans.load(tmp_path / "none").tuned.data.validation_share == 0.2
    assert plans.load(tmp_path / "half").tuned.data.validation_share == 0.5
    # what comes out trains on everything that the user gave it
    chosen = (tmp_path / "none" / "chosen.toml").read_text()
    assert "validation_share = 0.0" in chosen
    few = {**TABLES, "data": {"clients": 600, "partition": "iid"}}
    said = message(DataError, lambda: search(tmp_path / "few", tables=few))
    assert "no client has samples enough to hold some out for validation" in said
    assert not (tmp_path / "few").exists()


def test_three_tables_and_a_config_that_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "asked.toml"
    file.write_text(
        '[data]\nclients = 8\npartition = "pathological"\n[model]\nname = "mlp"\nhidden = 8\n'
        "[train]\nrounds = 2\ncohort = 4\nepochs = 1\nbatch_size = 8\n"
        '[tune]\nlayers = [["fc1"], ["fc1", "fc2"]]\ntau = ["50%", "75%"]\nkappa = [0.75, 0.85]\n'
        '[compare]\nmethods = ["fedavg"]\n'
    )
    out = tmp_path / "search"
    assert main(["tune", "--config", str(file), "--out", str(out)]) == 0
    shown, progress = capsys.readouterr()
    for word in (
        "Λ, with τ = 50%, κ = 0.85",
        "τ, with Λ = ",
        "κ, with Λ = ",
        "fc1+fc2",
        "validation accuracy",
        "chosen",
    ):
        assert word in shown, word
    assert "round 12/12" in progress
    assert shown.count("chosen │") == 3
    assert main(["run", "--config", str(file), "--quiet", "--json", "--out", str(tmp_path / "asked")]) == 0
    capsys.readouterr()
    chosen = out / "chosen.toml"
    assert chosen.read_text() in shown
    assert main(["run", "--config", str(chosen), "--json", "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert json.loads(capsys.readouterr().out)["finished"]
    ran = experiment.config_of(tmp_path / "run")
    assert main(["tune", "--config", str(file), "--out", str(out), "--json", "--quiet"]) == 0  # nothing left to train
    said = json.loads(capsys.readouterr().out)
    assert ran.to_dict() == said["config"]
    assert {row["state"] for rows in said["tables"].values() for row in rows} == {"complete"}
    assert "### κ, with" in (out / "tables.md").read_text()


def test_kappa_is_not_searched_where_it_decides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS.split(), "--rounds", "1", "--try-tau", "inf", "--out", str(tmp_path / "s")]
    assert main(["tune", *flags]) == 0
    assert "κ was not searched: at τ = inf everything in Λ is personal" in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "s"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["tables"]) == ["layers", "tau"]
    assert not said["kappa_matters"]


def command(*arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from fedfac.cli import main; sys.exit(main())"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=pipe, stderr=pipe, text=True)


def rounds_done(out: Path) -> int:
    """Whole rounds of the trial that is being trained."""
    for state in out.glob("trials/*/state.sqlite"):
        try:
            with sqlite3.connect(f"file:{state}?mode=ro", uri=True) as db:
                return int(db.execute("SELECT count(*) FROM rounds").fetchone()[0])
        except sqlite3.OperationalError:
            return 0
    return 0


@pytest.mark.parametrize("mode", ["stages", "joint"])
def test_kill_and_go_on_gives_the_same(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "tune",
        *FLAGS.split(),
        "--rounds",
        "10",
        "--try-tau",
        "25%,50%,75%",
        "--try-kappa",
        "0.75,0.85",
        "--quiet",
    ]
    flags += ["--jointly", "--trials", "4"] if mode == "joint" else []
    assert main([*flags, "--out", str(tmp_path / "straight"), "--json"]) == 0
    straight = json.loads(capsys.readouterr().out)
    killed = tmp_path / "killed"
    process = command(*flags, "--out", str(killed))
    deadline = time.monotonic() + 120
    while not 2 <= rounds_done(killed) < 10 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (folder,) = [path for path in (killed / "trials").iterdir() if path.is_dir()]
    left = rounds_done(killed)
    assert left >= 2, folder
    assert main(["resume", str(killed), "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {**said, "path": straight["path"]} == straight


def test_several_processes_share_one_search(tmp_path: Path) -> None:
    space = {**SPACE, "layers": ["fc1", "fc2", "fc1+fc2"]}
    alone = worker.run(search(tmp_path / "alone", space=space))
    shared = search(tmp_path / "shared", space=space)
    here: list[str] = []
    found = worker.run(shared, processes=2, on_trial=lambda title, finished: here.append(title))
    assert (found.tables, found.best) == (alone.tables, alone.best)


def test_a_trial_that_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    asked = search(tmp_path / "s", parameters=["tau"], space={"tau": ["25%", "75%"]})
    one = worker._Worker(asked, None, None, lambda title, finished: None, lambda: False)
    (stage,) = stages.stages(asked)
    one._enqueue(stage)
    first, second = one._take(stage), one._take(stage)
    assert first is not None
    assert second is not None
    assert {first[0].number, second[0].number} == {0, 1}
    assert one._take(stage) is None
    first[1].release()  # its process has died
    again = one._take(stage)
    assert again is not None
    assert again[0].number == first[0].number
    again[1].release()
    second[1].release()


def test_joint_search_prunes_and_draws_the_same_again(tmp_path: Path) -> None:
    tables = {**TABLES, "train": {**TABLES["train"], "rounds": 8}}
    space = {"layers": ["fc1", "fc2", "fc1+fc2"], "tau": ["0%", "50%", "inf"], "kappa": [0.75, 0.85]}
    asked = search(tmp_path / "s", tables=tables, space=space, mode="joint", trials=9)
    found = worker.run(asked)
    assert found.finished
    (stage,) = stages.stages(asked)
    trials = stage.trials()
    states = [trial.state.name for trial in trials]
    assert len(states) == 9
    assert set(states) == {"COMPLETE", "PRUNED"}
    for trial in trials:
        if trial.state.name == "PRUNED":
            assert len(trial.intermediate_values) < 8  # it did save rounds
    best = max(t.value for t in trials if t.value is not None)
    assert max(row.score or 0 for row in found.tables["tau"]) == best
    assert sum(row.trials for row in found.tables["tau"]) == 9
    again = worker.run(search(tmp_path / "t", tables=tables, space=space, mode="joint", trials=9))
    assert again == found


def test_stop_and_go_on(tmp_path: Path) -> None:
    asked = search(tmp_path / "s")
    rounds: list[Record] = []
    found = worker.run(asked, on_trial=lambda title, finished: rounds.append, should_stop=lambda: len(rounds) >= 3)
    assert not found.finished
    assert len(rounds) == 3
    found = worker.run(plans.load(tmp_path / "s"), on_trial=lambda title, finished: rounds.append)
    assert found == worker.run(search(tmp_path / "straight"))


def test_a_trial_that_is_left_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[FileLock] = []  # kept alive: a lock must not wait for the garbage collector to be given back

    class Kept(FileLock):
        def acquire(self, *arguments: Any, **named: Any) -> Any:
            locks.append(self)
            return super().acquire(*arguments, **named)

    monkeypatch.setattr(worker, "FileLock", Kept)
    rounds: list[Record] = []
    worker.run(
        search(tmp_path / "s"), on_trial=lambda title, finished: rounds.append, should_stop=lambda: len(rounds) >= 3
    )
    assert {Path(lock.lock_file).name for lock in locks} >= {"lock", "layers-0.lock"}
    assert not any(lock.is_locked for lock in locks)


def test_training_that_explodes(tmp_path: Path) -> None:
    tables = {**TABLES, "train": {**TABLES["train"], "lr": 1e30, "optimizer": "sgd"}}
    said = message(TrainingError, lambda: worker.run(search(tmp_path / "s", tables=tables)))
    assert said == "no value of layers trained to finite numbers; lower the learning rate: --lr"


def test_regression_is_tuned_by_its_loss(tmp_path: Path) -> None:
    data = tmp_path / "t.csv"
    lines = [f"{i % 4},{i % 7},{i % 3 + 0.5 * (i % 4)}" for i in range(120)]
    data.write_text("\n".join(["who,x,y", *lines]) + "\n")
    tables = {**TABLES, "data": {"name": str(data), "label": "y", "client": "who"}}
    asked = search(tmp_path / "s", tables=tables, parameters=["tau"], space={"tau": ["0%", "50%", "inf"]})
    found = worker.run(asked)
    assert asked.metric == "loss"
    table = {value: score for value, score in scores(found)["tau"].items() if score is not None}
    assert table[found.best["tau"]] == min(table.values())
    assert len(set(table.values())) > 1


def test_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**changes: Any) -> str:
        return message(ConfigError, lambda: search(tmp_path / "s", **changes))

    fedavg = said(tables={**TABLES, "method": {"name": "fedavg"}})
    assert fedavg.startswith(
        "the method 'fedavg' has no layers, tau or kappa to tune. These have: fedfac, fedfac-static"
    )
    assert said(parameters=["taus"]) == "there is nothing called 'taus' to tune here. Did you mean 'tau'?"
    assert "'kappa' to tune here" in said(tables={**TABLES, "method": {"name": "variance"}})
    assert said(mode="jiont") == "mode is 'jiont'. Did you mean 'joint'?"
    assert said(space={"tau": ["5%", "5%"]}).startswith("the values of tau to try are ['5%', '5%']; give at least one")
    assert "the model has no layer 'fc9'" in said(space={"layers": ["fc9"]})
    assert "tau is 'x'" in said(space={"tau": ["x"]})
    assert "kappa is 2.0" in said(space={"kappa": [2.0]})
    assert said(trials=0) == "trials is 0; it is a whole number from 1 up"
    assert said(auto=True, mode="joint").endswith("not with a joint search: give one of them")
    assert said(auto=True, parameters=["tau"]).endswith("'layers' is not among what is tuned")
    assert not (tmp_path / "s").exists()
    search(tmp_path / "s")
    other = message(RunError, lambda: search(tmp_path / "s", parameters=["tau"], space={"tau": ["5%"]}))
    assert "holds another run: space." in other
    assert "space.tau was ['25%', '50%'], now ['5%']." in other
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty and holds no search" in message(RunError, lambda: search(tmp_path / "full"))
    assert main(["tune", "--trials", "3", "--out", str(tmp_path / "u")]) == 1
    assert "--trials goes with --jointly" in capsys.readouterr().err
    assert main(["tune", "--try-kappa", "a", "--out", str(tmp_path / "u")]) == 1
    assert "--try-kappa has 'a'; kappa is a number" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "s"), "--rounds", "9"]) == 1
    assert "--rounds cannot be changed for a search" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "--out", str(tmp_path / "u")]) == 1
    assert "not installed: pip install 'fedfac[tune]'" in capsys.readouterr().err
    assert not (tmp_path / "u").exists()


def digits_by_number(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network whose layers are called 1, 3 and 5, and counted 1, 2 and 3."""
    hidden = [nn.Linear(math.prod(shape), 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(5, classes))


def test_layers_whose_names_are_numbers(tmp_path: Path) -> None:
    tables = {"data": {"clients": 6}, "model": {"name": "test_tune:digits_by_number"}, "train": {"rounds": 1}}
    found = plans.plan(tmp_path / "t", tables=tables, parameters=["layers"], trust_code=True)
    assert found.space["layers"] == ("1", "2")
    model, _, _ = experiment.build(found.config)
    chosen = [plans.with_values(found.config, {"layers": value}).method_options["layers"] for value in ("1", "2")]
    assert [[layer.name for layer in Anatomy.of(model).select(keys)] for keys in chosen] == [["1"], ["3"]]
