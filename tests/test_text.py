"""Shakespeare's roles: every window is in its role's text, train and test share nothing, all forms agree."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfac.data import text
from fedfac.data.federation import Federation
from fedfac.data.samples import Samples
from fedfac.data.text import TextPool, from_files, shakespeare, speeches
from fedfac.errors import ConfigError, DataError

Windows = list[tuple[str, str]]
Row = tuple[str, str, str]

LEAF = (  # written out once more, so that a slip in the code's list would show
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)


def plain(value: str) -> str:
    """Characters outside of LEAF's list become one."""
    return "".join(c if c in LEAF else "�" for c in value)


def read(samples: Samples) -> dict[str, tuple[Windows, Windows]]:
    """All windows of all roles, as text."""
    letters = [*LEAF, "�"]
    assert samples.fixed is not None

    def windows(index: Any) -> Windows:
        x, y = samples.pool.batch(torch.tensor(list(index), dtype=torch.int64))
        return [("".join(letters[i] for i in a), letters[b]) for a, b in zip(x.tolist(), y.tolist(), strict=True)]

    return {role: (windows(train), windows(test)) for role, (train, test) in samples.fixed.items()}


def expected(roles: Mapping[str, str], window: int) -> dict[str, tuple[Windows, Windows]]:
    """The same by the words of the task: strings are cut, and nothing is clever."""
    result = {}
    for role, everything in roles.items():
        lines = everything.strip("\n").split("\n")
        n = math.floor(len(lines) * 0.8 + 1e-9)
        parts = []
        for part in (lines[:n], lines[n:]):
            one = plain("\n".join(part))
            parts.append([(one[i : i + window], one[i + window]) for i in range(len(one) - window)])
        if parts[0] and parts[1]:
            result[role] = (parts[0], parts[1])
    return result


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    pq.write_table(pa.table(dict(columns)), path)
    return path


def write_roles(path: Path, roles: Mapping[str, str]) -> Path:
    return write_parquet(path, {"character_id": list(roles), "text": list(roles.values())})


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("character_id", "x", "y"), *rows])
    return path


def write_leaf(path: Path, rows: Sequence[Row]) -> Path:
    users: dict[str, dict[str, list[str]]] = {}
    for role, x, y in rows:
        data = users.setdefault(role, {"x": [], "y": []})
        data["x"].append(x)
        data["y"].append(y)
    counts = [len(data["y"]) for data in users.values()]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": users}))
    return path


def slide(role: str, line: str, window: int) -> list[Row]:
    return [(role, line[i : i + window], line[i + window]) for i in range(len(line) - window)]


SPEECH = {
    "LEAR_FOOL": "\n".join(f"Nuncle, speech {i} is a speech, and {i * i} is not." for i in range(10)),
    "LEAR_KENT": "Sir!\nNo, my lord, I am no such thing as a long part.\nFarewell.",
}


def test_the_vocabulary_is_leafs() -> None:
    assert text.VOCABULARY == LEAF
    assert len(LEAF) == len(set(LEAF)) == 80
    assert text.encode("\n Aa}").tolist() == [0, 1, 25, 53, 79]
    assert text.encode("é\t\ud800€\U0001f600").tolist() == [80] * 5


def test_windows_next_characters_and_counts(tmp_path: Path) -> None:
    samples = from_files([write_roles(tmp_path / "roles.parquet", SPEECH)])
    assert read(samples) == expected(SPEECH, 80)
    assert list(samples.fixed or {}) == ["LEAR_FOOL"]
    assert (samples.classes, samples.labels, samples.owners) == (81, None, None)
    assert samples.class_names == (*LEAF, "unknown")


