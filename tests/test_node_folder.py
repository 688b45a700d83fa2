"""A node's own folder: written whole or not at all, and never somewhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import bitwise, counted, message

from fedfac.engine.flower.consent import Allowed
from fedfac.engine.flower.folder import About, Folder, Held, found_in
from fedfac.errors import RunError
from fedfac.run import atomic_write

RUN = "00112233445566ff"
STATE = counted({"a": (3, 2), "b": (4,)})
ABOUT = About(1, 0, 0, {}, [2], 3, {}, {})


def test_what_is_kept_comes_back_bit_by_bit(tmp_path: Path) -> None:
    folder = Folder(tmp_path, RUN, "north")
    assert folder.kept(1) is None
    folder.keep(1, STATE, last=0)
    assert bitwise(Folder(tmp_path, RUN, "north").kept(1) or {}, STATE)
    assert Folder(tmp_path, "f" * 16, "north").kept(1) is None
    assert Folder(tmp_path, RUN, "south").kept(1) is None


def test_the_round_that_counted_and_the_newest_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, RUN, "north")
    for number, last in ((1, 0), (2, 1), (3, 1), (4, 3)):
        folder.hold(number, Held(3, "", Allowed(), once=False), STATE)
        folder.keep(number, STATE, last=last)
    assert sorted(p.name for p in folder.path.iterdir()) == ["held-000004", "kept-000003", "kept-000004"]


@pytest.mark.parametrize("run", ["..", "../../etc", "", "0" * 17, "ABCDEF0123456789", "0" * 15 + "\n"])
def test_a_run_that_would_lead_elsewhere_is_refused(run: str, tmp_path: Path) -> None:
    text = message(RunError, lambda: Folder(tmp_path, run, "north"))
    assert text == f"a run is called by 16 hexadecimal digits; the server called it {run!r}"


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../../x", "münchen 3", "con:1"])
def test_any_name_of_a_client_stays_in_the_folder_and_is_found_again(name: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "base", RUN, name)
    folder.set_model(ABOUT, STATE)
    assert folder.path.resolve().parent == (tmp_path / "base" / RUN).resolve()
    assert found_in(tmp_path / "base") == [(RUN, name)]


def test_a_damaged_file_is_noticed(tmp_path: Path) -> None:
    folder = Folder(tmp_path, RUN, "north")
    folder.keep(1, STATE, last=0)
    path = folder.path / "kept-000001"
    content = bytearray(path.read_bytes())
    for damaged in (content[:-1], content[:40], b"", content[:-3] + b"xyz"):
        path.write_bytes(bytes(damaged))
        assert "is damaged: it does not match its checksum" in message(RunError, lambda: folder.kept(1))


WRITER = """
import sys, itertools, torch
from pathlib import Path
from fedfac.engine.flower.folder import Folder
folder = Folder(Path(sys.argv[1]), sys.argv[2], "north")
for round in itertools.count(1):
    folder.keep(round, {"a": torch.full((200_000,), float(round))}, last=round - 1)
    print(round, flush=True)
"""


def test_kill_9_at_any_moment_leaves_the_last_whole_state(tmp_path: Path) -> None:
    for attempt in range(2):
        base = tmp_path / str(attempt)
        command = [sys.executable, "-c", WRITER, str(base), RUN]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.01 + 0.017 * attempt)
            process.send_signal(signal.SIGKILL)
            said = [1, *map(int, process.stdout.read().split())]
        folder = Folder(base, RUN, "north")
        own = folder.kept(said[-1])
        assert own is not None
        assert torch.equal(own["a"], torch.full((200_000,), float(said[-1])))
        assert len(list(folder.path.glob("kept-*"))) <= 3


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"whole")
    with pytest.raises(AttributeError):
        atomic_write(path, object())  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"whole"
