"""Damaged run directories: whatever is in their files, reading them works or fails with an error of fedfac's own.

Nothing on disk changes unless the run is resumed. ``FEDFAC_FUZZ=5000 pytest tests/test_fuzz_run.py`` tries more;
``FEDFAC_FUZZ_SEED`` begins elsewhere. A failure names the number that makes it again by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import within

import fedfac
from fedfac import earlier, methods, report
from fedfac.commands import inspect
from fedfac.conformance import small_federation, small_model
from fedfac.errors import FedfacError
from fedfac.run import RunDirectory
from fedfac.state import digest
from fedfac.switches import Average

MUTATIONS = int(os.environ.get("FEDFAC_FUZZ", "60"))
SEED = int(os.environ.get("FEDFAC_FUZZ_SEED", "0"))
METHOD = methods.fedfac(layers=[1]) | Average(0.5)
TEXTS = ("config.json", "partition.json", "metrics.jsonl", "timing.jsonl")
WEIRD: list[Any] = [
    None, True, -1, 0, 10**18, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x", "\x1b[31m", "²", "9" * 5000,
    [], {}, [[]], [None], {"": {}}, {"round": 1}, "__import__('os')", "torch.hub:load",
    json.loads("[" * 900 + "]" * 900),
]  # fmt: skip


def fit(out: Path, **more: Any) -> fedfac.Result:
    how: dict[str, Any] = {"cohort": 2, "epochs": 1, "batch_size": 16, "device": "cpu", "lanes": 1, "evaluate_every": 1}
    return fedfac.fit(small_model(), small_federation(), method=METHOD, out=out, rounds=3, **how | more)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sound") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier, "EVERY", 1)
        for number in range(3):
            fit(out, resume=number > 0, should_stop=lambda: True)
    assert RunDirectory.read(out).earlier_rounds() == [1, 2]
    return out


# --- mutations -------------------------------------------------------------------------------------------------------


def of_bytes(draw: random.Random, data: bytes) -> bytes:
    """One to four changes of a few bytes, or of where the file ends."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice([1, 1, 2, 8, 100, 5000]))
        piece = data[start:end]
        flipped = bytes(byte ^ (1 << draw.randrange(8)) for byte in piece)
        sign = draw.choice([b"9", b"-", b'"', b"{", b"[", b"\x00", b"\xff"])
        instead = draw.choice([flipped, draw.randbytes(len(piece)), b"", piece + piece, piece + sign])
        data = data[:start] + instead + (b"" if draw.random() < 0.15 else data[end:])
    return data


def of_values(draw: random.Random, value: Any) -> Any:
    """Some value in it is another one, or gone."""
    places: list[tuple[Any, Any]] = []

    def walk(found: Any) -> None:
        for key in list(found) if isinstance(found, dict) else range(len(found)):
            places.append((found, key))
            if isinstance(found[key], dict | list):
                walk(found[key])

    if not isinstance(value, dict | list) or not value:
        return draw.choice(WEIRD)
    walk(value)
    owner, key = draw.choice(places)
    if draw.random() < 0.25:
        del owner[key]
    else:
        owner[key] = draw.choice(WEIRD)
    return value


def of_json(draw: random.Random, text: str) -> str:
    """A line of JSON with another value; the split of a config, which is JSON in JSON, on its own now and then."""
    value = json.loads(text)
    if isinstance(value, dict) and "split" in value and isinstance(value["split"], str) and draw.random() < 0.4:
        return json.dumps(value | {"split": json.dumps(of_values(draw, json.loads(value["split"])))})
    return json.dumps(of_values(draw, value))


