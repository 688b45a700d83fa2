"""Personal states in memory: by reference, bounded, never stale."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise
from hypothesis import given
from hypothesis import strategies as st
from rundirs import new_directory

from fedfac import run as runs
from fedfac.engine.store import CachedStore, MemoryStore, room_for_states
from fedfac.errors import RunError
from fedfac.numerics import CPU
from fedfac.run import RunDirectory
from fedfac.split import Split
from fedfac.state import State, to_bytes

SPLIT = Split({"w": (3,)}, frozenset({"w"}))


def state(value: float) -> State:
    return {"w": torch.full((3,), value)}


def commit(run: RunDirectory, number: int) -> None:
    run.commit({"round": number}, state(-number), SPLIT, scores={}, clients=None, timing={})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.integers(0, 60))
def test_a_cache_answers_what_the_store_would(steps: list[tuple[bool, int]], limit: int) -> None:
    plain, cached = MemoryStore(), CachedStore(MemoryStore(), CPU, limit)
    for number, (writes, client) in enumerate(steps):
        if writes:
            plain.put(client, state(number))
            cached.put(client, state(number))
        wanted, found = plain.get(client), cached.get(client)
        assert (wanted is None) == (found is None)
        assert wanted is None or found is None or bitwise(wanted, found)
        assert sum(12 for _ in cached._recent) <= limit


def test_a_recent_state_is_the_same_object() -> None:
    store = CachedStore(MemoryStore(), CPU)
    mine = state(1)
    store.put(4, mine)
    assert store.get(4) is mine
    assert 0 < room_for_states(CPU) < 1 << 50


def test_a_round_is_written_behind_and_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_directory(tmp_path / "r")
    held = threading.Event()

    def slow(tensors: State) -> bytes:
        held.wait(10)
        return to_bytes(tensors)

    monkeypatch.setattr(runs, "to_bytes", slow)
    run.put(7, state(1))
    commit(run, 1)  # returns although nothing is on disk yet
    other = RunDirectory.read(tmp_path / "r")
    assert other.records() == []
    assert other.get(7) is None
    mine = run.get(7)
    assert bitwise(mine or {}, state(1))
    run.put(7, state(2))  # the next round's is seen before the last one's
    mine = run.get(7)
    assert bitwise(mine or {}, state(2))
    held.set()
    run.flush()
    theirs = other.get(7)
    assert bitwise(theirs or {}, state(1))  # the round as it was committed
    run.rollback()
    run.close()
    assert [r["round"] for r in RunDirectory.read(tmp_path / "r").records()] == [1]


def test_training_does_not_wait_for_the_writer_but_for_too_many_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_directory(tmp_path / "r")
    held = threading.Event()
    writes: list[list[int]] = []
    usually = RunDirectory._write

    def slow(self: RunDirectory, rounds: Any, *rest: Any) -> None:
        assert held.wait(60)
        writes.append([done.number for done in rounds])
        usually(self, rounds, *rest)

    monkeypatch.setattr(RunDirectory, "_write", slow)
    for number in range(1, runs.MOST + 1):
        run.put(7, state(number))
        commit(run, number)
    mine = run.get(7)
    assert bitwise(mine or {}, state(runs.MOST))
    last = threading.Thread(target=commit, args=(run, runs.MOST + 1))  # one too many: it waits
    last.start()
    last.join(0.3)
    assert last.is_alive()
    held.set()
    last.join(60)
    run.close()
    assert writes == [[1], list(range(2, runs.MOST + 2))]
    left = RunDirectory.read(tmp_path / "r")
    assert [r["round"] for r in left.records()] == list(range(1, runs.MOST + 2))
    theirs = left.get(7)
    assert bitwise(theirs or {}, state(runs.MOST))


def test_over_a_network_no_more_than_one_round_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_directory(tmp_path / "r")
    run.most = 1
    writes: list[int] = []
    usually = RunDirectory._write

    def slow(self: RunDirectory, rounds: Any, *rest: Any) -> None:
        time.sleep(0.05)
        usually(self, rounds, *rest)
        writes.append(len(rounds))

    monkeypatch.setattr(RunDirectory, "_write", slow)
    for number in range(1, 5):
        commit(run, number)
        assert len(writes) >= number - 1
    run.close()
    assert writes == [1, 1, 1, 1]


def test_a_failed_write_is_said_and_leaves_the_last_whole_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_directory(tmp_path / "r")
    run.put(1, state(1))
    commit(run, 1)
    run.flush()

    def full(data: bytes) -> str:
        raise RunError("the disk is full")

    monkeypatch.setattr(runs, "digest", full)
    run.put(1, state(2))
    commit(run, 2)
    with pytest.raises(RunError, match="the disk is full"):  # noqa: PT012 (the writer may be busy at the first one)
        commit(run, 3)
        run.flush()
    run.close()
    monkeypatch.undo()
    left = RunDirectory.read(tmp_path / "r")
    assert [r["round"] for r in left.records()] == [1]
    mine = left.get(1)
    assert bitwise(mine or {}, state(1))


def test_reading_does_not_keep_the_writer_from_beginning(tmp_path: Path) -> None:
    """A run that is gone on with: its first round is written while states of earlier rounds are read."""
    run = new_directory(tmp_path / "r")
    run.put(5, {"w": torch.zeros(20_000)})
    commit(run, 1)
    run.close()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(2, 22):
            run = RunDirectory.resume(tmp_path / "r", rounds=99)
            stop = threading.Event()

            def read(run: RunDirectory = run, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    run.get(5)

            reader = threading.Thread(target=read)
            reader.start()
            try:
                commit(run, number)
                run.flush()
            finally:
                stop.set()
                reader.join()
            run.close()
    finally:
        sys.setswitchinterval(interval)
    assert len(RunDirectory.read(tmp_path / "r").records()) == 21


# --- what waits is bounded in bytes ----------------------------------------------------------------------------------

BIG = 1 << 14  # numbers of a state: 64 KB


def a_round(run: RunDirectory, number: int, clients: range, *, put_off: bool = False) -> None:
    for client in clients:
        run.put(client, {"w": torch.full((BIG,), float(number))})
    run.commit({"round": number}, state(-number), SPLIT, scores={}, clients=None, timing={}, put_off=put_off)


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("cohort", [1, 3, 40])  # a small part of the bound, a large one, and more than it
def test_a_stalled_disk_stops_the_training_and_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cohort: int, *, put_off: bool
) -> None:
    """The disk is let go on transaction by transaction; in between, as much as can be is trained, and counted."""
    monkeypatch.setattr(runs, "WRITE_BEHIND", 8 * 4 * BIG)
    room = max(runs.WRITE_BEHIND, cohort * 4 * BIG)
    run = new_directory(tmp_path / "r")
    run.most = 10**6
    gate = threading.Semaphore(0)
    usually = RunDirectory._write
    peak: list[int] = []

    def slow(self: RunDirectory, *arguments: Any) -> None:
        assert gate.acquire(timeout=60)
        usually(self, *arguments)

    def train() -> None:
        for number in range(1, 16):
            a_round(run, number, range(number * cohort, (number + 1) * cohort), put_off=put_off)
            peak.append(run.unwritten_bytes)

    monkeypatch.setattr(RunDirectory, "_write", slow)
    trainer = threading.Thread(target=train)
    trainer.start()
    trainer.join(0.3)
    assert trainer.is_alive()  # the disk has written nothing yet, and the training waits for it
    assert len(peak) * cohort * 4 * BIG <= room + cohort * 4 * BIG
    for _ in range(40):
        gate.release()
    trainer.join(60)
    assert not trainer.is_alive()
    run.close()
    assert max(peak) <= room
    assert len(RunDirectory.read(tmp_path / "r").records()) == 15


PROGRAM = """
import resource, sys, threading
import torch
sys.path.insert(0, sys.argv[2])
from rundirs import new_directory
from pathlib import Path
from fedfac import run as runs
from fedfac.split import Split
runs.WRITE_BEHIND = 16 << 20
usually, gate = runs.RunDirectory._write, threading.Event()
def stalled(self, *arguments):
    gate.wait(0.2)  # a disk that takes a fifth of a second for a transaction
    usually(self, *arguments)
