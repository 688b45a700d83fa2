"""Damaged files of every kind: each is read or refused, never a traceback, a hang or a full memory."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mutations import survives, unharmed
from PIL import Image

import fedfac
from fedfac import experiment, exported, models
from fedfac.config import Config, read_toml
from fedfac.data import archives, folders, image_parquet, leaf, tables, text, vision
from fedfac.data.samples import Samples
from fedfac.split import Split
from fedfac.state import from_bytes, load_state, state_of, to_bytes

CSV = b"age,sex,dose,label,ward\n" + b"".join(
    b"%d,%s,%.2f,%d,w%d\n" % (i, b"mf?"[i % 3 : i % 3 + 1], i / 7, i % 2, i % 4) for i in range(24)
)
ROWS: dict[str, Any] = {
    "age": [1.5 * i for i in range(24)],
    "sex": ["m", "f", None] * 8,
    "label": [i % 2 for i in range(24)],
    "ward": [f"w{i % 4}" for i in range(24)],
}


def used(samples: Samples) -> None:
    """As a run would begin."""
    client = samples.federation(min_samples=1).client(0) if samples.owners is not None else None
    if client is not None:
        client.pool.batch(client.train[:2])


def written(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Reads a file that is written first."""

    def attempt(content: bytes) -> object:
        path.write_bytes(content)
        return read()

    return attempt


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    read = written(path, lambda: used(tables.csv_or_parquet(path, label="label", client="ward")))
    read(CSV)
    assert survives(read, [CSV], 150) > 10


@pytest.mark.parametrize("compression", ["none", "zstd", "snappy", "gzip"])
def test_parquet(tmp_path: Path, compression: str) -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table(ROWS), stream, compression=compression)
    path = tmp_path / "a.parquet"
    read = written(path, lambda: used(tables.csv_or_parquet(path, label="label", client="ward")))
    read(stream.getvalue())
    assert survives(read, [stream.getvalue()], 75, seed=len(compression)) > 0


def test_npz(tmp_path: Path) -> None:
    arrays = {"signal": np.ones((8, 128, 6), np.float16), "label": np.arange(8), "subject": np.arange(8) % 2}
    contents = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, **arrays)  # type: ignore[arg-type]
        contents.append(stream.getvalue())
    read = written(tmp_path / "windows.npz", lambda: used(tables.hapt(data_dir=tmp_path)))
    read(contents[0])
    survives(read, contents, 150)


def test_leaf_images(tmp_path: Path) -> None:
    users = {f"w{i}": {"x": [[0, 0.25, 0.5, 1] * 196] * 2, "y": [i, 3]} for i in range(3)}
    content = json.dumps({"users": [*users], "num_samples": [2, 2, 2], "user_data": users}).encode()
    head = content[:200] + content[-100:]
    read = written(tmp_path / "a.json", lambda: leaf.read_images([tmp_path / "a.json"], vision.FEMNIST))
    read(content)
    survives(read, [content, content, head], 150)


def test_leaf_text_and_tables_of_text(tmp_path: Path) -> None:
    users = {"A": {"x": ["abcde", "bcdef"] * 4, "y": ["f", "g"] * 4}}
    windows = json.dumps({"users": ["A"], "num_samples": [8], "user_data": users}).encode()
    read = written(tmp_path / "a.json", lambda: text.from_files([tmp_path / "a.json"], window=5))
    survives(read, [windows], 60)
    speeches = pa.table({"character_id": ["A", "B"] * 20, "text": ["to be or not", "that is"] * 20})
    rows = pa.table({"character_id": ["A"] * 8, "x": users["A"]["x"], "y": users["A"]["y"]})
    contents = []
    for table in (speeches, rows):
        stream = io.BytesIO()
        pq.write_table(table, stream)
        contents.append(stream.getvalue())
    read = written(tmp_path / "a.parquet", lambda: text.from_files([tmp_path / "a.parquet"], window=5))
    read(contents[0])
    survives(read, contents, 60)
    lines = b"character_id,text\n" + b"A,to be or not\nB,that is\n" * 20
    survives(written(tmp_path / "a.csv", lambda: text.from_files([tmp_path / "a.csv"], window=5)), [lines], 60)


