"""Shakespeare: one client for every speaking role, predict the next character (Caldas et al. 2018, LEAF).

The text is held once, as character ids; a sample is the place where a window begins, and a batch of windows
is one gather. The first 80 % of a role's lines train, the rest test, and no window touches two roles or both
parts. A role without text for one window in either part is left out.

Characters: the 80 of LEAF's list in LEAF's order (``ALL_LETTERS`` in its ``language_utils.py``), so that ids
agree with what the competitors' code uses, and one more id for every other character.

Four forms are read:

- a table (parquet or CSV) with ``character_id`` and ``text``: one speech a line;
- a table with ``character_id``, ``x``, ``y``: LEAF's windows, one a row, as the hub's ``flwrlabs/shakespeare``;
- LEAF's JSON: ``users`` and ``user_data`` with ``x`` and ``y``. Files in folders ``train`` and ``test`` keep
  LEAF's own division (which is random over windows, so that test windows overlap training windows);
- plays as plain text, one file a play (see :func:`speeches`).

Rows of windows that follow each other (each begins one character after the one before) are stored as the text
that they came from. They are divided by rows: the first 80 %, and of the rest those without a character of
the training text.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfac.data.bounded import check_text
from fedfac.data.federation import Index
from fedfac.data.files import Source, find
from fedfac.data.leaf import Windows, users_of
from fedfac.data.samples import Samples
from fedfac.errors import ConfigError, DataError
from fedfac.limits import check_memory, check_name, check_unpacked
from fedfac.words import quoted

Codes = npt.NDArray[np.uint8]
Parts = dict[str, tuple[Index, Index]]

VOCABULARY = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
UNKNOWN = len(VOCABULARY)
CLASS_NAMES = (*VOCABULARY, "unknown")
SPEECHES = ("character_id", "text")
ROWS = ("character_id", "x", "y")
SOURCE = Source(
    name="shakespeare",
    repo="flwrlabs/shakespeare",
    revision="2cfe3a5ba0d9b34634ade086803a479b2c2b8e11",
    files=("shakespeare.csv",),
    patterns=("*.parquet",),
    alternatives=(("*.csv",), ("train/*.json", "test/*.json"), ("*.json",), ("*.txt",)),
)
_FORMS = (".parquet", ".csv", ".json", ".txt")
_BATCH = 16384


def shakespeare(*, data_dir: Path | None = None, window: int = 80, all_positions: bool = False) -> Samples:
    """Every role of Shakespeare's plays: ``window`` characters in, the next one out.

    With ``all_positions`` the target is the next character at each of the ``window`` places.
    """
    if window < 1:
        raise ConfigError(f"a window of {window} characters cannot be cut; allowed: 1 or more (80 as in LEAF)")
    return from_files(find(SOURCE, data_dir), window=window, all_positions=all_positions)


def from_files(files: Sequence[Path], *, window: int = 80, all_positions: bool = False) -> Samples:
    """The same, from these files."""
    form = files[0].suffix
    if form not in _FORMS or any(path.suffix != form for path in files):
        raise DataError(f"{[path.name for path in files]} are no files of one form; allowed: {', '.join(_FORMS)}")
    if form == ".txt":
        text, parts = _from_speeches(_plays(files), window)
    elif form == ".json":
        text, parts = _from_rows(_leaf_rows(files, window), window)
    elif {_form(path) for path in files} == {SPEECHES}:
        text, parts = _from_speeches(_table_speeches(files), window)
    else:
        text, parts = _from_rows(_table_rows(files, window), window)
    for role in parts:
        check_name(role, "the role")
    if not parts:
        raise DataError(
            f"no role in {', '.join(path.name for path in files)} has text for a window of {window} characters "
            "and the next one, both in the first 80 % of its lines and in the rest: give more text or a smaller window"
        )
    pool = TextPool(text, window, all_positions)
    return Samples(
        name="shakespeare",
        pool=pool,
        fingerprint=pool.fingerprint(),
        labels=None,  # one for each of four million windows would cost more than the text
        classes=len(CLASS_NAMES),
        fixed=parts,
        class_names=CLASS_NAMES,
    )


@dataclass(frozen=True)
class TextPool:
    """A text of character ids; sample number i is the window that begins at character i."""

    text: Tensor  # uint8
    window: int
    all_positions: bool = False

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (B, window) and the next character (B,), or the next at every place (B, window)."""
        places = index.to(self.text.device)[:, None] + torch.arange(self.window + 1, device=self.text.device)
        characters = self.text[places].long()
        return characters[:, :-1], characters[:, 1:] if self.all_positions else characters[:, -1]

    def to(self, device: torch.device) -> TextPool:
        """The pool with its text on ``device``."""
        return replace(self, text=self.text.to(device))

    def fingerprint(self) -> str:
        """A checksum of the text and of how it is cut."""
        check = hashlib.blake2b(repr((self.window, self.all_positions)).encode(), digest_size=16)
        check.update(memoryview(self.text.numpy()))  # type: ignore[arg-type]
        return check.hexdigest()