@settings(max_examples=60, deadline=None)
@given(
    roles=st.dictionaries(
        st.text("ABC_", min_size=1, max_size=4), st.text("ab \n\té", max_size=40), min_size=1, max_size=5
    ),
    window=st.integers(1, 6),
)
def test_every_window_is_in_its_roles_text(roles: dict[str, str], window: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_roles(Path(folder) / "roles.parquet", roles)
        wanted = expected(roles, window)
        if not wanted:
            assert "no role" in message(DataError, lambda: from_files([path], window=window))
            return
        samples = from_files([path], window=window)
    found = read(samples)
    assert found == wanted
    assert samples.fixed is not None
    taken: set[int] = set()
    for role, (train, test) in samples.fixed.items():
        for index, windows in zip((train, test), found[role], strict=True):
            assert all(x + y in plain(roles[role]) for x, y in windows)
            characters = {i + k for i in index for k in range(window + 1)}
            assert not characters & taken, "a character belongs to one role and one part"
            taken |= characters


def kept_rows(rows: Sequence[Row]) -> dict[str, tuple[Windows, Windows]]:
    """What rows of windows should become: characters are objects, and test windows share none with training."""
    result = {}
    for role in dict.fromkeys(row[0] for row in rows):
        spans: list[list[object]] = []
        own = [(plain(x), plain(y)) for name, x, y in rows if name == role]
        for i, (x, y) in enumerate(own):
            goes_on = i > 0 and x == (own[i - 1][0] + own[i - 1][1])[1:]
            spans.append([*spans[-1][1:], object()] if goes_on else [object() for _ in x + y])
        n = math.floor(len(own) * 0.8 + 1e-9)
        trained = {id(c) for span in spans[:n] for c in span}
        train = own[:n]
        test = [w for w, span in zip(own[n:], spans[n:], strict=True) if not trained & {id(c) for c in span}]
        if train and test:
            result[role] = (train, test)
    return result


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.tuples(st.sampled_from("ABC"), st.text("ab \né", max_size=25)), min_size=1, max_size=8),
    window=st.integers(1, 4),
    batch=st.integers(1, 9),
)
def test_rows_of_windows_become_the_text_they_came_from(lines: list[tuple[str, str]], window: int, batch: int) -> None:
    rows = [row for role, line in lines for row in slide(role, line, window)]
    names = ("character_id", "x", "y")
    columns = {name: pa.array([row[i] for row in rows], pa.string()) for i, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_BATCH", batch)  # runs go on from one batch to the next
        path = Path(folder) / "rows.parquet"
        pq.write_table(pa.table(columns), path)
        wanted = kept_rows(rows)
        if not wanted:
            assert "no role" in message(DataError, lambda: from_files([path], window=window))
            return
        assert read(from_files([path], window=window)) == wanted


def test_rows_are_stored_as_text_not_as_windows(tmp_path: Path) -> None:
    line = "".join(LEAF[i * i % 80] for i in range(1000))
    pool = from_files([write_csv(tmp_path / "a.csv", slide("A", line, 80))]).pool
    assert isinstance(pool, TextPool)
    assert (pool.text.dtype, len(pool.text)) == (torch.uint8, 1000)


def test_a_text_is_held_once_and_clients_are_ranges(tmp_path: Path) -> None:
    samples = from_files([write_roles(tmp_path / "roles.parquet", SPEECH)])
    assert isinstance(samples.pool, TextPool)
    assert samples.pool.text.dtype == torch.uint8
    assert len(samples.pool.text) == len(SPEECH["LEAR_FOOL"]) - 1, "all but the line break between the parts"
    assert all(isinstance(part, range) for parts in (samples.fixed or {}).values() for part in parts)


def test_all_forms_of_the_rows_agree(tmp_path: Path) -> None:
    rows = [
        row
        for role, n in (("A", 8), ("B", 3), ("A", 2))
        for i in range(n)
        for row in slide(role, " " * 80 + f'"Speech" {i}, of {role},\n', 80)
    ]
    table = {name: [row[i] for row in rows] for i, name in enumerate(("character_id", "x", "y"))}
    forms = [
        from_files([write_parquet(tmp_path / "a.parquet", table)]),
        from_files([write_csv(tmp_path / "a.csv", rows)]),
        from_files([write_leaf(tmp_path / "a.json", rows)]),
    ]
    assert all(read(form) == kept_rows(rows) for form in forms)
    assert len({form.fingerprint for form in forms}) == 1


def test_leafs_own_division_is_kept(tmp_path: Path) -> None:
    rows = slide("A", "to be or not to be", 5)
    train = write_leaf(tmp_path / "train" / "all_data_train_9.json", [*rows[::2], ("B", "aaaaa", "b")])
    test = write_leaf(tmp_path / "test" / "all_data_test_9.json", rows[1::2])
    found = read(from_files([train, test], window=5))
    assert found == {"A": ([row[1:] for row in rows[::2]], [row[1:] for row in rows[1::2]])}
    beside = write_leaf(tmp_path / "all.json", rows)
    assert "which part is it?" in message(DataError, lambda: from_files([train, test, beside], window=5))


def test_all_positions(tmp_path: Path) -> None:
    path = write_roles(tmp_path / "roles.parquet", SPEECH)
    last = from_files([path], window=20)
    every = from_files([path], window=20, all_positions=True)
    index = torch.tensor([0, 7, 3])
    x, y = every.pool.batch(index)
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((3, 20), (3, 20), torch.int64, torch.int64)
    assert torch.equal(y[:, :-1], x[:, 1:])
    assert torch.equal(y[:, -1], last.pool.batch(index)[1])
    assert every.fingerprint != last.fingerprint
    assert torch.equal(every.pool.to(torch.device("cpu")).batch(index)[1], y)


def test_a_role_in_several_rows_is_one_role(tmp_path: Path) -> None:
    lines = SPEECH["LEAR_FOOL"].split("\n")
    apart = write_parquet(tmp_path / "a.parquet", {"text": lines, "character_id": ["LEAR_FOOL"] * len(lines)})
    assert read(from_files([apart])) == expected({"LEAR_FOOL": SPEECH["LEAR_FOOL"]}, 80)


def test_a_federation_of_roles(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    write_roles(tmp_path / "shakespeare" / "roles.parquet", SPEECH)
    samples = shakespeare(data_dir=tmp_path, window=12)
    federation = Federation.from_pool(
        samples.pool, samples.fixed or {}, classes=samples.classes, fingerprint=samples.fingerprint
    )
    assert list(federation.names) == ["LEAR_FOOL"]
    wanted = expected(SPEECH, 12)["LEAR_FOOL"]
    assert (federation.client(0).size, len(federation.client(0).test)) == (len(wanted[0]), len(wanted[1]))


# ---------------------------------------------------------------- plays as plain text

GUTENBERG = """The Project Gutenberg eBook of Nothing

NOBODY.
This is no part of the play.

*** START OF THE PROJECT GUTENBERG EBOOK ***

THE TRAGEDY OF NOTHING

ACT I

SCENE I. Elsinore. A platform before the Castle.

 Enter Francisco and Barnardo.

BARNARDO.
Who’s there?

FIRST LORD.
Nay, answer me—stand,
[_Drawing._] and unfold yourself.

 [_Exeunt._]

LADY ANNE
Long live the King!

*** END OF THE PROJECT GUTENBERG EBOOK ***

SOMEBODY.
Nor this.
"""


def test_speeches_as_gutenberg_prints_them() -> None:
    assert speeches(GUTENBERG) == [
        ("BARNARDO", "Who's there?"),
        ("FIRST_LORD", "Nay, answer me--stand, and unfold yourself."),
        ("LADY_ANNE", "Long live the King!"),
    ]


def test_speeches_behind_the_role() -> None:
    older = "SCENE I.\nElsinore.\n\n  BER. Who's there?\n  FRAN. Nay, answer me. Stand and\n    unfold yourself.\n"
    assert speeches(older) == [("BER", "Who's there?"), ("FRAN", "Nay, answer me. Stand and unfold yourself.")]
    mit = "BERNARDO\tWho's there?\n\nFRANCISCO\tNay, answer me: stand, and\n\tunfold yourself.\n\n\t[Enter GHOST]\n"
    assert speeches(mit) == [("BERNARDO", "Who's there?"), ("FRANCISCO", "Nay, answer me: stand, and unfold yourself.")]


def test_plays_in_a_folder(tmp_path: Path) -> None:
    one = "".join(f"KING.\nLine {i} of the first play, which is short.\n\n" for i in range(10))
    (tmp_path / "1 Henry IV.txt").write_text(one)
    (tmp_path / "Lear.txt").write_text(one.replace("first", "other"))
    found = read(shakespeare(data_dir=tmp_path, window=30))
    roles = {
        f"{play}_KING": "\n".join(f"Line {i} of the {which} play, which is short." for i in range(10))
        for play, which in (("1HENRYIV", "first"), ("LEAR", "other"))
    }
    assert found == expected(roles, 30)


# ---------------------------------------------------------------- damaged and wrong files


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = write_roles(tmp_path / "roles.parquet", SPEECH)
    path.write_bytes(path.read_bytes()[:-20])
    said = message(DataError, lambda: from_files([path]))
    assert str(path) in said
    assert "Is the file whole? Delete it and get it again" in said


def test_damage_in_the_middle_of_a_parquet_file(tmp_path: Path) -> None:
    path = write_roles(tmp_path / "roles.parquet", {f"ROLE_{i}": f"{i}\n" * 200 for i in range(300)})
    data = bytearray(path.read_bytes())
    data[200:400] = bytes(200)
    path.write_bytes(data)
    assert "cannot be read" in message(DataError, lambda: from_files([path]))


def test_other_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"role": ["A"], "speech": ["x"]})
    said = message(DataError, lambda: from_files([path]))
    assert "has the columns ['role', 'speech']; wanted: ['character_id', 'text'] (one speech a line)" in said
    assert "['character_id', 'x', 'y']" in said


