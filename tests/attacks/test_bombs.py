"""Attack: small files that would fill the memory. Each is refused, or read, within a fraction of what it unpacks to.

The files are real. They are read by a process of its own, whose memory is measured and, so that today's failure does
not take the machine with it, limited.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

READER = """
import json, resource, sys
from pathlib import Path
import pyarrow.parquet, torch
from PIL import Image
from fedfac.data import tables, folders, text, vision
from fedfac.errors import FedfacError
Image.init()
read = {
    "table": lambda path: tables.csv_or_parquet(path / "a.parquet", label="y"),
    "csv": lambda path: tables.csv_or_parquet(path / "a.csv", label="y"),
    "npz": lambda path: tables.hapt(data_dir=path),
    "image": lambda path: folders.image_folder(path),
    "speeches": lambda path: text.shakespeare(data_dir=path),
    "cifar10": lambda path: vision.cifar10(data_dir=path),
}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
said = {}
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
for folder in sorted(Path(sys.argv[1]).iterdir()):
    before = peak()
    try:
        outcome = f"read {len(read[folder.suffix[1:]](folder).pool.targets)}"
    except FedfacError as error:
        outcome = str(error)
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    said[folder.name] = [peak() - before, outcome]
print(json.dumps(said))
"""
MB = 10**6
MOST = 450  # MB that the process may grow by; each of the files unpacks to more than a GB


def numbers(path: Path) -> int:
    """Nearly nothing in the file for a row."""
    rows, groups = 5_000_000, 16
    table = pa.table({"x": pa.nulls(rows, pa.float64()), "y": pa.nulls(rows, pa.float64())})
    with pq.ParquetWriter(path / "a.parquet", table.schema) as writer:
        for _ in range(groups):
            writer.write_table(table)
    return rows * groups * 16


def repeated_text(path: Path, name: str = "x", rows: int = 10_000) -> int:
    """One long text that every row has."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int32)), pa.array(["word " * 40_000]))
    other = pa.array(["a", "b"] * (rows // 2))
    columns = {"character_id": other, "text": text} if name == "text" else {"x": text, "y": other}
    pq.write_table(pa.table(columns), path / "a.parquet", compression="zstd", store_schema=False)
    return rows * 200_000


def npz(path: Path) -> int:
    """A zip archive of an array of zeros; a block of them is compressed once."""
    block, times = bytes(2**24), 80
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = squeeze.compress(block) + squeeze.flush(zlib.Z_FULL_FLUSH)
    n = len(block) * times // (128 * 6 * 2)
    array = b"{'descr': '<f2', 'fortran_order': False, 'shape': (%d, 128, 6), }" % n
    array += b" " * (117 - len(array)) + b"\n"
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(array)) + array
    rest = n * 128 * 6 * 2 - len(block) * (times - 1)
    start = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = start.compress(header) + start.flush(zlib.Z_FULL_FLUSH)
    end = zlib.compressobj(9, zlib.DEFLATED, -15)
    tail = end.compress(block[:rest]) + end.flush()
    check = zlib.crc32(header)
    for _ in range(times - 1):
        check = zlib.crc32(block, check)
    check = zlib.crc32(block[:rest], check)
    small = {"label": np.zeros(4, dtype=np.int64), "subject": np.zeros(4, dtype=np.int64)}
    np.savez(path / "windows.npz", **small)  # type: ignore[arg-type]
    _add_member(
        path / "windows.npz",
        "signal.npy",
        head + packed * (times - 1) + tail,
        size=len(header) + n * 128 * 6 * 2,
        check=check,
    )
    return n * 128 * 6 * 2


def _add_member(path: Path, name: str, packed: bytes, *, size: int, check: int) -> None:
    """Append what is compressed already to a zip archive."""
    content = path.read_bytes()
    end = content.rindex(b"PK\5\6")
    count, length, start = struct.unpack("<HII", content[end + 10 : end + 20])
    fields = struct.pack("<HHHHHIII", 20, 0, 8, 0, 33, check, len(packed), size)
    local = b"PK\3\4" + fields + struct.pack("<HH", len(name), 0) + name.encode() + packed
    entry = b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, start)
    directory = content[start:end] + entry + name.encode()
    last = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count + 1, count + 1, len(directory), start + len(local), 0)
    path.write_bytes(content[:start] + local + directory + last)
    assert length + len(entry) + len(name) == len(directory)


