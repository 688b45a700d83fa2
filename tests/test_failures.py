"""Failures that are no damage: each says what it is and what to do, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import message
from rundirs import client_row, new_directory, own, whole

import fedfac
from fedfac import methods, report
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.database import Database
from fedfac.disk import atomic_write, json_text
from fedfac.errors import ConfigError, RunError
from fedfac.run import RunDirectory
from fedfac.split import Split

SPLIT = Split({"w": (3,)}, frozenset({"w"}))


def fit(out: Path, **more: Any) -> fedfac.Result:
    how: dict[str, Any] = {"method": methods.fedper(), "rounds": 6, "cohort": 3, "epochs": 1, "batch_size": 8}
    how |= {"device": "cpu", "lanes": 1}
    return fedfac.fit(small_model(), small_federation(), out=out, **how | more)


def commit(directory: RunDirectory, number: int, size: int = 3) -> None:
    directory.put(0, own(number, size))
    rows = [client_row("0")]
    directory.commit({"round": number}, own(number), SPLIT, scores={}, clients=rows, timing={"train": 0.5})
    directory.flush()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    fit(out)
    return out


@pytest.fixture
def copy(straight: Path, tmp_path: Path) -> Path:
    shutil.copytree(straight, tmp_path / "run")
    return tmp_path / "run"


# --- a disk that is full ---------------------------------------------------------------------------------------------


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """What a quota does: a file cannot grow beyond so many bytes. Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_may_not_grow_stop_the_run_and_it_is_resumed_bit_by_bit(straight: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"should_stop": lambda: True}
    fit(tmp_path / "run", **how)  # a round, and then there is no room for the next ones
    size = sum(path.stat().st_size for path in (tmp_path / "run").iterdir())
    with files_end_at(size // 2):
        text = message(RunError, lambda: fit(tmp_path / "run", resume=True))
    assert "state.sqlite cannot be used" in text
    assert "the disk is full, whether files may grow" in text
    assert "then resume" in text
    assert "damaged" not in text
    assert "backup" not in text
    fit(tmp_path / "run", resume=True)
    assert whole(tmp_path / "run") == whole(straight)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_a_database_that_is_full_says_so(tmp_path: Path) -> None:
    directory = new_directory(tmp_path / "run")
    commit(directory, 1)
    (pages,) = directory._db.all("PRAGMA page_count")[0]
    directory._db.all(f"PRAGMA max_page_count = {pages + 2}")  # SQLite's own limit gives the error of a full disk
    text = message(RunError, lambda: commit(directory, 2, 100_000))
    assert "state.sqlite cannot be used (database or disk is full): the disk is full. Every whole round is safe" in text
    assert "damaged" not in text
    directory.close()
    assert [record["round"] for record in RunDirectory.read(tmp_path / "run").records()] == [1]
    again = RunDirectory.resume(tmp_path / "run", rounds=99)
    commit(again, 2, 100_000)
    again.close()


def test_a_line_that_finds_no_room_is_written_by_the_next_resume(
    copy: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is in the database by then: metrics.jsonl alone is behind, by half a line."""
    lines = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").symlink_to("/dev/full")
    directory = new_directory(copy.with_name("other"))
    (copy.with_name("other") / "metrics.jsonl").symlink_to("/dev/full")
    text = message(RunError, lambda: commit(directory, 1))
    assert "metrics.jsonl cannot be used: No space left on device. The disk is full" in text
    assert "Every whole round is safe: resume then" in text
    directory.close()
    (copy.with_name("other") / "metrics.jsonl").unlink()
    RunDirectory.resume(copy.with_name("other"), rounds=99).close()
    assert json.loads((copy.with_name("other") / "metrics.jsonl").read_text())["round"] == 1
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").write_bytes(lines[:-5])
    fit(copy, resume=True)
    assert whole(copy) == whole(straight)
    assert (copy / "metrics.jsonl").read_bytes() == lines


def test_the_command_line_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["--clients", "6", "--rounds", "9", "--epochs", "1", "--cohort", "3", "--out", str(tmp_path / "r")]
    with files_end_at(150_000):
        assert main(["run", *train, "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Every whole round is safe" in said
    assert "damaged" not in said


# --- files that are half there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail", ['{"round": 7, "tra', "\x00\x00", "[1, 2]\n", '{"train": 1}\n', '{"round": NaN}\n', "7\n"]
)
def test_a_half_line_of_times_is_left_out(copy: Path, tail: str) -> None:
    whole_lines = (copy / "timing.jsonl").read_text()
    with (copy / "timing.jsonl").open("a") as file:
        file.write(tail)
    (run,) = report.gather([copy])["runs"]
    assert run["seconds"]["train"] > 0
    assert report.write(copy).exists()
    fit(copy, resume=True)
    assert (copy / "timing.jsonl").read_text() == whole_lines


@pytest.mark.parametrize(
    "text",
    [
        '{"clients": {"0": {"tra',
        "\xff\xfe",
        "[" * 100_000,
        '{"clients": 5}',
        '{"clients": {"0": {"train": "x"}}}',
        "null",
    ],
)
def test_a_damaged_partition_costs_the_report_its_sizes_only(copy: Path, text: str) -> None:
    assert report.gather([copy])["partitions"].popitem()[1]["train"][0] is not None
    (copy / "partition.json").write_text(text, encoding="latin-1")
    facts = report.gather([copy])
    assert facts["partitions"].popitem()[1]["train"] == [None] * 5
    assert "Sizes and classes of clients are missing" in facts["note"]
    assert "partition.json cannot be read" in facts["note"]
    assert "partition.json cannot be read" in report.write(copy).read_text()
    assert fit(copy, resume=True).finished


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config[part]
        config[last] = value

    return change


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config[part]
        del config[last]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("settings"), "missing required field `settings`"),
        (without("settings.local"), "missing required field `local` - at `$.settings`"),
        (without("settings.method.name"), "missing required field `name`"),
        (without("tensors"), "missing required field `tensors`"),
        (without("names"), "missing required field `names`"),
        (without("split"), "missing required field `split`"),
        (changed("rounds", "many"), "Expected `int`, got `str` - at `$.rounds`"),
        (changed("rounds", -1), "at `$.rounds`"),
        (changed("settings.clients", 10**18), "at `$.settings.clients`"),
        (changed("settings.clients", 7), "names for 7 clients"),
        (changed("settings.local.hidden", 1), "unknown field `hidden`"),
        (changed("tensors", {"0.weight": [[10**7, 10**8], "float32"]}), "has 1,000,000,000,000,000 numbers"),
        (changed("tensors", {"0.weight": [[-1], "float32"]}), "Expected `int` >= 0"),
        (changed("tensors", {"0.weight": [[2], "load"]}), "tensor '0.weight' is of type 'load'"),
        (changed("tensors", {"0.weight": 5}), "Expected `array`, got `int`"),
        (changed("split", 5), "Expected `str`, got `int` - at `$.split`"),
        (changed("origin", {"train": {}}), "missing required field `data`"),
    ],
)
def test_a_config_that_is_not_one_is_refused(
    copy: Path, change: Callable[[dict[str, Any]], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((copy / "config.json").read_text()) | {"names": list("abcde")}
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    before = whole_files(copy)
    for call in (
        lambda: fit(copy, resume=True),
        lambda: fedfac.load(copy, small_model()),
        lambda: report.gather([copy]),
    ):
        text = message(RunError, call)
        assert "config.json is not what a run is described by" in text
        assert words in text
    for command in ("inspect", "report", "resume"):
        assert main([command, str(copy)]) == 1
        assert capsys.readouterr().err.startswith("error: ")
    assert whole_files(copy) == before


def whole_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "\x00", "", "{}", "[]", "7", '{"format": 1}', '{"format": [[]]}']
)
def test_a_config_of_another_shape_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    for call in (partial(fit, copy, resume=True), partial(fedfac.load, copy, small_model())):
        with pytest.raises(RunError, match=r"config.json|run format"):
            call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tiles": 10**15}, "Expected `int` <= 1000000000000"),
        ({"tiles": 10**11}, "to elements of '0' that it does not have"),
        ({"first": 3}, "to elements of '0' that it does not have"),
        ({"dim": 9}, "to elements of '0' that it does not have"),
        ({"groups": 0}, "to elements of '0' that it does not have"),
        ({"layer": "none"}, "to elements of 'none' that it does not have"),
        ({"count": -1}, "at `$.owners"),
    ],
)
def test_a_split_that_does_not_fit_the_tensors_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    fit(tmp_path / "run", method=methods.fedfac(layers=[1]), rounds=1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    split = json.loads(config["split"])
    split["owners"]["0.weight"] |= change
    config["split"] = json.dumps(split)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    for call in (lambda: fedfac.load(tmp_path / "run", small_model()), lambda: report.gather([tmp_path / "run"])):
        assert words in message(RunError, call)


# --- places where no run can be --------------------------------------------------------------------------------------


def command(out: str) -> list[str]:
    return ["run", "--clients", "6", "--rounds", "1", "--epochs", "1", "--cohort", "3", "--quiet", "--out", out]


def test_a_run_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("years of work")
    for out, words in (
        (tmp_path / "file", "file is a file; a run needs a folder of its own"),
        (tmp_path / "file" / "sub", "file is a file, so"),
        (tmp_path / "file" / "sub" / "sub", "cannot be a folder: choose another one"),
        (tmp_path / ("n" * 300), "File name too long. A name in it is too long for the file system"),
        (tmp_path / ("n" * 300) / "run", "choose a shorter one"),
    ):
        assert main(command(str(out))) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert words in said
        assert words in message(RunError, partial(fit, out))
    for verb in ("inspect", "resume", "report"):
        for path in (tmp_path / "file", tmp_path / "file" / "sub", tmp_path / ("n" * 300)):
            assert main([verb, str(path)]) == 1
            assert capsys.readouterr().err.startswith("error: ")
    assert (tmp_path / "file").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_page_where_none_can_be(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "page.html", tmp_path / ("n" * 300)):
        assert main(["report", str(copy), "--out", str(out)]) == 1
        assert "cannot be used" in capsys.readouterr().err


NOBODY = """
import os, sys
from pathlib import Path
from fedfac.cli import main
os.umask(0o022)
start = ["run", "--clients", "6", "--rounds", "1", "--epochs", "1", "--cohort", "3", "--quiet", "--json", "--out"]
for command in ([*start, "shown"], [*start, "private"], ["report", "shown"], ["inspect", "shown"]):
    assert main(command) == 0
Path("shown").chmod(0o755)
for path in Path("shown").iterdir():
    path.chmod(0o644)
Path("locked").mkdir()
os.setgid(65534)
os.setuid(65534)
commands = [["inspect", "shown"], ["inspect", "private"], ["resume", "shown", "--quiet"], ["report", "shown"]]
for command in [*commands, [*start, "locked"], [*start, "locked/run"]]:
    print("returned", main(command), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root to be made")
def test_somebody_else_may_neither_read_nor_write() -> None:
    """A real other user: a private run, one that may be read and not written, and a folder that may not be written."""
    program = [sys.executable, "-c", NOBODY]
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        found = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
    assert "Traceback" not in found.stderr, found.stderr
    results = [line.split()[1] for line in found.stdout.splitlines() if line.startswith("returned")]
    assert results == ["0", "1", "1", "1", "1", "1"], (found.stdout, found.stderr)
    assert found.stderr.count("Permission denied. This user may not read or write there") == 5, found.stderr


def test_a_system_that_refuses_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any, **more: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(RunError, match=r"Read-only file system\. It is on a file system that is read-only"):
        atomic_write(tmp_path / "file", "text")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cuda", "cuda:7", "mps", "xpu", "meta"):
        text = message(ConfigError, partial(fit, tmp_path / "run", device=device))
        assert f"device is '{device}', which cannot be used here" in text
        assert "fedfac doctor" in text
    assert main([*command(str(tmp_path / "run")), "--device", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("error: device is 'cuda'")
    assert not (tmp_path / "run").exists()


def test_a_program_that_holds_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = new_directory(tmp_path / "run")
    directory._db._connection.execute("PRAGMA busy_timeout = 20")
    commit(directory, 1)
    other = sqlite3.connect(tmp_path / "run" / "state.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    text = message(RunError, lambda: commit(directory, 2))
    assert "(database is locked): another program holds a lock on it. Close that program, then resume" in text
    other.close()
    directory.close()
    assert [record["round"] for record in RunDirectory.read(tmp_path / "run").records()] == [1]


# --- numbers that JSON has no word for -------------------------------------------------------------------------------


def strictly(text: str) -> Any:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_loss_that_is_not_finite_is_null_in_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation whose figures overflow, and options that are infinite."""
    from fedfac import evaluate

    usually = evaluate.tally

    def overflown(*arguments: Any, **more: Any) -> evaluate.Score:
        score = usually(*arguments, **more)
        return evaluate.Score(score.client, score.samples, score.correct, float("inf" if score.client else "nan"))

    monkeypatch.setattr("fedfac.engine.lane.tally", overflown)
    method = methods.fedfac(layers=[1], tau=float("inf"))
    result = fit(tmp_path / "run", method=method, rounds=1)
    assert result.records[0]["test"]["loss"] is None
    assert result.clients[0]["loss"] is None
    for name in ("config.json", "partition.json"):
        strictly((tmp_path / "run" / name).read_text())
    for name in ("metrics.jsonl", "timing.jsonl"):
        for line in (tmp_path / "run" / name).read_text().splitlines():
            strictly(line)
    for record, masks, scores in RunDirectory.read(tmp_path / "run")._db.all(
        "SELECT record, masks, scores FROM rounds"
    ):
        assert [strictly(text) for text in (record, masks, scores)]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["method"]["tau"] == "inf"
    assert fedfac.load(tmp_path / "run", small_model(), method=method).records == result.records
    fit(tmp_path / "run", method=method, rounds=2, resume=True)
    report.write(tmp_path / "run")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    assert strictly(capsys.readouterr().out)["clients"][0]["loss"] is None


def test_a_run_of_a_version_that_wrote_infinity_can_be_resumed(tmp_path: Path) -> None:
    method = methods.fedfac(layers=[1], tau=float("inf"))
    fit(tmp_path / "run", method=method, rounds=1)
    path = tmp_path / "run" / "config.json"
    old = path.read_text().replace('"tau": "inf"', '"tau": Infinity')
    assert "Infinity" in old
    path.write_text(old)
    assert fit(tmp_path / "run", method=method, rounds=2, resume=True).finished
    assert fedfac.load(tmp_path / "run", small_model(), method=method).finished


def test_no_json_of_ours_has_a_word_for_infinity() -> None:
    assert json_text({"a": [float("nan"), 1.5], "b": (float("-inf"),)}) == '{"a": [null, 1.5], "b": [null]}'


def test_a_database_whose_own_tables_are_no_text_any_more_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    Database.create(path, "CREATE TABLE rounds (record TEXT)")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"CREATE TABLE rounds", b"CREATE \xd4\xd4\xd4\xd4\xd4 rounds"))
    said = message(RunError, lambda: Database(path, writable=False))
    assert "state.sqlite is damaged" in said
