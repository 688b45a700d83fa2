"""Attack: names that write into the terminal, or are too long for a file. Nothing shows them raw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedfac
from fedfac.cli import main
from fedfac.data.tables import csv_or_parquet
from fedfac.errors import DataError, FedfacError
from fedfac.words import file_stem, message, printable

EVIL = "ward\x1b]0;owned\x07\x1b[2J\u202e[bold red]7"
LONG = "x" * 300
CONTROL = [chr(c) for c in range(0x20) if chr(c) not in "\n\t"] + ["\x7f", "\x9b", "\u202e", "\u2028"]


def table(path: Path, *, clients: tuple[str, ...] = (EVIL, LONG), column: str = "age") -> Path:
    n = 24
    made = {
        column: np.arange(n) % 7,
        "label": [("no\x1b[31m", "yes")[i % 2] for i in range(n)],
        "ward": [clients[i % len(clients)] for i in range(n)],
    }
    pq.write_table(pa.table(made), path)
    return path


def is_clean(text: str) -> bool:
    return not any(c in text for c in CONTROL)


def test_commands_show_no_control_character_and_write_no_raw_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")  # a table in one piece
    evil_file = table(Path("we\x1b[31mird" + "y" * 180 + ".parquet"))
    data = ["--data", str(evil_file), "--label", "label", "--client", "ward"]
    quick = ["--rounds", "1", "--epochs", "1", "--method", "fedper"]
    for arguments in (["data", "show", *data], ["run", *data, *quick]):
        assert main(arguments) == 0
    (run,) = Path("runs").iterdir()
    for arguments in (
        ["inspect", str(run)],
        ["export", str(run), "--client", EVIL],
        ["export", str(run), "--client", LONG],
    ):
        assert main(arguments) == 0, arguments
    assert main(["export", str(run), "--client", EVIL + "?"]) == 1
    said = capsys.readouterr()
    assert is_clean(said.out)
    assert is_clean(said.err)
    assert "ward\\x1b]0;owned" in "".join(said.out.split())
    assert "[bold red]7" in said.out  # not taken for a style
    names = [path.name for path in tmp_path.rglob("*") if path.name != evil_file.name]
    assert all(name.isprintable() and len(name) <= 200 for name in names)
    assert list(fedfac.load(run).names) == [EVIL, LONG]  # data is what it is


def test_errors_hold_no_control_character(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", column=EVIL)
    for arguments in (
        {"label": "lable"},
        {"label": "label", "client": "\x1b[2J"},
        {"label": EVIL, "drop": ["age\x07"]},
    ):
        with pytest.raises(FedfacError) as caught:
            csv_or_parquet(path, **arguments)
        assert is_clean(str(caught.value))
    assert is_clean(str(FedfacError(EVIL)))
    assert len(str(FedfacError("x" * 10**7))) < 5000


def test_a_name_of_a_thousand_characters_is_one_too_long(tmp_path: Path) -> None:
    assert (
        csv_or_parquet(table(tmp_path / "a.parquet", clients=("x" * 1000,)), label="label", client="ward").classes == 2
    )
    with pytest.raises(DataError, match=r"'x+\.\.\.' has 1001 characters; allowed: 1000"):
        csv_or_parquet(table(tmp_path / "b.parquet", clients=("x" * 1001,)), label="label", client="ward")
    with pytest.raises(DataError, match=r"'a\\x00' has a NUL character"):  # numpy would take it for 'a'
        csv_or_parquet(table(tmp_path / "c.parquet", clients=("a", "a\0")), label="label", client="ward")


def test_every_character_is_printable_or_escaped() -> None:
    everything = "".join(map(chr, range(0x3000))) + "\ud800"
    shown = printable(everything, 10**6)
    assert shown.isprintable()
    assert message("one\ntwo\tthree\x1b") == "one\ntwo\tthree\\x1b"


def test_stems_differ_where_names_do() -> None:
    assert file_stem("a" * 300) != file_stem("a" * 301)
    assert json.dumps(file_stem("../../etc")) == '".._.._etc"'
    assert "/" not in file_stem("a/../b\\c")