def png(path: Path) -> int:
    """A palette with transparency: four bytes a pixel on its way to three."""
    side = 13_000
    squeeze = zlib.compressobj(9)
    pixels = b"".join([squeeze.compress(bytes(side + 1)) for _ in range(side)] + [squeeze.flush()])
    header = struct.pack(">IIBBBBB", side, side, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", bytes(6)), (b"tRNS", b"\0\xff"), (b"IDAT", pixels), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    (path / "class").mkdir()
    (path / "class" / "a.png").write_bytes(content)
    return side * side * 7


def images(path: Path) -> int:
    """Rows without an image, each of which gets its place."""
    rows = 2_000_000
    image = pa.nulls(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({"img": image, "label": pa.array(np.zeros(rows, dtype=np.int64))})
    pq.write_table(table, path / "train-00000-of-00001.parquet")
    pq.write_table(table.slice(0, 1), path / "test-00000-of-00001.parquet")
    return rows * 3072


def archive(path: Path) -> int:
    """A header of a tar archive that is a gigabyte long."""
    block, times = gzip.compress(bytes(2**26), 9), 20
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 2**26 * times
    (path / "cifar-10-python.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.USTAR_FORMAT)) + block * times)
    return 2**26 * times


def columns(path: Path) -> int:
    """A header line of two million names."""
    (path / "a.csv").write_text(",".join(["y", *("" for _ in range(2_000_000))]) + "\n" + "1\n")
    return 2_000_000 * 1000


BOMBS: dict[str, tuple[Callable[[Path], int], str]] = {
    "a.table": (numbers, "FEDFAC_MAX_BYTES="),
    "b.table": (repeated_text, "read 10000"),
    "c.npz": (npz, "FEDFAC_MAX_BYTES="),
    "d.image": (png, "13000 × 13000 pixels; allowed: 67108864"),
    "e.speeches": (lambda path: repeated_text(path, "text", 60_000), "FEDFAC_MAX_BYTES="),
    "f.cifar10": (images, "FEDFAC_MAX_BYTES="),
    "g.cifar10": (archive, "unpacks to more than"),
    "h.csv": (columns, "has 2000001 columns; allowed: 100000"),
}


def test_small_files_do_not_fill_the_memory(tmp_path: Path) -> None:
    for name, (make, _) in BOMBS.items():
        (tmp_path / name).mkdir()
        unpacked = make(tmp_path / name)
        stored = sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        assert unpacked > 1000 * MB > 100 * stored, name
    said = _read(tmp_path)
    for name, (_, words) in BOMBS.items():
        grown, outcome = said[name]
        assert words in outcome, (name, outcome)
        assert grown < MOST, (name, grown, outcome)


def _read(folder: Path, **env: str) -> dict[str, Any]:
    here = os.environ | {"OMP_NUM_THREADS": "1", "FEDFAC_CACHE": str(folder.parent / "cache")} | env
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, env=here, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_user_may_allow_more_or_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfac.data.tables import csv_or_parquet
    from fedfac.errors import ConfigError, DataError

    rows = 2_000_000
    table = pa.table({"x": pa.nulls(rows, pa.float64()), "y": pa.array(np.zeros(rows, dtype=np.int8))})
    pq.write_table(table, tmp_path / "a.parquet")
    monkeypatch.setenv("FEDFAC_MAX_BYTES", "10M")
    with pytest.raises(DataError, match=r"would take .* MB; allowed: 10\.5 MB.*FEDFAC_MAX_BYTES=1G"):
        csv_or_parquet(tmp_path / "a.parquet", label="y")
    monkeypatch.setenv("FEDFAC_MAX_BYTES", "1G")
    with pytest.raises(DataError, match="column 'x' is empty in all"):  # it was read
        csv_or_parquet(tmp_path / "a.parquet", label="y")
    monkeypatch.setenv("FEDFAC_MAX_BYTES", "much")
    with pytest.raises(ConfigError, match="FEDFAC_MAX_BYTES is 'much'; give bytes"):
        csv_or_parquet(tmp_path / "a.parquet", label="y")