def test_plays(tmp_path: Path) -> None:
    play = b"ACT I\n\n" + b"HAMLET.\nTo be, or not to be: [Aside]\n  that is\n\nOPH. Good my lord,\n\n" * 20
    read = written(tmp_path / "play.txt", lambda: text.from_files([tmp_path / "play.txt"], window=5))
    read(play)
    assert survives(read, [play, "HAMLET. “Café”\n\n".encode() * 20], 100) > 20


def test_folders_of_images(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    contents = []
    for form, mode in (
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("JPEG", "RGB"),
        ("GIF", "P"),
        ("TIFF", "RGB"),
        ("WEBP", "RGB"),
        ("BMP", "L"),
        ("PPM", "L"),
    ):
        stream = io.BytesIO()
        Image.fromarray(draws).convert(mode).save(stream, format=form)
        contents.append(stream.getvalue())
    (tmp_path / "class").mkdir()
    read = written(tmp_path / "class" / "a.png", lambda: folders.image_folder(tmp_path))
    for content in contents:
        read(content)
    assert survives(read, contents, 250) > 20


def test_images_in_parquet(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (32, 32)).save(stream, format="PNG")
    images = [{"bytes": stream.getvalue(), "path": "a"}] * 4
    table = pa.table({"img": images, "label": [0, 1, 2, 3]})
    contents = []
    for compression in ("none", "zstd"):
        out = io.BytesIO()
        pq.write_table(table, out, compression=compression)
        contents.append(out.getvalue())
    path = tmp_path / "a.parquet"
    read = written(path, lambda: image_parquet.read_parquet([path], vision.CIFAR10))
    read(contents[0])
    survives(read, contents, 150)


def test_archives(tmp_path: Path) -> None:
    batch = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}, protocol=2)
    records = bytes(2 * 3073)
    made: dict[str, tuple[str, bytes]] = {"python": ("train", batch), "binary": ("train.bin", records)}
    for kind, (name, content) in made.items():
        path = tmp_path / f"a-{kind}.tar.gz"
        read = written(path, lambda path=path, name=name: archives.read_archive(path, [name], vision.CIFAR10))  # type: ignore[misc]
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        read(gzip.compress(stream.getvalue(), 1))
        survives(read, [gzip.compress(stream.getvalue(), 1)], 40)
        survives(lambda tar, read=read: read(gzip.compress(tar, 1)), [stream.getvalue()], 80)  # type: ignore[misc]


def test_pickles_in_archives(tmp_path: Path) -> None:
    """Inside of a whole archive, where damage reaches the reader of pickles."""
    array = np.arange(2 * 3072, dtype=np.uint16).astype(np.uint8).reshape(2, 3072)
    contents = [pickle.dumps({b"data": array, b"labels": [1, 2]}, protocol=p) for p in (0, 2, 4)]
    contents += [content[:200] + content[-200:] for content in contents]
    survives(lambda content: archives._read_pickle(io.BytesIO(content), "batch", vision.CIFAR10), contents, 600)