_TABLE: Codes = np.full(129, UNKNOWN, dtype=np.uint8)
_TABLE[[ord(c) for c in VOCABULARY]] = np.arange(len(VOCABULARY))


def encode(text: str) -> Codes:
    """Character ids.

    >>> encode("\\n Aé").tolist()
    [0, 1, 25, 80]
    """
    wide = not text.isascii()  # rare, and four times slower
    data = text.encode("utf-32-le", "surrogatepass") if wide else text.encode()
    points = np.frombuffer(data, dtype=np.dtype("<u4") if wide else np.dtype(np.uint8))
    codes: Codes = _TABLE.take(np.minimum(points, 128))
    return codes


class _Tape:
    """Pieces of text, end to end."""

    def __init__(self) -> None:
        self.pieces: list[Codes] = []
        self.length = 0

    def add(self, piece: Codes) -> int:
        """Put a piece at the end; where it begins."""
        start = self.length
        self.pieces.append(piece)
        self.length += len(piece)
        return start

    def tensor(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self.pieces)) if self.pieces else torch.empty(0, dtype=torch.uint8)


# ---------------------------------------------------------------- speeches


def _from_speeches(roles: Mapping[str, str], window: int) -> tuple[Tensor, Parts]:
    """The text of all roles, and each role's windows as two ranges."""
    tape, parts = _Tape(), Parts()
    for role, text in roles.items():
        train, test = (encode(part) for part in cut_lines(text))
        if min(len(train), len(test)) > window:
            first, second = tape.add(train), tape.add(test)
            parts[role] = (range(first, second - window), range(second, tape.length - window))
    return tape.tensor(), parts


def cut_lines(text: str) -> tuple[str, str]:
    """The first 80 % of the lines (rounded down), and the rest.

    >>> cut_lines("a\\nb\\nc")
    ('a\\nb', 'c')
    """
    lines = text.strip("\n").split("\n")
    n = len(lines) * 4 // 5
    return "\n".join(lines[:n]), "\n".join(lines[n:])


def _table_speeches(files: Iterable[Path]) -> dict[str, str]:
    """Each role's text; the rows of one role are one text."""
    roles: dict[str, list[str]] = {}
    size = 0
    for path in files:
        for batch in _batches(path, SPEECHES):
            size += batch.nbytes
            check_memory(size, str(path))
            for role, text in zip(*(batch[name].to_pylist() for name in SPEECHES), strict=True):
                roles.setdefault(role, []).append(text)
    return {role: "\n".join(texts) for role, texts in roles.items()}


# ---------------------------------------------------------------- rows of windows


