"""Nobody but its owner reads a run: real permissions, under the umask that most people have."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rundirs import new_directory

import fedfac
from fedfac import report
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.disk import FOR_OTHERS, atomic_write
from fedfac.run import RunDirectory
from fedfac.split import Split


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a journal of the database's, gone since it was listed
            found[str(path.relative_to(folder))] = stat.S_IMODE(path.stat().st_mode)
    return found


def test_a_run_is_private_while_it_trains_and_afterwards(tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def look(record: dict[str, Any]) -> None:
        seen.update(modes(tmp_path / "above"))

    how: dict[str, Any] = {"cohort": 3, "epochs": 1, "batch_size": 8, "on_round": look}
    fedfac.fit(small_model(), small_federation(), rounds=2, out=tmp_path / "above" / "run", **how)
    fedfac.fit(small_model(), small_federation(), rounds=4, out=tmp_path / "above" / "run", resume=True, **how)
    assert {"run/state.sqlite-wal", "run/state.sqlite-shm", "run/lock"} <= seen.keys()
    for found in (seen, modes(tmp_path / "above")):
        assert found.pop("run") == 0o700
        assert {"run/config.json", "run/partition.json", "run/metrics.jsonl", "run/timing.jsonl"} <= found.keys()
        assert set(found.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o755  # not a run's own folder


def test_a_folder_that_was_there_stays_as_its_owner_made_it(tmp_path: Path) -> None:
    for mode in (0o755, 0o750):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        new_directory(folder).close()
        assert stat.S_IMODE(folder.stat().st_mode) == mode
        assert set(modes(folder).values()) == {0o600}


def test_a_run_of_an_earlier_version_becomes_private_when_it_is_resumed(tmp_path: Path) -> None:
    run = new_directory(tmp_path / "run")
    run.commit({"round": 1}, {"w": torch.ones(3)}, Split({"w": (3,)}), scores={}, clients=None, timing={})
    run.close()
    (tmp_path / "run" / "failed.txt").write_text("a traceback with values of the data")
    for path in (tmp_path / "run").iterdir():
        path.chmod(0o644)
    RunDirectory.read(tmp_path / "run").close()
    assert set(modes(tmp_path / "run").values()) == {0o644}  # looking changes nothing
    RunDirectory.resume(tmp_path / "run", rounds=99).close()
    assert set(modes(tmp_path / "run").values()) == {0o600}


def test_a_comparison_is_private_and_its_page_is_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--clients", "6", "--rounds", "1", "--epochs", "1", "--cohort", "3", "--quiet"]
    assert main(["compare", "--methods", "fedavg,local", "--seeds", "1", *common, "--out", "grid"]) == 0
    found = modes(tmp_path)
    assert found["grid"] == 0o700
    assert found["grid/comparison.json"] == 0o600
    runs = {name: mode for name, mode in found.items() if name.startswith(("grid/fedavg/", "grid/local/"))}
    assert {mode for name, mode in runs.items() if (tmp_path / name).is_file()} == {0o600}
    assert report.write("grid", tmp_path / "page" / "report.html").exists()
    assert modes(tmp_path)["page/report.html"] == 0o644


def test_a_file_that_is_written_whole_is_private_unless_it_is_for_others(tmp_path: Path) -> None:
    atomic_write(tmp_path / "own", "secret")
    atomic_write(tmp_path / "page", "shown", mode=FOR_OTHERS)
    (tmp_path / "before").touch(mode=0o666)
    atomic_write(tmp_path / "before", "secret")
    assert modes(tmp_path) == {"own": 0o600, "page": 0o644, "before": 0o600}
    os.umask(0o077)
    atomic_write(tmp_path / "page", "shown", mode=FOR_OTHERS)
    assert modes(tmp_path)["page"] == 0o600