runs.RunDirectory._write = stalled
run = new_directory(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range(1, 8):
    for client in range(8):  # 16 MB a round
        run.put(number * 8 + client, {"w": torch.full((1 << 19,), float(number))})
    run.commit({"round": number}, {"w": torch.zeros(3)}, Split({"w": (3,)}), scores={}, clients=None, timing={})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
gate.set()
run.close()
"""


def test_the_memory_of_a_process_with_a_slow_disk(tmp_path: Path) -> None:
    """Seven rounds of 16 MB, and the disk has done one or two of them: 100 MB and more waited before."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "r"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert float(done.stdout) < 80


def test_a_writer_that_fails_while_training_waits_for_it_is_said_and_nothing_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "WRITE_BEHIND", 4 * BIG)
    run = new_directory(tmp_path / "r")
    a_round(run, 1, range(3))
    run.flush()
    usually = RunDirectory._write

    def fails(self: RunDirectory, *arguments: Any) -> None:
        raise RunError("the disk is gone")

    monkeypatch.setattr(RunDirectory, "_write", fails)
    with pytest.raises(RunError, match="the disk is gone"):  # noqa: PT012 (at one of them)
        for number in range(2, 6):
            a_round(run, number, range(3))
    monkeypatch.setattr(RunDirectory, "_write", usually)
    assert run.unwritten_bytes == 0
    run.rollback()
    run.close()
    assert [record["round"] for record in RunDirectory.read(tmp_path / "r").records()] == [1]