class _Chains:
    """One role's rows of window + 1 characters; a row that goes on where the last one was adds one character."""

    def __init__(self, width: int) -> None:
        self.last: Codes | None = None
        self.tape = _Tape()
        self.starts: list[npt.NDArray[np.int64]] = []
        self.width = width

    def add(self, rows: Codes) -> None:
        goes_on = np.empty(len(rows), dtype=bool)
        goes_on[1:] = (rows[1:, :-1] == rows[:-1, 1:]).all(1)
        goes_on[0] = self.last is not None and bool((rows[0, :-1] == self.last[1:]).all())
        new = np.repeat(~goes_on[:, None], self.width, axis=1)
        new[:, -1] = True
        ends = self.tape.length + new.sum(1).cumsum()
        self.starts.append(ends - self.width)
        self.tape.add(rows[new])
        self.last = rows[-1].copy()

    def cut(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the windows of the first 80 % begin, and those of the rest that share no character with them."""
        starts = np.concatenate(self.starts)
        n = len(starts) * 4 // 5
        train, rest = starts[:n], starts[n:]
        return train, rest[rest >= train[-1] + self.width] if n else rest[:0]


_Role = tuple[str, str]  # its name, and "train", "test", or "" where the rows are still to be divided


def _from_rows(batches: Iterable[tuple[_Role, Codes]], window: int) -> tuple[Tensor, Parts]:
    """The text that the rows came from, and each role's windows as two index arrays."""
    chains: dict[_Role, _Chains] = {}
    for role, rows in batches:
        chains.setdefault(role, _Chains(window + 1)).add(rows)
    tape = _Tape()
    halves: dict[str, dict[str, npt.NDArray[np.int64]]] = {}
    for name, part in list(chains):
        chain = chains.pop((name, part))  # what was read is given back as it goes onto the tape
        offset = tape.length
        for piece in chain.tape.pieces:
            tape.add(piece)
        found = dict(zip(("train", "test"), chain.cut(), strict=True)) if not part else {part: _all(chain)}
        halves.setdefault(name, {}).update({part: starts + offset for part, starts in found.items()})
    parts: Parts = {
        name: (half["train"], half["test"])
        for name, half in halves.items()
        if half.keys() == {"train", "test"} and len(half["train"]) and len(half["test"])
    }
    return tape.tensor(), parts


def _all(chain: _Chains) -> npt.NDArray[np.int64]:
    return np.concatenate(chain.starts)


def _table_rows(files: Iterable[Path], window: int) -> Iterator[tuple[_Role, Codes]]:
    """The rows of a table, role by role in each batch."""
    import pyarrow.compute as pc

    for path in files:
        done = 0
        for batch in _batches(path, ROWS):
            for name, wanted in (("x", window), ("y", 1)):
                lengths = pc.utf8_length(batch[name]).to_numpy(zero_copy_only=False)
                _check_widths(lengths, wanted, f"{path}, row {{}}, column {name!r}", done)
            rows = _lines(pc.binary_join_element_wise(batch["x"], batch["y"], ""), window + 1)
            roles = batch["character_id"].dictionary_encode()
            codes = roles.indices.to_numpy()
            for code, role in enumerate(roles.dictionary.to_pylist()):
                yield (role, ""), rows[codes == code]
            done += len(rows)


def _lines(strings: Any, width: int) -> Codes:
    """An arrow array of strings of one length as (n, width) character ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    everything = pa.ListArray.from_arrays(pa.array([0, len(strings)], pa.int32()), strings)
    return encode(pc.binary_join(everything, "")[0].as_py()).reshape(-1, width)


def _check_widths(lengths: npt.NDArray[Any], wanted: int, where: str, before: int) -> None:
    wrong = np.flatnonzero(lengths != wanted)
    if len(wrong):
        raise DataError(
            f"{where.format(before + wrong[0])}: {lengths[wrong[0]]} characters; wanted: {wanted}. "
            "Windows that are cut already have one width: ask for that window, or give the text itself"
        )


def _leaf_rows(files: Iterable[Path], window: int) -> Iterator[tuple[_Role, Codes]]:
    """The windows in LEAF's JSON files, with the part that a folder ``train`` or ``test`` says."""
    files = list(files)
    parts = {path.parent.name for path in files}
    divided = {"train", "test"} <= parts
    for path in files:
        part = path.parent.name if path.parent.name in ("train", "test") else ""
        if divided and not part:
            raise DataError(f"{path} lies beside the folders train and test: which part is it? Move or remove it")
        for role, (x, y) in _leaf_users(path):
            for name, texts, wanted in (("x", x, window), ("y", y, 1)):
                lengths = np.array([len(text) for text in texts], dtype=np.int64)
                _check_widths(lengths, wanted, f"{path}, user {role!r}, {name!r} number {{}}", 0)
            if x:
                rows = encode("".join(a + b for a, b in zip(x, y, strict=True)))
                yield (role, part if divided else ""), rows.reshape(-1, window + 1)


def _leaf_users(path: Path) -> Iterator[tuple[str, tuple[list[str], list[str]]]]:
    wanted = "lists 'x' and 'y' of texts, one y for every x"
    for user, data in users_of(path, Windows, wanted):
        if len(data.x) != len(data.y):
            raise DataError(f"{path}: user {quoted(user)} needs {wanted}: it has {len(data.x)} and {len(data.y)}")
        yield user, (data.x, data.y)


# ---------------------------------------------------------------- tables


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What arrow says of a damaged file, as our error."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Is the file whole? Delete it and get it again") from error


def _form(path: Path) -> tuple[str, ...]:
    """Which of the two kinds of table this is."""
    with _readable(path):
        columns = _columns(path)
    for form in (SPEECHES, ROWS):
        if set(form) <= set(columns):
            return form
    raise DataError(
        f"{path} has the columns {columns}; wanted: {list(SPEECHES)} (one speech a line) "
        f"or {list(ROWS)} (LEAF's windows)"
    )


