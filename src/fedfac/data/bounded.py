"""Reading of text, parquet and npz files whose size in memory is known before it is taken."""

from __future__ import annotations

import codecs
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedfac.errors import DataError, FedfacError
from fedfac.limits import check_memory, check_unpacked
from fedfac.words import printable, quoted

MOST_COLUMNS = 100_000
_CHUNK = 2**20
_TYPES = "biufcSU"  # numpy's kinds that are no objects


def check_text(path: Path) -> None:
    """Refuse a file that is not UTF-8 text, with the place where it is not."""
    check_memory(path.stat().st_size, str(path))
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, before = 1, 0  # lines and bytes before what the decoder looks at
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
                if b"\0" in chunk:
                    raise DataError(_no_text(path, chunk, chunk.index(0), lines, before))
            except UnicodeDecodeError as error:
                text = _no_text(path, error.object, error.start, lines, before - waiting)
                raise DataError(text) from error
            if not chunk:
                return
            lines += chunk.count(b"\n")
            before += len(chunk)


def _no_text(path: Path, content: bytes, place: int, lines: int, before: int) -> str:
    line = lines + content[:place].count(b"\n")
    text = (
        f"{path} is not UTF-8 text: line {line} has the byte 0x{content[place]:02X} (byte {before + place} of the file)"
    )
    if content[place] == 0 or content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{text}. It is UTF-16, or no text at all: save it as UTF-8"
    return (
        f"{text}. Tables of older programs are often Latin-1: save it as UTF-8, "
        f"for example with 'iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8.csv'"
    )


@contextmanager
def readable(path: Path, todo: str = "Is the file whole? Get it again") -> Iterator[None]:
    """What arrow says of a damaged file, as our error."""
    import pyarrow as pa

    try:
        yield
    except FedfacError:
        raise
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"{path} cannot be read: {error}. {todo}") from error


def parquet_table(path: Path, wanted: Callable[[Sequence[str]], Sequence[str]]) -> Any:
    """The ``wanted`` ones of a parquet file's columns; texts are read as numbers of distinct ones."""
    import pyarrow.parquet as pq

    with readable(path):
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            stored = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if len(schema.names) > MOST_COLUMNS:
            raise DataError(f"{path} has {len(schema.names)} columns; allowed: {MOST_COLUMNS}")
        columns = list(wanted(schema.names))
        fields = [schema.field(name) for name in columns]
        width = sum(_width(path, field) for field in fields)
        texts = [field.name for field in fields if is_text(field.type) or is_bytes(field.type)]
        check_unpacked(max(rows, 0) * width + (max(stored, 0) if texts else 0), path.stat().st_size, str(path))
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            table = file.read(columns=columns)
        table.validate(full=True)  # a damaged page may hold numbers of texts that there are not
        return table


def _width(path: Path, field: Any) -> float:
    """Bytes of a row of a column once it is read."""
    from pyarrow import types

    if types.is_nested(field.type):
        raise DataError(
            f"{path}, column {quoted(field.name)} is of type {printable(field.type)}; allowed: numbers, truth "
            "values, text. Convert it or drop it"
        )
    try:
        return max(1.0, float(field.type.bit_width) / 8)
    except ValueError:  # text: the number of one
        return 4.0


def is_text(kind: Any) -> bool:
    """Whether a column holds text, also as numbers of texts."""
    from pyarrow import types

    plain = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain))


def is_bytes(kind: Any) -> bool:
    """Whether a column holds bytes of any length."""
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def coded(column: Any, where: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """A column of texts as the distinct ones in sorted order, and the number of each row's, -1 for a missing one."""
    import pyarrow as pa

    chunks = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    if not pa.types.is_dictionary(chunks.type):
        chunks = chunks.dictionary_encode()
    arrays = chunks.unify_dictionaries().chunks
    codes = np.concatenate([_codes(array) for array in arrays] or [np.empty(0, dtype=np.int64)])
    try:
        texts: list[str | None] = arrays[0].dictionary.to_pylist() if arrays else []
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has text that is not UTF-8: {error}. Write the file again as UTF-8") from error
    used = {texts[code] for code in np.unique(codes[codes >= 0]).tolist()} - {None}
    names = sorted(text for text in used if text is not None)
    places = {text: i for i, text in enumerate(names)}
    order = np.array([*(-1 if t is None else places.get(t, -1) for t in texts), -1], dtype=np.int64)
    return names, order[codes]


def _codes(array: Any) -> npt.NDArray[np.int64]:
    codes: npt.NDArray[np.int64] = array.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)
    return codes


def npz_arrays(path: Path, wanted: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of an npz file. What each would take is read first; pickled objects are refused."""
    wanted = list(wanted)
    try:
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("it is no zip archive of arrays")
        with zipfile.ZipFile(path) as archive:
            found = sorted(name.removesuffix(".npy") for name in archive.namelist())
            if twice := sorted({name for name in found if found.count(name) > 1}) if len(found) < 1000 else found:
                raise ValueError(f"it has several arrays {quoted(twice[0])}")
            if missing := set(wanted) - set(found):
                raise DataError(
                    f"{path} has the arrays {[printable(n) for n in found[:20]]}; wanted: {sorted(wanted)}"
                    f" ({', '.join(sorted(missing))} missing)"
                )
            members = {name: f"{name}.npy" if f"{name}.npy" in archive.namelist() else name for name in wanted}
            size = sum(_npy_size(archive, member) for member in members.values())
            check_unpacked(size, path.stat().st_size, str(path))
            return {name: _npy(archive, member) for name, member in members.items()}
    except FedfacError:
        raise
    except Exception as error:  # zlib, lzma, zipfile and numpy each have words of their own for damage
        raise DataError(f"{path} cannot be read: {error}. Is the file whole? Get it again") from error


def _npy_size(archive: zipfile.ZipFile, member: str) -> int:
    """What the header of an array says that it takes, if the archive has as much."""
    with archive.open(member) as file:
        shape, _, dtype = _npy_header(file)
        start = file.tell()
    if dtype.kind not in _TYPES:
        raise ValueError(f"the array {member!r} holds {dtype}; allowed: numbers and text")
    if any(side < 0 for side in shape):
        raise ValueError(f"the array {member!r} has the shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    there = archive.getinfo(member).file_size - start
    if size != there:
        raise ValueError(f"the array {member!r} of shape {shape} and type {dtype} takes {size} bytes; it has {there}")
    return size


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"an array of format version {version}; allowed: (1, 0) and (2, 0)")


def _npy(archive: zipfile.ZipFile, member: str) -> npt.NDArray[Any]:
    """An array in the machine's own byte order."""
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    native: npt.NDArray[Any] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native
