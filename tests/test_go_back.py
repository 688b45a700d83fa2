"""resume --from-round: what is kept of earlier rounds, and that going back is exact, bounded and safe to kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise, message
from rundirs import client_row, new_directory, own, whole

import fedfac
from fedfac import earlier, methods
from fedfac.aggregate import Sums
from fedfac.cli import main
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.database import Database
from fedfac.engine.protocol import Engine
from fedfac.errors import ConfigError, RunError
from fedfac.run import RunDirectory
from fedfac.split import Split
from fedfac.switches import Average, Decay, ServerMomentum

SPLIT = Split({"w": (3,)}, frozenset({"w"}))


def fit(out: Path, **more: Any) -> fedfac.Result:
    method = methods.fedfac(layers=[1]) | Decay(0.5) | ServerMomentum(0.5) | Average(0.5)
    how: dict[str, Any] = {"method": method, "rounds": 8, "cohort": 2, "epochs": 1, "batch_size": 8, "lanes": 1}
    how["evaluate_every"] = 1
    return fedfac.fit(small_model(), small_federation(), out=out, device="cpu", **how | more)


def earlier_rounds(path: Path) -> list[int]:
    return RunDirectory.read(path).earlier_rounds()


def every_round(path: Path, rounds: int) -> None:
    """A run that stops after every round, so that none is put off: which rounds are kept is no matter of time."""
    for number in range(1, rounds + 1):
        fit(path, rounds=rounds, resume=number > 1, should_stop=lambda: True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rounds of which every second one is kept."""
    out = tmp_path_factory.mktemp("earlier") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier, "EVERY", 2)
        every_round(out, 8)
    return out


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_went_back_is_the_run_that_never_did(copy: Path, tmp_path: Path) -> None:
    there = earlier_rounds(copy)
    assert there == [3, 5, 7]
    straight = whole(copy)
    lines = (copy / "metrics.jsonl").read_bytes()
    for number in there:
        shutil.copytree(copy, tmp_path / str(number))
        fit(tmp_path / str(number), resume=True, from_round=number)
        assert whole(tmp_path / str(number)) == straight
        assert (tmp_path / str(number) / "metrics.jsonl").read_bytes() == lines
        times = [
            json.loads(line)["round"] for line in (tmp_path / str(number) / "timing.jsonl").read_text().splitlines()
        ]
        assert times == list(range(1, 9))


def test_going_back_is_to_the_state_of_that_round(copy: Path, tmp_path: Path) -> None:
    """Seen before any training: the same as a run that ended there, client by client."""
    fit(tmp_path / "five", rounds=5)
    RunDirectory.resume(copy, rounds=8, from_round=5).close()
    assert whole(copy) == whole(tmp_path / "five")
    assert earlier_rounds(copy) == [3]
    assert (copy / "metrics.jsonl").read_bytes() == (tmp_path / "five" / "metrics.jsonl").read_bytes()
    assert len((copy / "timing.jsonl").read_text().splitlines()) == 5
    RunDirectory.resume(copy, rounds=8, from_round=3).close()  # and once more, from there
    fit(tmp_path / "three", rounds=3)
    assert whole(copy) == whole(tmp_path / "three")
    assert earlier_rounds(copy) == []


def test_a_poisoned_run_goes_back(tmp_path: Path) -> None:
    """Finite, and wrong: the aggregate of rounds 7 and 8 is taken, and found out about later."""

    class Liar(Watched):
        def collect(self, split: Split) -> Sums:
            sums = super().collect(split)
            return replace(sums, values={name: value * 1e6 for name, value in sums.values.items()})

    def lie(engine: Engine) -> Engine:
        return Liar(engine)

    how: dict[str, Any] = {"method": methods.fedper(), "evaluate_every": 1}
    fit(tmp_path / "straight", rounds=4, **how)
    for number in range(1, 5):
        fit(tmp_path / "run", rounds=4, resume=number > 1, should_stop=lambda: True, **how)
    fit(tmp_path / "run", rounds=5, resume=True, engine=lie, **how)
    (before,) = earlier_rounds(tmp_path / "run")
    assert before == 1  # five rounds lie between two that are kept
    healed = fit(tmp_path / "run", rounds=4, resume=True, from_round=before, **how)
    assert whole(tmp_path / "run") == whole(tmp_path / "straight")
    assert all(float(t.abs().max()) < 1e3 for t in healed.server.values())


