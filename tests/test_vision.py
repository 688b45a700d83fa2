"""Image data sets, read from small files of the true formats that the tests write themselves."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfac.data import image_parquet, vision
from fedfac.data.federation import Federation
from fedfac.data.pool import ArrayPool
from fedfac.data.samples import Samples
from fedfac.data.vision import FlipAndCrop, ImageSet, Normalise, flip_and_crop
from fedfac.errors import ConfigError, DataError
from fedfac.seeds import generator

Pixels = npt.NDArray[np.uint8]
SETS = {
    "cifar10": vision.CIFAR10,
    "cifar100": vision.CIFAR100,
    "mnist": vision.MNIST,
    "fashion_mnist": vision.FASHION_MNIST,
    "femnist": vision.FEMNIST,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDFAC_DATA", raising=False)
    monkeypatch.setenv("FEDFAC_CACHE", str(tmp_path / "user-cache"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


def noise(n: int, shape: Sequence[int], seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def encode(image: Pixels, form: str = "PNG", mode: str | None = None) -> bytes:
    """An image (channels, height, width) as a file without loss."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    file = io.BytesIO()
    (picture.convert(mode) if mode else picture).save(file, form, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


def write(
    path: Path,
    columns: Mapping[str, Any],
    *,
    image: str = "img",
    features: Mapping[str, Any] | None = None,
    row_group_size: int = 4,
) -> None:
    """A parquet file of the hub's schema."""
    arrays = {}
    for name, values in columns.items():
        if name == image:
            kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            arrays[name] = pa.array([{"bytes": v, "path": None} for v in values], kind)
        else:
            arrays[name] = pa.array(values)
    table = pa.table(arrays)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size)


def write_set(
    folder: Path, images: ImageSet, n: int = 10, *, form: str = "PNG", **more: Sequence[Any]
) -> tuple[Pixels, list[int]]:
    """The data set's files with ``n`` samples in all; the last three are the test file's where there is one."""
    pixels = noise(n, images.shape)
    labels = [(7 * i + 3) % images.classes for i in range(n)]
    splits = [pattern.split("*")[0] for pattern in images.source.patterns]
    cuts = [slice(0, n - 3), slice(n - 3, n)] if len(splits) == 2 else [slice(0, n)]
    for split, cut in zip(splits, cuts, strict=True):
        columns = {images.image: [encode(p, form) for p in pixels[cut]], images.label: labels[cut]}
        write(folder / f"{split}.parquet", columns | {k: v[cut] for k, v in more.items()}, image=images.image)
    return pixels, labels


def is_exactly(samples: Samples, pixels: Pixels, labels: Sequence[int]) -> bool:
    pool = samples.pool
    assert isinstance(pool, ArrayPool)
    assert samples.labels is not None
    assert pool.inputs.dtype == torch.uint8
    assert pool.targets.dtype == torch.int64
    assert samples.labels.dtype == np.int64
    assert samples.fingerprint == ArrayPool(torch.from_numpy(pixels), torch.tensor(labels)).fingerprint()
    return (
        np.array_equal(pool.inputs.numpy(), pixels)
        and pool.targets.tolist() == labels
        and samples.labels.tolist() == labels
    )


def error(function: Callable[..., object], folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        function(data_dir=folder)
    return str(caught.value)


# Parquet files.


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_pixels_and_labels_are_exact_and_training_comes_first(tmp_path: Path, form: str) -> None:
    pixels, labels = write_set(tmp_path / "cifar10", vision.CIFAR10, 13, form=form)
    samples = vision.cifar10(data_dir=tmp_path)
    assert is_exactly(samples, pixels, labels)
    assert (samples.name, samples.classes, samples.owners, samples.fixed) == ("cifar10", 10, None, None)
    assert samples.class_names is not None
    assert samples.class_names[3] == "cat"


def test_parts_of_a_file_and_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_parquet, "_ROWS", 3)
    pixels = noise(50, (3, 32, 32))
    labels = [i % 10 for i in range(50)]
    names = ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]
    for name, cut in zip(names, (slice(0, 21), slice(21, 43), slice(43, 50)), strict=True):
        columns = {"img": [encode(p) for p in pixels[cut]], "label": labels[cut]}
        write(tmp_path / f"{name}.parquet", columns, row_group_size=8)
    assert is_exactly(vision.cifar10(data_dir=tmp_path), pixels, labels)