def of_database(draw: random.Random, path: Path) -> None:
    """A cell with another value, and where there is a checksum, one that fits: somebody who knows the format."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = draw.choice(tables)
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = draw.choice(columns)
        rows = db.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
        if draw.random() < 0.1 or not rows:
            db.execute(draw.choice([f"DROP TABLE {table}", f"DELETE FROM {table}"]))
            return
        row, old = draw.choice(rows)
        new: Any = draw.choice([b"", b"\x00" * 9, "x", "[]", "{}", "null", -1, 0, 10**15, 0.5])
        if isinstance(old, str) and old[:1] in "[{" and draw.random() < 0.8:
            new = of_json(draw, old)
        elif isinstance(old, bytes) and draw.random() < 0.8:
            new = of_bytes(draw, old)
        with contextlib.suppress(sqlite3.IntegrityError):
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))
            if table == "rounds" and column != "digest":
                texts = db.execute("SELECT record, masks, scores FROM rounds WHERE rowid = ?", (row,)).fetchone()
                if texts is not None and all(isinstance(text, str) for text in texts):
                    fitting = digest("\n".join(texts).encode())
                    db.execute("UPDATE rounds SET digest = ? WHERE rowid = ?", (fitting, row))
            if column == "data" and isinstance(new, bytes) and "digest" in columns:
                db.execute(f"UPDATE {table} SET digest = ? WHERE rowid = ?", (digest(new), row))


def mutate(draw: random.Random, folder: Path) -> str:
    """Damage one or two of the files; says which."""
    names = draw.sample([*TEXTS, "state.sqlite", "config.json", "state.sqlite"], draw.choice([1, 1, 2]))
    for name in names:
        path = folder / name
        kind = draw.random()
        if kind < 0.04:
            path.unlink(missing_ok=True)
        elif not path.exists():
            continue
        elif name == "state.sqlite" and kind < 0.6:
            with contextlib.suppress(sqlite3.DatabaseError):  # its second change finds it damaged
                of_database(draw, path)
        elif name != "state.sqlite" and kind < 0.6:
            with contextlib.suppress(ValueError, RecursionError):
                separator = "\n" if name.endswith("l") else "\0"
                lines = path.read_text().rstrip("\n").split(separator)
                number = draw.randrange(len(lines))
                lines[number] = of_json(draw, lines[number])
                path.write_text(separator.join(lines) + "\n")
        else:
            path.write_bytes(of_bytes(draw, path.read_bytes()))
    return ", ".join(names)


# --- readers ---------------------------------------------------------------------------------------------------------


def look(folder: Path, page: Path) -> None:
    run = RunDirectory.read(folder)
    try:
        facts = inspect.gather(run)
    finally:
        run.close()
    inspect.show(facts, 3)


def load(folder: Path, page: Path) -> None:
    result = fedfac.load(folder, small_model(), method=METHOD)
    assert result.model(0) is not None
    assert result.metrics.num_rows <= 3
    assert result.splits.keys() == result.masks.keys()


def write_page(folder: Path, page: Path) -> None:
    assert report.write(folder, page).exists()


def resume(folder: Path, page: Path) -> None:
    assert fit(folder, resume=True).finished


def go_back(folder: Path, page: Path) -> None:
    RunDirectory.resume(folder, rounds=3, from_round=2).close()


READERS: tuple[Callable[[Path, Path], None], ...] = (look, load, write_page, go_back, resume)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (*TEXTS, "state.sqlite") if (folder / name).exists()}


def try_one(sound: Path, space: Path, number: int) -> int:
    """How many readers could make something of it."""
    draw = random.Random(number)
    folder, worked = space / "run", 0
    shutil.copytree(sound, folder)
    names = mutate(draw, folder)
    before = contents(folder)
    for reader in READERS:
        try:
            with within(20):
                reader(folder, space / "page.html")
        except FedfacError:
            changed = contents(folder) != before
        except BaseException as error:
            raise AssertionError(f"FEDFAC_FUZZ=1 FEDFAC_FUZZ_SEED={number}: {names}, {reader.__name__}") from error
        else:
            worked += 1
            changed = reader not in (resume, go_back) and contents(folder) != before
            before = contents(folder)
        assert not changed, f"FEDFAC_FUZZ=1 FEDFAC_FUZZ_SEED={number}: {names}, {reader.__name__} changed a file"
    shutil.rmtree(space)
    return worked


def test_damaged_runs_are_read_or_refused(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worked = [try_one(sound, tmp_path / "one", number) for number in range(SEED, SEED + MUTATIONS)]
    if MUTATIONS >= 60:  # some damage is seen by every reader, some (a time, a loss) by none of them
        assert min(worked) == 0
        assert max(worked) == len(READERS)