def test_files_of_two_kinds(tmp_path: Path) -> None:
    a = write_roles(tmp_path / "a.parquet", SPEECH)
    b = write_parquet(tmp_path / "b.parquet", {"character_id": ["A"], "x": ["a" * 80], "y": ["b"]})
    assert "has other columns than the files beside it" in message(DataError, lambda: from_files([a, b]))
    c = write_csv(tmp_path / "c.csv", [])
    assert "are no files of one form" in message(DataError, lambda: from_files([a, c]))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"character_id": ["A", None], "text": ["a", "b"]}, "column 'character_id' has 1 missing values"),
        ({"character_id": ["A"], "text": [7]}, "column 'text' is of type int64; wanted: text"),
        ({"character_id": ["A"] * 2, "x": ["a" * 80, "a" * 79], "y": ["b"] * 2}, "row 1, column 'x': 79 characters"),
        (
            {"character_id": ["A"] * 2, "x": ["a" * 80] * 2, "y": ["b", "bb"]},
            "row 1, column 'y': 2 characters; wanted: 1",
        ),
        ({"character_id": [], "text": []}, "no role in a.parquet has text"),
    ],
)
def test_wrong_values(tmp_path: Path, columns: dict[str, list[Any]], text: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", columns)
    assert text in message(DataError, lambda: list(from_files([path]).fixed or {}))


def test_a_window_that_the_rows_do_not_have(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", slide("A", LEAF * 2, 80))
    said = message(DataError, lambda: from_files([path], window=40))
    assert "80 characters; wanted: 40" in said
    assert "ask for that window, or give the text itself" in said


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"users": ["A"], "user_data": {"A": {"x": ["a', "is not JSON"),
        ("[1, 2]", "got `array`; wanted: LEAF's 'users', 'num_samples' and 'user_data'"),
        ('{"users": ["A"], "data": 1}', "missing required field `user_data`"),
        ('{"users": ["A"], "user_data": {}}', "user 'A' has no data; wanted: every user once"),
        ('{"user_data": {"A": {"x": ["abcde"], "y": []}}}', "one y for every x"),
        ('{"user_data": {"A": {"x": ["abcd"], "y": ["e"]}}}', "user 'A', 'x' number 0: 4 characters; wanted: 5"),
    ],
)
def test_bad_json(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert text in message(DataError, lambda: from_files([path], window=5))


def test_a_ragged_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("character_id,x,y\nA,abc,d\nA,abc\n")
    assert "Expected 3 columns, got 2" in message(DataError, lambda: from_files([path], window=3))
    path.write_text("")
    assert "cannot be read" in message(DataError, lambda: from_files([path], window=3))


def test_text_that_is_no_play(tmp_path: Path) -> None:
    path = tmp_path / "readme.txt"
    path.write_text("nothing here is spoken\n")
    assert "no role in readme.txt has text" in message(DataError, lambda: from_files([path]))
    path.write_bytes(b"HAMLET.\n\xff\xfe")
    assert "cannot be read as UTF-8 text" in message(DataError, lambda: from_files([path]))


def test_no_window_and_no_folder(tmp_path: Path) -> None:
    assert "a window of 0 characters" in message(ConfigError, lambda: shakespeare(window=0))
    with pytest.raises(DataError, match="shakespeare"):
        shakespeare(data_dir=tmp_path)