def test_a_round_that_is_gone_is_named_with_those_that_are_not(copy: Path) -> None:
    before = whole(copy)
    for number in (0, 1, 4, 6, 99, -1):
        text = message(RunError, partial(fit, copy, resume=True, from_round=number))
        assert f"cannot go back to round {number}" in text
        assert "It can go back to rounds 3, 5, 7; its last whole round is 8. Nothing was changed" in text
    assert fit(copy, resume=True, from_round=8).finished  # that is where it is
    assert whole(copy) == before


def test_from_round_goes_with_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from_round=3 goes with resume=True"):
        fit(tmp_path / "run", from_round=3)
    assert not (tmp_path / "run").exists()


def test_runs_of_a_version_that_kept_nothing_can_be_resumed_and_say_that_they_cannot_go_back(copy: Path) -> None:
    with sqlite3.connect(copy / "state.sqlite") as db:
        for table in earlier._ROUND_OF:
            db.execute(f"DROP TABLE {table}")
    assert earlier_rounds(copy) == []
    with pytest.raises(RunError, match="No earlier round is kept; its last whole round is 8"):
        fit(copy, resume=True, from_round=5)
    assert fit(copy, rounds=9, resume=True).finished
    assert earlier_rounds(copy) == [8]


def test_a_version_that_kept_nothing_may_have_written_in_between(copy: Path) -> None:
    """It overwrote states without keeping them: what was kept before belongs to no round any more."""
    with sqlite3.connect(copy / "state.sqlite") as db:
        db.execute("INSERT INTO rounds SELECT 9, record, masks, scores, digest FROM rounds WHERE round = 8")
    assert earlier_rounds(copy) == []
    with pytest.raises(RunError, match="No earlier round is kept; its last whole round is 9"):
        RunDirectory.resume(copy, rounds=9, from_round=7)


def test_what_is_kept_is_checked_before_it_is_taken(copy: Path) -> None:
    for table, what in (("earlier_state", "of round 3"), ("earlier_personal", "an earlier state of client")):
        damaged = copy.with_name(table)
        shutil.copytree(copy, damaged)
        with sqlite3.connect(damaged / "state.sqlite") as db:
            row, data = db.execute(f"SELECT rowid, data FROM {table} WHERE data IS NOT NULL LIMIT 1").fetchone()
            db.execute(f"UPDATE {table} SET data = ? WHERE rowid = ?", (bytes([data[0] ^ 1]) + data[1:], row))
        before = whole(damaged)
        with pytest.raises(RunError, match=rf"{what}.* does not match its checksum"):
            RunDirectory.resume(damaged, rounds=8, from_round=3)
        assert whole(damaged) == before
        RunDirectory.resume(damaged, rounds=8).close()  # the run itself is not damaged


# --- what it costs ---------------------------------------------------------------------------------------------------


def commit(directory: RunDirectory, number: int, clients: range, size: int = 3) -> None:
    for client in clients:
        directory.put(client, own(number * 100 + client, size))
    rows = [client_row(str(number))] if number % 2 else None
    directory.commit({"round": number}, own(number, 3), SPLIT, scores={}, clients=rows, timing={"train": 0.1})
    directory.flush()