LAUGHS = b"\x80\x02}(X\x01\0\0\0aK\x01q\0" + b"h\0h\0\x86q\0" * 60 + b"K\x01u."  # a key that doubles sixty times
PICKLES = {
    "a memo of many entries": b"\x80\x02K\x01r\xff\xff\xff\x7f.",
    "bytes that are not there": b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b".",
    "a frame that is not there": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b".",
    "one text encoded many times": b"\x80\x02c_codecs\nencode\nq\0X\0\0\x80\0"
    + b"x" * 2**23
    + b"q\1X\6\0\0\0latin1q\2("
    + b"h\0h\1h\2\x86R" * 400
    + b"l.",
    "a key without end": LAUGHS,
    "a set of keys without end": b"\x80\x04\x8f(K\x01q\0" + b"h\0h\0\x86q\0" * 60 + b"\x90.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_take_memory_or_time(name: str) -> None:
    def read(content: bytes) -> None:
        archives._read_pickle(io.BytesIO(content), "batch", vision.CIFAR10)

    assert unharmed(read, PICKLES[name]) == 0


TOML = b"""
[data]
name = "digits"
clients = 6
alpha = 0.5
classes = "0,1"
[model]
name = "mlp"
hidden = 20
[method]
name = "fedfac"
layers = ["fc1", 1]
tau = "50%"
kappa = 0.85
[train]
rounds = 3
lr = 1e-3
stack = true
"""


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"

    def read() -> object:
        config = Config.from_dict(read_toml(path))
        config.data.class_names  # noqa: B018
        return experiment.build(config)

    attempt = written(path, read)
    attempt(TOML)
    assert survives(attempt, [TOML], 80) > 0


@pytest.fixture(scope="module")
def model() -> dict[str, bytes]:
    made = models.build("mlp", shape=(4,), classes=3, seed=0, hidden=5)
    split = Split({name: tuple(tensor.shape) for name, tensor in state_of(made).items()})
    about = {
        "format": exported.FORMAT,
        "client": "anna",
        "model": {"name": "mlp", "hidden": 5},
        "method": {"name": "fedper", "personal_layers": 1},
        "shape": [4],
        "classes": 3,
        "split": split.to_json(),
    }
    return {exported.CONFIG: json.dumps(about).encode(), exported.WEIGHTS: to_bytes(state_of(made))}


@pytest.mark.parametrize("file", [exported.CONFIG, exported.WEIGHTS])
def test_exported_models(tmp_path: Path, model: dict[str, bytes], file: str) -> None:
    for name, content in model.items():
        (tmp_path / name).write_bytes(content)
    read = written(tmp_path / file, lambda: fedfac.load(tmp_path).model(0)(torch.zeros(1, 4)))
    read(model[file])
    assert survives(read, [model[file]], 250) > 0


def test_states(model: dict[str, bytes]) -> None:
    made = models.build("mlp", shape=(4,), classes=3, seed=0, hidden=5)
    survives(lambda content: load_state(made, from_bytes(content)), [model[exported.WEIGHTS]], 400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedfac.cli import main

    path = tmp_path_factory.mktemp("runs") / "r"
    assert main(["run", "--clients", "4", "--rounds", "1", "--epochs", "1", "--quiet", "--out", str(path)]) == 0
    return path


def test_configs_of_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "config.json"
    content = file.read_bytes()
    read = written(file, lambda: fedfac.load(run).records)
    survives(read, [content], 60)
    file.write_bytes(content)
    assert fedfac.load(run).records


def test_plans_of_comparisons_and_searches(tmp_path: Path) -> None:
    from fedfac import comparison
    from fedfac.tuning import plan

    tables_: dict[str, Any] = {"data": {"clients": 4}, "train": {"rounds": 1}}
    compared = {"methods": ["fedavg", "fedprox:mu=0.1"], "seeds": [0, 1], "vary": {"alpha": [0.1, 1]}}
    content = json.dumps(compared | {"time_rounds": 3, "tables": tables_, "alone": None}).encode()
    read = written(tmp_path / comparison.PLAN, lambda: comparison.load(tmp_path).cells)
    read(content)
    survives(read, [content], 200)
    searched = {"space": {"tau": ["50%"]}, "mode": "stages", "trials": 0, "auto": False, "metric": "accuracy"}
    content = json.dumps(searched | {"tables": tables_}).encode()
    read = written(tmp_path / plan.PLAN, lambda: plan.load(tmp_path).at_most)
    read(content)
    survives(read, [content], 200)