def _columns(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_schema(path).names)
    from pyarrow import csv

    with csv.open_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True)) as reader:
        return list(reader.schema.names)


def _batches(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Some rows at a time, as strings; the file is never in memory as a whole."""
    with _readable(path):
        if _form(path) != columns:
            raise DataError(f"{path} has other columns than the files beside it; wanted: {list(columns)}")
        for batch in _parquet(path, columns) if path.suffix == ".parquet" else _csv(path, columns):
            for name in columns:
                _check_strings(batch[name], f"{path}, column {name!r}")
            if batch.num_rows:
                yield batch


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, read_dictionary=list(columns)) as file:
        size = 0
        for batch in file.iter_batches(_BATCH, columns=list(columns)):
            batch.validate(full=True)
            size += sum(_length(batch[name]) for name in columns)
            check_unpacked(size, path.stat().st_size, str(path))
            yield pa.RecordBatch.from_arrays([_as_strings(batch[name]) for name in columns], names=list(columns))


def _length(column: Any) -> int:
    """Bytes of a column of texts, as if every row had its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary)
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)


def _as_strings(column: Any) -> Any:
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _csv(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv

    check_text(path)
    types = csv.ConvertOptions(include_columns=columns, column_types=dict.fromkeys(columns, pa.string()))
    with csv.open_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True), convert_options=types) as reader:
        yield from reader


def _check_strings(column: Any, where: str) -> None:
    import pyarrow.types as types

    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise DataError(f"{where} is of type {column.type}; wanted: text")
    if column.null_count:
        raise DataError(f"{where} has {column.null_count} missing values; wanted: text in every row")


# ---------------------------------------------------------------- plays as plain text

_HEADING = re.compile(r"^ {0,4}(?P<role>[A-Z][A-Z' -]*[A-Z])(?:\.\s*$|\s*$|\.\s+|\t+)(?P<speech>.*)$")
_NO_ROLE = re.compile(r"(?:ACT|SCENE|SCENA|ACTUS|FINIS|THE END)\b")
_TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "_": ""})


def _plays(files: Iterable[Path]) -> dict[str, str]:
    """PLAY_ROLE and its speeches, one a line."""
    roles: dict[str, list[str]] = {}
    for path in files:
        play = re.sub(r"[^A-Z0-9]", "", path.stem.upper())
        try:
            check_memory(path.stat().st_size, str(path))
            text = path.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError) as error:
            raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
        for role, speech in speeches(text):
            roles.setdefault(f"{play}_{role}", []).append(speech)
    return {role: "\n".join(lines) for role, lines in roles.items()}


def speeches(play: str) -> list[tuple[str, str]]:
    """Who says what, in order, in a play as Project Gutenberg or the MIT edition prints it.

    A speech begins with the role in capitals at the start of a line (four spaces before it are allowed), which
    is followed by a full stop, a tab, or nothing else on the line. It goes on until the next role or an empty
    line. Lines become one line; what is in square brackets is a stage direction and is left out, as is all
    outside of Gutenberg's START and END marks. Headings such as ACT and SCENE speak no words.

    >>> speeches("ACT I\\n\\nHAMLET.\\nTo be, or not\\n  to be. [Aside]\\n\\n  OPH. Good my lord,\\n    how is it?")
    [('HAMLET', 'To be, or not to be.'), ('OPH', 'Good my lord, how is it?')]
    """
    spoken: list[tuple[str, list[str]]] = []
    speaking = False
    for line in _body(play.translate(_TYPOGRAPHY)).split("\n"):
        heading = _HEADING.match(line)
        if heading:
            speaking = not _NO_ROLE.match(heading["role"])
            if speaking:
                spoken.append((re.sub(r"[ -]+", "_", heading["role"]), [heading["speech"]]))
        elif not line.strip():
            speaking = False
        elif speaking:
            spoken[-1][1].append(line)
    cleaned = [(role, re.sub(r"\[[^\]]*\]", " ", " ".join(lines))) for role, lines in spoken]
    return [(role, " ".join(speech.split())) for role, speech in cleaned if speech.strip()]


def _body(text: str) -> str:
    """The part between Project Gutenberg's marks, or everything."""
    start = re.search(r"^\*\*\* ?START OF .*$", text, re.MULTILINE)
    end = re.search(r"^\*\*\* ?END OF ", text, re.MULTILINE)
    return text[start.end() if start else 0 : end.start() if end else len(text)]