def test_every_client_has_what_it_had_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients come and go; some had nothing yet. Against a plain record of what was put."""
    monkeypatch.setattr(earlier, "EVERY", 3)
    directory = new_directory(tmp_path / "run")
    had: dict[int, dict[int, float]] = {0: {}}
    for number in range(1, 15):
        clients = range(number % 4, number % 4 + 2)
        commit(directory, number, clients)
        had[number] = had[number - 1] | {client: number * 100.0 + client for client in clients}
    directory.close()
    there = earlier_rounds(tmp_path / "run")
    assert there == [7, 10, 13]
    for number in reversed(there):
        RunDirectory.resume(tmp_path / "run", rounds=14, from_round=number).close()
        found = RunDirectory.read(tmp_path / "run")
        states = {client: found.get(client) for client in range(9)}
        assert {c: float(s["w"][0]) for c, s in states.items() if s is not None} == had[number]
        saved = found.checkpoint()
        assert saved is not None
        assert float(saved.server["w"][0]) == number
        assert found.clients() == [client_row(str(number if number % 2 else number - 1))]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "ROOM", 20 * 4000)
    directory = new_directory(tmp_path / "run")
    sizes = []
    for number in range(1, 61):
        commit(directory, number, range(9), size=1000)
        if number > 1:
            sizes.append(directory._db.all("SELECT total(length(data)) FROM earlier_personal")[0][0])
    directory.close()
    assert max(sizes) <= 20 * 4000 * 1.2  # a state takes a few bytes more as safetensors
    assert 1 <= len(earlier_rounds(tmp_path / "run")) <= earlier.MOST
    assert (tmp_path / "run" / "state.sqlite").stat().st_size < 60 * 9 * 4000 / 3


def test_a_client_that_trains_in_every_round_is_kept_once_for_every_round_that_is_kept(tmp_path: Path) -> None:
    directory = new_directory(tmp_path / "run")
    for number in range(1, 7):
        commit(directory, number, range(4))
    kept = directory._db.all("SELECT until, count(*) FROM earlier_personal GROUP BY until")
    assert kept == [(1, 4)]
    directory.close()


def test_over_a_network_every_round_is_kept_for_a_while(tmp_path: Path) -> None:
    directory = new_directory(tmp_path / "run", remote={"run": "0" * 16})
    for number in range(1, 7):
        commit(directory, number, range(0))
    directory.close()
    assert earlier_rounds(tmp_path / "run") == [3, 4, 5]


# --- kills -----------------------------------------------------------------------------------------------------------


def test_a_kill_at_any_step_of_going_back_leaves_the_run_before_or_after(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every statement and every file that is written: what lies there then is what a kill would leave."""
    before = whole(copy)
    left: list[Path] = []
    usually, writes = Database.execute, os.replace

    def snapshot() -> None:
        left.append(tmp_path / f"left-{len(left)}")
        shutil.copytree(copy, left[-1])

    def execute(self: Database, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        snapshot()
        return usually(self, sql, values)

    def moved(self: Path, target: Path) -> Path:
        snapshot()
        writes(self, target)
        return target

    with monkeypatch.context() as watched:
        watched.setattr(Database, "execute", execute)
        watched.setattr(Path, "replace", moved)
        RunDirectory.resume(copy, rounds=8, from_round=5).close()
    after = whole(copy)
    assert len(left) > 15
    ends = []
    for folder in left:
        RunDirectory.resume(folder, rounds=8).close()
        found = whole(folder)
        assert found in (before, after)
        lines = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert lines == [row[0] for row in found["rounds"]]
        ends.append(found == after)
    assert ends == sorted(ends)
    assert {True, False} == set(ends)


KILLED = """
import os, signal, sys
from fedfac.database import Database
from fedfac.run import RunDirectory
usually, left = Database.execute, [int(sys.argv[2])]
def execute(self, sql, values=()):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return usually(self, sql, values)
Database.execute = execute
RunDirectory.resume(sys.argv[1], rounds=8, from_round=3)
"""


def test_a_real_kill_in_the_middle_of_the_transaction(copy: Path) -> None:
    before = whole(copy)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(copy), "8"], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    fit(copy, resume=True)
    assert whole(copy) == before
    fit(copy, resume=True, from_round=3)
    assert whole(copy) == before


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_goes_back_and_says_to_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(earlier, "EVERY", 1)
    train = ["--clients", "6", "--rounds", "2", "--epochs", "1", "--cohort", "3", "--out", "r", "--quiet"]
    assert main(["run", *train]) == 0
    assert main(["resume", "r", "--rounds", "3", "--quiet"]) == 0
    straight = whole(Path("r"))
    there = earlier_rounds(Path("r"))
    assert 2 in there
    capsys.readouterr()
    assert main(["inspect", "r"]) == 0
    listed = ", ".join(map(str, there))
    assert f"can be resumed from earlier rounds (fedfac resume --from-round): {listed}" in capsys.readouterr().out
    assert main(["inspect", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["earlier_rounds"] == there
    assert main(["resume", "r", "--from-round", "2", "--quiet"]) == 0
    assert whole(Path("r")) == straight
    assert main(["resume", "r", "--from-round", "77", "--quiet"]) == 1
    assert "cannot go back to round 77" in capsys.readouterr().err


def test_a_servers_run_is_taken_back_and_trained_by_its_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = new_directory(tmp_path / "run", remote={"run": "0" * 16})
    for number in range(1, 4):
        commit(directory, number, range(0))
    directory.close()
    assert main(["resume", str(tmp_path / "run"), "--from-round", "2"]) == 0
    out = capsys.readouterr().out
    assert "is back at round 2. Nothing is trained here: 'flwr run' its app again" in out
    assert "to agree to go back" in out
    assert [record["round"] for record in RunDirectory.read(tmp_path / "run").records()] == [1, 2]
    saved = RunDirectory.read(tmp_path / "run").checkpoint()
    assert saved is not None
    assert bitwise(saved.server, own(2))
    assert torch.equal(saved.server["w"], torch.full((3,), 2.0))
