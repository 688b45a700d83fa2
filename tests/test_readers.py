"""What is wrong with a file is said in fedfac's own words: what came, where, what is allowed, what to do."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import message, within
from PIL import Image

import fedfac
from fedfac import exported, models
from fedfac.cli import main
from fedfac.config import Config, DataConfig, read_toml
from fedfac.data import folders, tables, text, vision
from fedfac.errors import ConfigError, DataError, FedfacError, ModelError, RunError
from fedfac.split import Split
from fedfac.state import from_bytes, state_of, to_bytes

DEEP = 100_000


# ---------------------------------------------------------------- CSV and parquet


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x,y\n1,caf\xe9\n2,no\n", "line 2 has the byte 0xE9 (byte 9 of the file). Tables of older programs"),
        (b"x,y\n" + b"1,a\n" * 600_000 + b"1,\xff\n", "line 600002 has the byte 0xFF (byte 2400006 of the file)"),
        (b"gr\xf6\xdfe,y\n1,a\n2,b\n", "line 1 has the byte 0xF6 (byte 2 of the file)"),
        (b"x,y\n1,a\n2,\xc3", "line 3 has the byte 0xC3"),  # a character that was cut
        ("x,y\n1,a\n2,b\n".encode("utf-16"), "It is UTF-16, or no text at all: save it as UTF-8"),
        (b"x,y\n1,a\n2,b\0\n", "line 3 has the byte 0x00 (byte 11 of the file)"),
        (b"x,y\n1,a\n2\n", "as many fields as in the first"),
        (b"", "Is it whole"),
        (b"x,y\n", "has no rows; its columns are ['x', 'y']"),
        (b"x,y,x\n1,a,2\n2,b,3\n", "has several columns of the name 'x'"),
    ],
)
def test_text_that_is_no_table(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert words in message(DataError, lambda: tables.csv_or_parquet(path, label="y"))


def test_the_way_out_of_latin_1_works(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("x,y\n1,café\n2,thé\n".encode("latin-1"))
    said = message(DataError, lambda: tables.csv_or_parquet(path, label="y"))
    assert "iconv -f WINDOWS-1252 -t UTF-8 a.csv > utf8.csv" in said
    path.write_text(path.read_bytes().decode("windows-1252"), encoding="utf-8")
    assert tables.csv_or_parquet(path, label="y").class_names == ("café", "thé")


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfx,y\n1,a\n2,b\n")
    assert tables.columns_of(path) == ["x", "y"]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([[1], [2]]), "column 'x' is of type list<"),
        (pa.array([{"a": 1}, {"a": 2}]), "column 'x' is of type struct<a: int64>"),
        (pa.array([b"a", b"b"]), "column 'x' is of type"),
        (pa.array([1, 2], pa.timestamp("s")), "column 'x' is of type timestamp"),
        (pa.nulls(2), "column 'x' is empty in all 2 rows"),
        (pa.array([float("inf"), 1.0]), "column 'x' is infinite in 1 rows"),
    ],
)
def test_columns_of_parquet_that_are_no_inputs(tmp_path: Path, column: Any, words: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": column, "y": pa.array(["a", "b"])}), path)
    assert words in message(DataError, lambda: tables.csv_or_parquet(path, label="y"))
    other = tmp_path / "b.parquet"  # what is dropped is not even read
    pq.write_table(pa.table({"x": column, "z": [1.0, 2.0], "y": pa.array(["a", "b"])}), other)
    assert tables.csv_or_parquet(other, label="y", drop=["x"]).classes == 2


def test_text_of_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 1, 2)), pa.py_buffer(b"\xe9b")]
    )
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": bad}), tmp_path / "a.parquet")
    assert "Invalid UTF8 sequence" in message(
        DataError, lambda: tables.csv_or_parquet(tmp_path / "a.parquet", label="y")
    )


def test_dictionaries_and_texts_are_the_same_samples(tmp_path: Path) -> None:
    texts = ["b", "a", None, "c", "a", "b"]
    rest: dict[str, Any] = {"y": ["no", "yes"] * 3, "who": ["w2", "w1"] * 3, "n": [1.5, 2, 3, 4, 5, 6]}
    made = {}
    plain = pa.array(texts)
    unused = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 3, 0, 1]), pa.array(["a", "b", "never", "c"]))
    for name, column in {"plain": plain, "coded": plain.dictionary_encode(), "unused": unused}.items():
        pq.write_table(pa.table({"x": column, **rest}), tmp_path / f"{name}.parquet", row_group_size=4)
        made[name] = tables.csv_or_parquet(tmp_path / f"{name}.parquet", label="y", client="who")
    assert len({samples.fingerprint for samples in made.values()}) == 1
    inputs = made["plain"].pool.inputs  # type: ignore[attr-defined]
    assert inputs[:, :3].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert made["plain"].owners is not None
    assert made["plain"].owners.tolist() == ["w2", "w1"] * 3


def test_a_label_that_is_an_id(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.zeros(100_001), "y": np.arange(100_001)}), tmp_path / "a.parquet")
    with within(20):
        said = message(DataError, lambda: tables.csv_or_parquet(tmp_path / "a.parquet", label="y"))
    assert "has 100001 distinct values; allowed: 100000" in said


# ---------------------------------------------------------------- npz


def write_npz(folder: Path, **changed: Any) -> Path:
    made: dict[str, Any] = {
        "signal": np.zeros((6, 128, 6), np.float32),
        "label": np.arange(6),
        "subject": np.arange(6) % 2,
    } | changed
    np.savez(folder / "windows.npz", **{name: array for name, array in made.items() if array is not None})
    return folder


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label": np.array(3)}, "has arrays of shapes [(6, 128, 6), (), (6,)]; wanted"),
        ({"label": np.array([None] * 6)}, "'label.npy' holds object; allowed: numbers and text"),
        ({"label": np.zeros(6, dtype=[("a", "<i8")])}, "allowed: numbers and text"),
        ({"label": np.arange(5)}, "has arrays of shapes [(6, 128, 6), (5,), (6,)]"),
        ({"label": -np.arange(6)}, "has labels from -5 to 0; allowed: 0..11"),
        ({"label": np.full(6, 2**64 - 1, np.uint64)}, "allowed: 0..11"),
        ({"label": np.arange(6) * 1j}, "has arrays of ['float32', 'complex128', 'int64']"),
        ({"label": np.array(["a"] * 6)}, "wanted: real numbers, integers, integers"),
        ({"signal": np.zeros((6, 128, 6), np.longdouble)}, "wanted: real numbers"),
        ({"signal": np.full((6, 128, 6), np.inf, np.float16)}, "has signals that are not finite numbers"),
        ({"subject": None}, "has the arrays ['label', 'signal']; wanted"),
    ],
)
def test_arrays_of_other_kinds(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    assert words in message(DataError, lambda: tables.hapt(data_dir=write_npz(tmp_path, **changed)))


def test_the_order_of_bytes_and_of_axes_does_not_matter(tmp_path: Path) -> None:
    signal = np.random.default_rng(0).normal(size=(6, 128, 6)).astype(np.float32)
    fingerprints = set()
    for array in (signal, np.asfortranarray(signal), signal.astype(">f4")):
        write_npz(tmp_path, signal=array, label=np.arange(6, dtype=">i4"))
        fingerprints.add(tables.hapt(data_dir=tmp_path).fingerprint)
    assert len(fingerprints) == 1


def header(shape: str, dtype: str = "'<f4'") -> bytes:
    line = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (header("(1000000000000000, 128, 6)"), "it has 0"),
        (header("(-6, 128, 6)"), "has the shape (-6, 128, 6)"),
        (header("(" * 5000), "cannot be read"),
        (header("(6, 128, 6)", "'S999999999999'"), "cannot be read"),
        (header("(6,)", "'|O'") + b"cos\nsystem\n.", "holds object"),
        (header("()") + bytes(8), "takes 4 bytes; it has 8"),
        (b"\x93NUMPY\x07\x00", "format version (7, 0)"),
        (b"", "cannot be read"),
    ],
)
def test_members_whose_header_lies(tmp_path: Path, member: bytes, words: str) -> None:
    write_npz(tmp_path, signal=None)
    with zipfile.ZipFile(tmp_path / "windows.npz", "a") as archive:
        archive.writestr("signal.npy", member)
    assert words in message(DataError, lambda: tables.hapt(data_dir=tmp_path))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_with_two_members_of_a_name_or_a_password(tmp_path: Path) -> None:
    write_npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "windows.npz", "a") as archive:
        archive.writestr("label.npy", header("(6,)"))
    assert "several arrays 'label'" in message(DataError, lambda: tables.hapt(data_dir=tmp_path))
    write_npz(tmp_path)
    content = bytearray((tmp_path / "windows.npz").read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "windows.npz").write_bytes(content)
    assert "encrypted" in message(DataError, lambda: tables.hapt(data_dir=tmp_path))


# ---------------------------------------------------------------- LEAF


def leaf_of(pixels: list[float], label: str) -> str:
    return '{"user_data": {"a": {"x": [' + json.dumps(pixels) + '], "y": [' + label + "]}}}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * DEEP, "wanted: LEAF's 'users'"),
        ('{"user_data": ' + "[" * DEEP, "LEAF"),
        ('{"user_data": {"a": ' + "[" * DEEP + "]" * DEEP + "}}", "deep inside each other"),
        ('{"user_data": {"a": {"x": ' + '{"x":' * DEEP + "1" + "}" * DEEP + ', "y": [1]}}}', "deep inside each other"),
        ('{"users": ["a", "a"], "user_data": {"a": {"x": [], "y": []}}}', "user 'a' is listed 2 times"),
        ('{"users": ["b"], "user_data": {"a": {"x": [], "y": []}}}', "user 'b' has no data"),
        ('{"users": [], "user_data": {"a": {"x": [], "y": []}}}', "user 'a' has data and is not listed in 'users'"),
        (
            '{"users": ["a"], "num_samples": [1, 2], "user_data": {"a": {"x": [], "y": []}}}',
            "2 entries in 'num_samples'",
        ),
        ('{"users": ["a"], "user_data": {"a": {"x": [], "y": []}}}', "only users without samples"),
        ('{"users": [3], "user_data": {"3": {"x": [], "y": []}}}', "Expected `str`, got `int` - at `$.users[0]`"),
        ('{"user_data": {"a": {"y": [1]}}}', "user 'a' needs 'x', a list of 784 pixels a sample, and 'y', labels"),
        ('{"user_data": {"a": {"x": [["0.5"]], "y": [1]}}}', "got `str` - at `$.x[0][0]`"),
        ('{"user_data": {"a": {"x": [[NaN]], "y": [1]}}}', "is not JSON"),
        ('{"user_data": {"a": {"x": [[[0.5]]], "y": [1]}}}', "got `array` - at `$.x[0][0]`"),
        ('{"user_data": {"a": {"x": [[0.5, 0.5]], "y": [1]}}}', "number 0 has 2"),
        (leaf_of([0.5] * 784, "1e300"), "has labels from 1e+300"),
        (leaf_of([0.5] * 784, "1e999"), "user 'a'"),
        ('{"user_data": {"' + "u" * 1001 + '": {"x": [], "y": []}}}', "has 1001 characters; allowed: 1000"),
        ("", "is not JSON"),
        ("null", "wanted: LEAF's"),
    ],
)
def test_leaf_oddities(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with within(20):
        assert words in message(DataError, lambda: vision.femnist(data_dir=tmp_path))


def test_a_user_without_samples_is_left_out(tmp_path: Path) -> None:
    users = {"a": {"x": [[0.5] * 784], "y": [1]}, "b": {"x": [], "y": []}}
    (tmp_path / "a.json").write_text(json.dumps({"users": ["a", "b"], "num_samples": [1, 0], "user_data": users}))
    samples = vision.femnist(data_dir=tmp_path)
    assert samples.owners is not None
    assert samples.owners.tolist() == ["a"]


# ---------------------------------------------------------------- images


def an_image(folder: Path, name: str = "a.png", **options: Any) -> Path:
    path = folder / "class" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(options.pop("mode", "RGB"), options.pop("size", (4, 4))).save(path, **options)
    return path


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "tif", "webp"])
def test_cut_images(tmp_path: Path, suffix: str, share: float) -> None:
    path = an_image(tmp_path, f"a.{suffix}", size=(40, 40))
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    said = message(DataError, lambda: folders.image_folder(tmp_path))
    assert str(path) in said
    assert "Replace or remove it" in said


def test_images_of_many_pictures_and_of_many_pixels(tmp_path: Path) -> None:
    more = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(3)]
    path = an_image(tmp_path, "a.gif", save_all=True, append_images=more)
    assert "several pictures in one file" in message(DataError, lambda: folders.image_folder(tmp_path))
    path.unlink()
    an_image(tmp_path, mode="1", size=(8193, 8192))
    said = message(DataError, lambda: folders.image_folder(tmp_path))
    assert "8193 × 8192 pixels; allowed: 67108864 in all" in said


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "LA", "CMYK"])
def test_images_of_other_modes_are_read(tmp_path: Path, mode: str) -> None:
    an_image(tmp_path, "a.tif", mode=mode)
    samples = folders.image_folder(tmp_path)
    assert samples.pool.batch(torch.tensor([0]))[0].shape[2:] == (4, 4)


def test_no_image_runs_a_program(tmp_path: Path) -> None:
    """PostScript under the name of an image would be handed to Ghostscript."""
    path = an_image(tmp_path)
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, format="EPS")
    path.write_bytes(content.getvalue())
    assert "is not an image that can be read" in message(DataError, lambda: folders.image_folder(tmp_path))


# ---------------------------------------------------------------- archives and text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x1f\x8b",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"x" * 600, mtime=0),
        gzip.compress(bytes(2000), mtime=0),
        bytes(500),
    ],
)
def test_archives_of_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(content)
    assert "cifar-10-python.tar.gz" in message(DataError, lambda: vision.cifar10(data_dir=tmp_path))


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff\xfeA", "HAMLET.\nTo be\n".encode("utf-16"), b"\n" * 1000])
def test_plays_of_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "play.txt").write_bytes(content)
    assert "play.txt" in message(DataError, lambda: text.shakespeare(data_dir=tmp_path))


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a = " + "[" * DEEP, "more than 32 deep inside each other"),
        ("a." * 900 + "a = 1", "more than 32 deep inside each other"),
        ("a." * DEEP + "a = 1", "line 1 has 100000 dots; allowed: 1000"),
        ("[data]\nx = " + "{a = " * 400 + "1" + "}" * 400, "more than 32 deep inside each other"),
        ("[data]\nname = '\x00'", "cannot be read"),
        ("# " + "x" * 2**20, "it has more than 1.0 MB"),
        ('[data]\nname = "' + "x" * 5000 + '"', "cannot be read: [Errno 36] File name too long"),
        ('[data]\nname = "hapt"\ndata_dir = "' + "x" * 5000 + '"', "File name too long"),
        ("data = 3", "data is 3; it must be a table, [data]"),
        ("[train]\nrounds = 1" + "0" * 30, "a whole number of 100 bits is in it; allowed: 63 bits"),
        ("[train]\nlr = 1" + "0" * 5000, "cannot be read"),
        ("[train]\nlr = nan", "lr in [train] is nan; it must be a finite number"),
        ("[train]\nround = 3", "unknown key 'round' in [train]. Did you mean 'rounds'"),
        ("[trian]\nrounds = 3", "unknown table [trian]. Did you mean 'train'?"),
        ("[model]\nname = 3", "name in [model] is 3; it must be of type str"),
        ("[method]\nname = []", "name in [method] is []; it must be of type str"),
        ('[model]\nname = "mlp"\nhidden = 1000000000000', "the model 'mlp' would take 300.0 TB"),
        ('[model]\nname = "mlp"\nhidden = -1', "the model 'mlp' cannot be built with"),
        ('[model]\nname = "mlp"\nhidden = "9"', "hidden is '9'; for the model 'mlp' it must be of type int"),
        (
            '[method]\nname = "fedper"\npersonal_layers = true',
            "personal_layers is True; for the method 'fedper' it must be of type int",
        ),
        ('[method]\nkappa = "x"', "kappa is x; it is a share of variance"),
        ("[method]\nlayers = [[1]]", "layers of method 'fedfac' has [1] in it"),
        ('[data]\nname = "a.csv"\nlabel = "y"\nclasses = "1000000000"', "a number of classes is from 1 to 100000"),
        ("[data]\nclients = 1000000000000", "1797 samples cannot be dealt out to 1000000000000 clients"),
    ],
)
def test_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("x,y\n1,0\n2,1\n")
    Path("c.toml").write_text(content)
    with within(30):
        assert main(["run", "--config", "c.toml", "--rounds", "1"]) == 1
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("command", "content", "words"),
    [
        ("compare", "[compare]\nmethds = []", "unknown key 'methds' in [compare]. Did you mean 'methods'?"),
        ("compare", "[compare]\nmethods = 3", "[compare] does not fit: Expected `array`, got `int` - at `$.methods`"),
        ("compare", "[compare]\nseeds = [0.5]", "Expected `int`, got `float` - at `$.seeds[0]`"),
        ("compare", "[compare]\nvary = {alpha = 3}", "got `int` - at `$.vary[...]`"),
        ("compare", "[compare]\ntime_rounds = -1", "`$.time_rounds`"),
        ("compare", f"[compare]\nvary = {{alpha = {[*range(200)]}, lr = {[*range(200)]}}}", "more than 10000 runs"),
        ("tune", "[tune]\ntua = []", "unknown key 'tua' in [tune]. Did you mean 'tau'?"),
        ("tune", "[tune]\nkappa = 3", "[tune] does not fit"),
    ],
)
def test_tables_of_one_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: str,
    words: str,
) -> None:
    if command == "tune":
        pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(content)
    assert main([command, "--config", "c.toml", "--rounds", "1"]) == 1
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("comparison.json", "[" * DEEP, "is not a comparison"),
        ("comparison.json", "{}", "missing required field `methods`"),
        ("comparison.json", '{"methods": 3}', "Expected `array`, got `int` - at `$.methods`"),
        ("tuning.json", "{}", "is not a search"),
        ("tuning.json", "\xff", "is not a search"),
    ],
)
def test_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    assert main(["resume", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "nothing was changed" in said


def test_options_of_python_are_checked_as_those_of_files() -> None:
    assert "finite" in message(ConfigError, lambda: Config.from_dict({"data": {"alpha": float("inf")}}))
    assert "63 bits" in message(ConfigError, lambda: Config.from_dict({"model": {"hidden": 10**30}}))
    assert "from 1 to 100000" in message(ConfigError, lambda: DataConfig(classes="0").class_names)
    assert DataConfig(classes="²").class_names == ("²",)  # a name, not a number


def test_a_config_of_many_lines_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[data]\r\nname = 'a.b.c'\r\n" + "# a comment. and more.\n" * 20_000)
    assert read_toml(tmp_path / "c.toml") == {"data": {"name": "a.b.c"}}


# ---------------------------------------------------------------- exported models and states


def an_exported_model(folder: Path) -> dict[str, Any]:
    model = models.build("mlp", shape=(4,), classes=3, seed=0, hidden=5)
    state = state_of(model)
    split = Split({name: tuple(tensor.shape) for name, tensor in state.items()})
    about = {
        "format": exported.FORMAT,
        "client": "anna",
        "model": {"name": "mlp", "hidden": 5},
        "method": {"name": "fedavg"},
        "shape": [4],
        "classes": 3,
        "split": split.to_json(),
    }
    folder.mkdir(exist_ok=True)
    (folder / exported.CONFIG).write_text(json.dumps(about))
    (folder / exported.WEIGHTS).write_bytes(to_bytes(state))
    return about


def test_an_exported_model_is_whole(tmp_path: Path) -> None:
    an_exported_model(tmp_path)
    assert fedfac.load(tmp_path).model("anna")(torch.zeros(1, 4)).shape == (1, 3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({key: None}, f"missing required field `{key}`") for key in ("client", "model", "method", "shape", "split")),
        ({"model": {}}, "the name of the model is None; it must be text"),
        ({"method": {"name": 3}}, "the name of the method is 3; it must be text"),
        ({"shape": [10**9, 10**9, 10**9]}, "the model 'mlp' cannot be built with"),
        ({"shape": [2**31, 2**20]}, "does not fit the checkpoint: it is larger"),
        ({"model": {"name": "mlp", "hidden": 10**8}}, "does not fit the checkpoint: it is larger"),
        ({"model": {"name": "mlp", "hiden": 5}}, "has no option 'hiden'"),
        ({"model": {"name": "mlp", "hidden": "5"}}, "cannot be built with"),
        ({"shape": [-4]}, "Expected `int` >= 1 - at `$.shape[0]`"),
        ({"shape": 4}, "Expected `array`, got `int` - at `$.shape`"),
        ({"classes": 10**12}, "Expected `int` <= 2147483648 - at `$.classes`"),
        ({"split": "{}"}, "the split cannot be used: 'owners'"),
        ({"split": "[" * DEEP}, "the split cannot be used"),
        ({"split": '{"owners": {}, "shapes": {}, "personal": [], "masks": {}}'}, "of other tensors"),
        ({"model": {"name": "mlp", "hidden": 4}}, "does not fit the checkpoint: fc1.bias is (4,)"),
        ({"clients": 3}, "unknown key 'clients' in"),
        ({"format": "fedfac model 1"}, "is of format 'fedfac model 1'; this version of fedfac reads"),
    ],
)
def test_configs_of_exported_models(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    about = an_exported_model(tmp_path) | changed
    (tmp_path / exported.CONFIG).write_text(json.dumps({k: v for k, v in about.items() if v is not None}))
    assert words in message(FedfacError, lambda: fedfac.load(tmp_path))


@pytest.mark.parametrize("content", ["[" * DEEP, "[]", "3", "", '{"format": ' + "[" * 900 + "]" * 900 + "}", "\x00"])
def test_configs_of_exported_models_that_are_none(tmp_path: Path, content: str) -> None:
    an_exported_model(tmp_path)
    (tmp_path / exported.CONFIG).write_text(content)
    assert exported.CONFIG in message(RunError, lambda: fedfac.load(tmp_path))


def safetensors(head: Any, data: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"fc1.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


STATES: dict[str, bytes] = {
    "petabytes": safetensors(tensor([10**15], [0, 4 * 10**15])),
    "a shape that lies": safetensors(tensor([10**15], [0, 4]), bytes(4)),
    "a shape that overflows": safetensors(tensor([2**62, 8], [0, 0])),
    "an empty shape that overflows": safetensors(tensor([0, 2**62, 8], [0, 0])),
    "offsets that lie": safetensors(tensor([1], [0, 2**60]), bytes(4)),
    "offsets that go back": safetensors(tensor([1], [4, 0]), bytes(4)),
    "a header that lies": struct.pack("<Q", 2**62) + b"{}",
    "a type that PyTorch has not": safetensors(tensor([1], [0, 1], "F8_E8M0"), bytes(1)),
    "half a byte": safetensors(tensor([2], [0, 1], "F4"), bytes(1)),
    "deep": safetensors(b"[" * DEEP),
    "nothing": b"",
    "eight bytes": bytes(8),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_are_none(tmp_path: Path, name: str) -> None:
    content = STATES[name]
    assert f"these {len(content)} bytes are not a whole safetensors state" in message(
        RunError, lambda: from_bytes(content)
    )
    an_exported_model(tmp_path)
    (tmp_path / exported.WEIGHTS).write_bytes(content)
    assert "not a whole safetensors state" in message(RunError, lambda: fedfac.load(tmp_path))
    weights = tmp_path / exported.WEIGHTS
    said = message(ModelError, lambda: models.build("mlp", shape=(4,), classes=3, seed=0, weights=weights))
    assert "is not a whole safetensors file" in said


def test_a_run_directory_whose_config_lacks_what_is_needed(tmp_path: Path) -> None:
    assert (
        main(["run", "--clients", "4", "--rounds", "1", "--epochs", "1", "--quiet", "--out", str(tmp_path / "r")]) == 0
    )
    file = tmp_path / "r" / "config.json"
    whole = json.loads(file.read_text())
    damage: list[dict[str, Any]] = [
        {"rounds": "x"},
        {"origin": 3},
        {"origin": {"train": 3}},
        {"settings": {}},
        {"split": None},
    ]
    for changed in damage:
        file.write_text(json.dumps(whole | changed))
        said = message(RunError, lambda: fedfac.load(tmp_path / "r"))
        assert "is no run's config" in said or "config.json is not what a run is described" in said, changed
    file.write_text(json.dumps(whole))
    assert fedfac.load(tmp_path / "r").accuracy >= 0