@pytest.mark.parametrize("name", SETS)
def test_every_data_set_reads_its_own_schema(tmp_path: Path, name: str) -> None:
    images = SETS[name]
    extra: dict[str, Any] = {"coarse_label": [0] * 10} if name == "cifar100" else {}
    if name == "femnist":
        extra = {"writer_id": [f"f{i % 3:04}_14" for i in range(10)], "hsf_id": [0] * 10}
    pixels, labels = write_set(tmp_path / images.source.name, images, **extra)
    samples: Samples = getattr(vision, name)(data_dir=tmp_path)
    assert is_exactly(samples, pixels, labels)
    assert samples.classes == images.classes == {"cifar100": 100, "femnist": 62}.get(name, 10)
    assert samples.name == name.replace("_", "-")
    if name == "femnist":
        assert samples.owners is not None
        assert samples.owners.tolist() == extra["writer_id"]
        assert samples.class_names is not None
        assert [samples.class_names[i] for i in (0, 9, 10, 35, 36, 61)] == list("09AZaz")
    else:
        assert samples.owners is None


def test_writers_of_mnist_are_its_owners_where_the_files_name_them(tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", vision.MNIST, writer_id=[100 + i % 4 for i in range(10)])
    owners = vision.mnist(data_dir=tmp_path).owners
    assert owners is not None
    assert owners.tolist() == [str(100 + i % 4) for i in range(10)]


def test_writers_of_half_of_the_samples_are_no_owners(tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", vision.MNIST, writer_id=list(range(10)))
    columns = {"image": [encode(p) for p in noise(3, (1, 28, 28))], "label": [0, 1, 2]}
    write(tmp_path / "mnist" / "test.parquet", columns, image="image")
    assert vision.mnist(data_dir=tmp_path).owners is None


def test_the_second_time_nothing_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [f"w{i % 2}" for i in range(10)]
    pixels, labels = write_set(tmp_path / "femnist", vision.FEMNIST, writer_id=writers)
    first = vision.femnist(data_dir=tmp_path)
    monkeypatch.setattr(vision, "_read", lambda *_: pytest.fail("decoded again"))
    again = vision.femnist(data_dir=tmp_path)
    assert is_exactly(again, pixels, labels)
    assert again.fingerprint == first.fingerprint
    assert again.owners is not None
    assert again.owners.tolist() == writers
    write_set(tmp_path / "femnist", vision.FEMNIST, 11, writer_id=[*writers, "w9"])
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        vision.femnist(data_dir=tmp_path)


def test_a_pool_of_images_makes_a_federation(tmp_path: Path) -> None:
    pixels, labels = write_set(tmp_path, vision.CIFAR10)
    samples = vision.cifar10(data_dir=tmp_path)
    parts: dict[str, Any] = {"a": (range(4), range(4, 6)), "b": (np.array([7, 9]), np.array([8]))}
    federation = Federation.from_pool(samples.pool, parts, classes=10, fingerprint=samples.fingerprint)
    client = federation.client(1)
    inputs, targets = client.pool.batch(client.train)
    assert targets.tolist() == [labels[7], labels[9]]
    torch.testing.assert_close(inputs, vision.CIFAR10.normalise(torch.from_numpy(pixels[[7, 9]])))


@pytest.mark.parametrize("mode", ["1", "P", "RGB", "LA"])
def test_grey_images_in_other_modes_are_the_same_images(tmp_path: Path, mode: str) -> None:
    pixels = np.where(noise(2, (1, 28, 28)) > 127, 255, 0).astype(np.uint8)
    columns = {"image": [encode(p, mode=mode) for p in pixels], "label": [1, 2]}
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", columns, image="image")
    assert is_exactly(vision.mnist(data_dir=tmp_path), np.concatenate([pixels, pixels]), [1, 2, 1, 2])


def broken(folder: Path, columns: Mapping[str, Any], **options: Any) -> str:
    """What reading CIFAR-10 says to this training file."""
    write_set(folder, vision.CIFAR10)
    write(folder / "train.parquet", columns, **options)
    return error(vision.cifar10, folder)


PNG = encode(noise(1, (3, 32, 32))[0])


def test_a_wrong_schema_names_the_columns_found_and_wanted(tmp_path: Path) -> None:
    text = broken(tmp_path, {"image": [PNG], "label": [1]}, image="image")
    assert text == (
        f"{tmp_path / 'train.parquet'} has the columns image, label; cifar10 needs img, label. "
        "Is it a file of another data set?"
    )


def test_femnist_needs_its_writers(tmp_path: Path) -> None:
    write_set(tmp_path, vision.FEMNIST)
    assert "has the columns image, character; femnist needs image, character, writer_id." in error(
        vision.femnist, tmp_path
    )


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    text = broken(tmp_path, {"img": [PNG], "label": ["cat"]})
    assert text == f"{tmp_path / 'train.parquet'}: column label is string; wanted: whole numbers 0..9"
    text = broken(tmp_path, {"img": [b"x"], "label": [1]}, image="none")
    assert text.endswith("column img is binary; wanted: a struct with the image file as 'bytes'")


@pytest.mark.parametrize("label", [10, -1, 255])
def test_a_label_outside_the_classes_is_named(tmp_path: Path, label: int) -> None:
    text = broken(tmp_path, {"img": [PNG] * 6, "label": [1, 2, 3, 4, label, 5]})
    assert text == f"{tmp_path / 'train.parquet'}, row 4: the label is {label}; cifar10 has the labels 0..9"


def test_rows_without_a_label_an_image_or_an_owner_are_refused(tmp_path: Path) -> None:
    assert broken(tmp_path, {"img": [PNG, PNG], "label": [1, None]}).endswith("has rows without a label")
    assert broken(tmp_path, {"img": [PNG, None], "label": [1, 2]}).endswith("row 1: there is no image")
    assert broken(tmp_path, {"img": [], "label": pa.array([], pa.int64())}).endswith("train.parquet has no rows")
    write_set(tmp_path / "femnist", vision.FEMNIST, writer_id=["a"] * 9 + [None])
    assert error(vision.femnist, tmp_path).endswith("has rows without a writer_id")


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_truncated_image_bytes_are_refused_by_row(tmp_path: Path, form: str) -> None:
    good = encode(noise(1, (3, 32, 32))[0], form)
    text = broken(tmp_path, {"img": [good, good, good[: len(good) // 2]], "label": [1, 2, 3]})
    assert text.startswith(f"{tmp_path / 'train.parquet'}, row 2: the image cannot be decoded (")
    assert text.endswith("fetch it again")


def test_bytes_that_are_no_image_and_images_of_another_size_are_refused(tmp_path: Path) -> None:
    assert "row 1: the image cannot be decoded" in broken(tmp_path, {"img": [PNG, b"no image"], "label": [1, 2]})
    small = encode(noise(1, (3, 16, 24))[0])
    text = broken(tmp_path, {"img": [PNG, small], "label": [1, 2]})
    assert text == f"{tmp_path / 'train.parquet'}, row 1: the image is 24 x 16; wanted: 32 x 32"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_parquet_file_is_refused(tmp_path: Path, share: float) -> None:
    write_set(tmp_path, vision.CIFAR10)
    path = tmp_path / "train.parquet"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    text = error(vision.cifar10, tmp_path)
    assert text.startswith(
        f"{path} cannot be read as a parquet file; it is damaged or was copied in part, fetch it again ("
    )


def test_a_damaged_page_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, vision.CIFAR10)
    path = tmp_path / "train.parquet"
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56  # the first page's header
    path.write_bytes(data)
    assert "cannot be read as a parquet file" in error(vision.cifar10, tmp_path)


def test_files_of_another_data_set_of_the_same_schema_are_refused(tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "label": {"names": list("0123456789"), "_type": "ClassLabel"}}
    columns = {"image": [encode(noise(1, (1, 28, 28))[0])], "label": [1]}
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", columns, image="image", features=features)
    assert vision.mnist(data_dir=tmp_path).classes == 10
    assert error(vision.fashion_mnist, tmp_path) == (
        f"{tmp_path / 'train.parquet'} says that its classes are 0, 1, 2, 3, ...; those of fashion-mnist are "
        "T-shirt/top, Trouser, Pullover, Dress, .... Is it a file of another data set?"
    )


def test_the_hubs_spelling_of_class_names_is_accepted(tmp_path: Path) -> None:
    names = ["T - shirt / top", *vision.FASHION_MNIST.class_names[1:8], "Purse", "Ankle boot"]
    columns = {"image": [encode(noise(1, (1, 28, 28))[0])], "label": [1]}
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", columns, image="image", features={"label": {"names": names}})
    assert vision.fashion_mnist(data_dir=tmp_path).classes == 10


@pytest.mark.parametrize("metadata", [b"not json", b"[]", b'{"info": null}', b'{"info": {"features": {"label": 3}}}'])
def test_odd_metadata_does_not_matter(tmp_path: Path, metadata: bytes) -> None:
    write_set(tmp_path, vision.CIFAR10)
    table = pq.read_table(tmp_path / "test.parquet").replace_schema_metadata({"huggingface": metadata})
    pq.write_table(table, tmp_path / "test.parquet")
    assert vision.cifar10(data_dir=tmp_path).classes == 10


def test_missing_files_say_which_and_where(tmp_path: Path) -> None:
    assert error(vision.cifar10, tmp_path / "nowhere") == (
        "cifar10 needs train*.parquet and test*.parquet, or cifar-10-binary.tar.gz, or cifar-10-python.tar.gz; "
        f"looked in {tmp_path / 'nowhere' / 'cifar10'}, {tmp_path / 'nowhere'}. "
        "Put the files into a folder and name it: --data-dir FOLDER, or FEDFAC_DATA=FOLDER. "
        "Or, on a machine with network: pip install 'fedfac[hub]' and name no folder; "
        "then plain_text/train-00000-of-00001.parquet and plain_text/test-00000-of-00001.parquet "
        "of uoft-cs/cifar10 will be downloaded."
    )


@pytest.mark.parametrize("name", SETS)
def test_downloads_are_pinned(name: str) -> None:
    source = SETS[name].source
    assert source.revision is not None
    assert len(source.revision) == 40
    assert set(source.revision) <= set("0123456789abcdef")


# The official archives.


def string(data: bytes) -> bytes:
    """A Python 2 string in a pickle of protocol 2."""
    return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<i", len(data)) + data


def python2_pickle(pixels: Pixels, labels: Sequence[int], key: bytes) -> bytes:
    """A batch as the official archives have it, opcode by opcode: written by Python 2 and its numpy."""
    n, length = pixels.reshape(len(pixels), -1).shape
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    array += b"(K\x01" + b"M" + struct.pack("<H", n) + b"M" + struct.pack("<H", length) + b"\x86" + dtype
    array += b"\x89" + string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    fields = {b"batch_label": string(b"training batch 1 of 5"), b"data": array, key: numbers}
    return b"\x80\x02}(" + b"".join(string(name) + value for name, value in fields.items()) + b"u."


def python3_pickle(pixels: Pixels, labels: Sequence[int], key: bytes) -> bytes:
    """The same, written today."""
    return pickle.dumps({"data": pixels.reshape(len(pixels), -1), key.decode(): list(labels)}, protocol=2)


def records(pixels: Pixels, labels: Sequence[int], key: bytes) -> bytes:
    """A batch of the binary archives; CIFAR-100's records begin with the coarse label."""
    head = b"\x13" if key == b"fine_labels" else b""
    return b"".join(head + bytes([y]) + x.tobytes() for x, y in zip(pixels, labels, strict=True))


def archive(path: Path, members: Mapping[str, bytes | tarfile.TarInfo]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def cifar_members(
    which: str, kind: str, batch: Callable[..., bytes] | None = None
) -> tuple[dict[str, bytes], Pixels, list[int]]:
    """The members of an official archive, two images each; and what it holds."""
    images = SETS[which]
    wanted = images.archives[f"{which.replace('cifar', 'cifar-')}-{kind}.tar.gz"]
    write_batch = batch or (records if kind == "binary" else python2_pickle)
    folder = f"cifar-10-batches-{'bin' if kind == 'binary' else 'py'}" if which == "cifar10" else f"cifar-100-{kind}"
    pixels = noise(2 * len(wanted), images.shape)
    labels = [(31 * i + 5) % images.classes for i in range(len(pixels))]
    key = images.pickled_label.encode()
    made = {
        f"{folder}/{name}": write_batch(pixels[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2], key)
        for i, name in enumerate(wanted)
    }
    order = [*list(made)[1::2], *list(made)[::2]]  # the official ones are in no order either
    return {f"{folder}/readme.html": b"<html>"} | {name: made[name] for name in order}, pixels, labels


@pytest.mark.parametrize("which", ["cifar10", "cifar100"])
@pytest.mark.parametrize("batch", [records, python2_pickle, python3_pickle])
def test_archives_hold_the_same_samples(tmp_path: Path, which: str, batch: Callable[..., bytes]) -> None:
    kind = "binary" if batch is records else "python"
    members, pixels, labels = cifar_members(which, kind, batch)
    name = f"{which.replace('cifar', 'cifar-')}-{kind}.tar.gz"
    archive(tmp_path / which / name, members)
    samples: Samples = getattr(vision, which)(data_dir=tmp_path)
    assert is_exactly(samples, pixels, labels)
    assert {p.name for p in (tmp_path / which).iterdir()} == {name, ".fedfac-cache"}  # nothing was unpacked


def with_member(folder: Path, content: bytes, name: str = "cifar-10-batches-py/data_batch_2") -> str:
    """What reading the Python archive says when one of its members is another."""
    members, _, _ = cifar_members("cifar10", "python")
    archive(folder / "cifar-10-python.tar.gz", members | {name: content})
    return error(vision.cifar10, folder)


class Runs:
    """A pickle of this creates a file when it is read carelessly."""

    def __init__(self, how: Callable[..., object], *arguments: object) -> None:
        self.how, self.arguments = how, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.how, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("how", ["mkdir", "exec"])
def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, protocol: int, how: str) -> None:
    marker = tmp_path / "it-ran"
    evil = Runs(os.mkdir, str(marker)) if how == "mkdir" else Runs(exec, f"import os; os.mkdir({str(marker)!r})")
    content = pickle.dumps({"data": evil, "labels": [1]}, protocol=protocol)
    text = with_member(tmp_path, content)
    assert not marker.exists()
    wanted = "posix.mkdir" if how == "mkdir" else "__builtin__.exec" if protocol < 3 else "builtins.exec"
    assert text == (
        f"{tmp_path / 'cifar-10-python.tar.gz'}, data_batch_2: the pickle asks for {wanted}; "
        "only arrays are read: this is not the official archive"
    )
    pickle.loads(content)  # carelessly
    assert marker.exists()


@pytest.mark.parametrize(
    ("wanted", "content"),
    [
        ("os.system", b"(S'true'\nios\nsystem\n."),  # INST
        ("numpy.load", b"cnumpy\nload\n."),
        ("numpy.core.multiarray.scalar", b"cnumpy.core.multiarray\nscalar\n."),
        ("_codecs.decode", b"c_codecs\ndecode\n."),
        ("numpy.ndarray.dumps", b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93."),  # a dotted name
    ],
)
def test_other_names_are_refused_too(tmp_path: Path, wanted: str, content: bytes) -> None:
    assert f"the pickle asks for {wanted};" in with_member(tmp_path, content)


def test_only_bytes_may_be_in_the_arrays(tmp_path: Path) -> None:
    content = pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, protocol=2)
    assert "data_batch_2: an array of 'f8' is in the place of bytes" in with_member(tmp_path, content)
    content = pickle.dumps({"data": np.array([[None]]), "labels": [1]}, protocol=2)
    assert "an array of 'O8' is in the place of bytes" in with_member(tmp_path, content)
    content = b"c_codecs\nencode\n(Vx\nVzlib\ntR."
    assert "asks for the encoding 'zlib'; allowed: latin1" in with_member(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}",
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({"labels": [1]}, protocol=2),
        pickle.dumps({"data": [[1]], "labels": [1]}, protocol=2),
        python3_pickle(noise(2, (3, 32, 32)), [1, 2], b"fine_labels"),
        python2_pickle(noise(2, (3, 32, 32)), [1, 2], b"labels")[:-200],
    ],
)
def test_pickles_of_something_else_are_refused(tmp_path: Path, content: bytes) -> None:
    text = with_member(tmp_path, content)
    assert "data_batch_2 is not a batch of the official archive (" in text
    assert text.endswith("fetch it again")


@pytest.mark.parametrize(
    "content",
    [
        python3_pickle(noise(2, (3, 32, 32)), [1], b"labels"),
        python3_pickle(noise(2, (3, 16, 16)), [1, 2], b"labels"),
        pickle.dumps({"data": noise(2, (3072,)), "labels": [1, "cat"]}, protocol=2),
    ],
)
def test_batches_of_other_shapes_are_refused(tmp_path: Path, content: bytes) -> None:
    assert "wanted: one row of 3072 bytes and one whole number per image" in with_member(tmp_path, content)


def test_labels_in_archives_are_checked(tmp_path: Path) -> None:
    text = with_member(tmp_path, python2_pickle(noise(2, (3, 32, 32)), [1, 10], b"labels"))
    assert text.endswith("data_batch_2, record 1: the label is 10; cifar10 has the labels 0..9")
    members, _, _ = cifar_members("cifar100", "binary")
    bad = records(noise(1, (3, 32, 32)), [100], b"fine_labels")
    archive(tmp_path / "cifar-100-binary.tar.gz", members | {"cifar-100-binary/test.bin": bad})
    assert "test.bin, record 0: the label is 100; cifar100 has" in error(vision.cifar100, tmp_path)


@pytest.mark.parametrize("name", ["../x", "cifar/../../x", "/etc/x", "..\\x", "C:\\x", "cifar/../data_batch_1"])
def test_paths_that_climb_out_of_an_archive_are_refused(tmp_path: Path, name: str) -> None:
    text = with_member(tmp_path / "data", b"", name)
    assert text == (
        f"{tmp_path / 'data' / 'cifar-10-python.tar.gz'} holds {name!r}, a path out of the archive: "
        "this is not the official archive"
    )
    assert not (tmp_path / "x").exists()


def test_links_and_repeated_members_are_refused(tmp_path: Path) -> None:
    members, _, _ = cifar_members("cifar10", "binary")
    link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    archive(tmp_path / "cifar-10-binary.tar.gz", members | {link.name: link})
    assert "data_batch_1.bin is not one plain file of at most" in error(vision.cifar10, tmp_path)
    archive(tmp_path / "cifar-10-binary.tar.gz", members | {"copy/data_batch_1.bin": b""})
    assert "data_batch_1.bin is not one plain file of at most" in error(vision.cifar10, tmp_path)


def test_incomplete_archives_are_refused(tmp_path: Path) -> None:
    members, _, _ = cifar_members("cifar10", "binary")
    path = tmp_path / "cifar-10-binary.tar.gz"
    archive(path, {name: content for name, content in members.items() if "data_batch_4" not in name})
    assert error(vision.cifar10, tmp_path) == (
        f"{path} lacks data_batch_4.bin; fetch the official cifar-10-binary.tar.gz again"
    )
    name = "cifar-10-batches-bin/test_batch.bin"
    archive(path, members | {name: members[name][:-1]})
    assert error(vision.cifar10, tmp_path) == (
        f"{path}, test_batch.bin has 6145 bytes; wanted: a multiple of 3073. Fetch the archive again"
    )


def cut_off(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]  # in the checksum at the end


def not_gzip(data: bytes) -> bytes:
    return gzip.decompress(data)


def no_tar(data: bytes) -> bytes:
    return gzip.compress(b"x" * 2000)


@pytest.mark.parametrize("damage", [cut_off, flipped, not_gzip, no_tar])
def test_damaged_archives_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    members, _, _ = cifar_members("cifar10", "binary")
    path = tmp_path / "cifar-10-binary.tar.gz"
    archive(path, members)
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path} cannot be read as a gzipped tar archive; it is damaged" in error(vision.cifar10, tmp_path)


# Normalisation.


@pytest.mark.parametrize("name", SETS)
def test_normalisation_by_hand(name: str) -> None:
    images = SETS[name]
    pixels = torch.from_numpy(noise(3, images.shape))
    out = images.normalise(pixels)
    assert out.dtype == torch.float32
    assert out.shape == pixels.shape
    for i, c, y, x in [(0, 0, 0, 0), (1, images.shape[0] - 1, 5, 27), (2, 0, 13, 4)]:
        value = int(pixels[i, c, y, x])
        by_hand = (value / 255 - images.normalise.mean[c]) / images.normalise.std[c]
        assert float(out[i, c, y, x]) == pytest.approx(by_hand, abs=2e-6)


def test_the_published_constants() -> None:
    assert vision.CIFAR10.normalise == Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert vision.CIFAR100.normalise == Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    assert vision.MNIST.normalise == Normalise((0.1307,), (0.3081,))
    assert vision.FASHION_MNIST.normalise == Normalise((0.2860,), (0.3530,))


def test_normalisation_is_a_value(tmp_path: Path) -> None:
    made = Normalise((0.5,), (0.25,))
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(Normalise((0.5,), (0.25,)))
    assert made != Normalise((0.5,), (0.5,))
    pixels = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
    with torch.inference_mode():
        assert made(pixels).item() == pytest.approx(2.0)
    weight = torch.ones(1, requires_grad=True)
    (made(pixels) * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2.0)


# Augmentation.


def test_loaders_augment_when_asked(tmp_path: Path) -> None:
    for name, images in SETS.items():
        more: dict[str, Any] = {"writer_id": ["a"] * 10} if name == "femnist" else {}
        write_set(tmp_path / images.source.name, images, **more)
        load = getattr(vision, name)
        assert load(data_dir=tmp_path).augment is None
        flips = name.startswith("cifar")
        assert load(data_dir=tmp_path, augment=True).augment == flip_and_crop(4 if flips else 2, flip=flips)


def test_the_augmentation_is_a_value() -> None:
    made = flip_and_crop()
    assert made == FlipAndCrop(padding=4, flip=True)
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(ConfigError, match="cannot be padded by -1 pixels; allowed: 0, 1, 2"):
        flip_and_crop(-1)


def windows(image: torch.Tensor, padding: int, flip: bool) -> set[bytes]:
    """Everything that one image can become."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    found = [padded[:, y : y + height, x : x + width] for y in range(2 * padding + 1) for x in range(2 * padding + 1)]
    if flip:
        found += [window.flip(2) for window in found]
    return {window.contiguous().numpy().tobytes() for window in found}


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 6),
    channels=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    padding=st.integers(0, 3),
    flip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_sample_is_a_window_of_its_padded_image(
    n: int, channels: int, height: int, width: int, padding: int, flip: bool, seed: int
) -> None:
    batch = torch.randn(n, channels, height, width, generator=generator(seed, "images"))
    before = batch.clone()
    out = flip_and_crop(padding, flip=flip)(batch, generator(seed, "draws"))
    assert out.shape == batch.shape
    assert out.dtype == batch.dtype
    assert torch.equal(batch, before)
    for image, made in zip(batch, out, strict=True):
        assert made.contiguous().numpy().tobytes() in windows(image, padding, flip)


def test_the_same_generator_gives_the_same_batch_and_another_does_not() -> None:
    batch = torch.randn(16, 3, 32, 32, generator=generator(0, "images"))
    augment = flip_and_crop()
    assert torch.equal(augment(batch, generator(1, "draws")), augment(batch, generator(1, "draws")))
    assert not torch.equal(augment(batch, generator(1, "draws")), augment(batch, generator(2, "draws")))
    draws = generator(1, "draws")
    assert not torch.equal(augment(batch, draws), augment(batch, draws))


def test_samples_are_moved_and_mirrored_each_on_its_own() -> None:
    n, padding = 4000, 2
    image = torch.arange(1.0, 50.0).reshape(1, 1, 7, 7)
    out = flip_and_crop(padding)(image.expand(n, 1, 7, 7), generator(0, "draws"))
    centre = out[:, 0, 3, 3]  # with padding 2 it is always a pixel of the image: row and column follow from it
    rows = (centre - 1).div(7, rounding_mode="floor")
    mirrored = out[:, 0, 3, 4] < centre
    columns = torch.where(mirrored, 6 - (centre - 1) % 7, (centre - 1) % 7)
    assert abs(float(mirrored.float().mean()) - 0.5) < 0.03
    for offsets in (rows, columns):
        counts = torch.bincount(offsets.long() - 1, minlength=5)
        assert len(counts) == 2 * padding + 1
        assert (counts - n / 5).abs().max() < 0.03 * n
    both = torch.stack([rows, columns, mirrored.float()])
    assert (torch.corrcoef(both) - torch.eye(3)).abs().max() < 0.06
    assert len(torch.unique(out.flatten(1), dim=0)) == 50  # 5 x 5 places, twice


def test_without_padding_and_flips_nothing_changes() -> None:
    batch = torch.randn(3, 2, 5, 4)
    assert torch.equal(flip_and_crop(0, flip=False)(batch, generator(0, "draws")), batch)
