"""Images: CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST and FEMNIST (paper, section 5; facts, section 5).

A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Y. LeCun, C. Cortes, C. Burges, The
MNIST database, 1998. H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST, 2017. S. Caldas and others, LEAF, 2018.

Training and test files are pooled, the training files first (60,000 of MNIST's and Fashion-MNIST's 70,000
samples, 50,000 of CIFAR's 60,000); the paper cuts the pool into clients and holds out a share of each. Pixels
stay bytes: they are decoded once, cached (:func:`fedfac.data.files.cached`) and normalised batch by batch.

The files are the hub's parquet files, or the official CIFAR archives. Nothing in an archive is unpacked to
disk, and the pickles of the Python archives are read without running anything they ask for.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedfac.data.federation import ArrayPool
from fedfac.data.files import Source, cached, find
from fedfac.data.samples import Samples
from fedfac.errors import ConfigError, DataError

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Normalise:
    """Bytes to numbers: (x / 255 - mean) / std, per channel.

    >>> made = Normalise(mean=(0.5,), std=(0.25,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    >>> [round(x, 3) for x in made.flatten().tolist()]
    [-2.0, 2.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, batch: Tensor) -> Tensor:
        """A batch (n, channels, height, width) in the default dtype."""
        scale, shift = _constants(self.mean, self.std, batch.device, torch.get_default_dtype())
        return torch.addcmul(shift, batch.to(scale.dtype), scale)


@lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and -mean / std; kept, so that no batch waits for a copy to the device."""
    scale = torch.tensor([1 / (255 * s) for s in std], dtype=dtype, device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=dtype, device=device)
    return scale[:, None, None], shift[:, None, None]


@dataclass(frozen=True)
class FlipAndCrop:
    """Every sample is moved at random by up to ``padding`` pixels, and mirrored with probability one half.

    What moves in is zero, which is the mean colour of normalised images.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"images cannot be padded by {self.padding} pixels; allowed: 0, 1, 2, ...")

    def __call__(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """A batch of the same shape; the draws depend on the generator and on the batch's size only."""
        n, channels, height, width = batch.shape

        def draw(high: int) -> Tensor:
            return torch.randint(high, (n, 1), generator=generator, device=generator.device).to(batch.device)

        rows = draw(2 * self.padding + 1) + torch.arange(height, device=batch.device)
        left = draw(2 * self.padding + 1)
        columns = torch.arange(width, device=batch.device).expand(n, width)
        if self.flip:
            columns = torch.where(draw(2) == 1, width - 1 - columns, columns)
        padded = F.pad(batch, (self.padding,) * 4)
        places = rows[:, :, None] * padded.shape[3] + (left + columns)[:, None, :]
        index = places.reshape(n, 1, height * width).expand(n, channels, height * width)
        return padded.flatten(2).gather(2, index).view(batch.shape)


def flip_and_crop(padding: int = 4, *, flip: bool = True) -> FlipAndCrop:
    """The usual augmentation of small images: random crops after padding, random horizontal flips."""
    return FlipAndCrop(padding, flip)


@dataclass(frozen=True)
class ImageSet:
    """What a data set of images looks like: files, columns, classes."""

    source: Source
    image: str  # column of encoded images
    label: str  # column of labels
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    normalise: Normalise
    augment: FlipAndCrop
    owner: str | None = None  # column of natural clients
    owner_needed: bool = False
    archives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by file name, its members in order
    label_bytes: int = 1  # before the pixels of a record of the binary archive; the last of them is the label
    pickled_label: str = "labels"

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)


_TEN = tuple("0123456789")
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_CIFAR10_ARCHIVES = {
    "cifar-10-binary.tar.gz": tuple(f"{name}.bin" for name in _BATCHES),
    "cifar-10-python.tar.gz": _BATCHES,
}
_CIFAR100_ARCHIVES = {
    "cifar-100-binary.tar.gz": ("train.bin", "test.bin"),
    "cifar-100-python.tar.gz": ("train", "test"),
}


def _source(
    name: str, repo: str, revision: str, folder: str, splits: Sequence[str], archives: Sequence[str] = ()
) -> Source:
    return Source(
        name,
        repo,
        revision,
        files=tuple(f"{folder}/{split}-00000-of-00001.parquet" for split in splits),
        patterns=tuple(f"{split}*.parquet" for split in splits),
        alternatives=tuple((archive,) for archive in archives),
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CIFAR10 = ImageSet(
    source=_source(
        "cifar10",
        "uoft-cs/cifar10",
        "0b2714987fa478483af9968de7c934580d0bb9a2",
        "plain_text",
        ("train", "test"),
        tuple(_CIFAR10_ARCHIVES),
    ),
    image="img",
    label="label",
    shape=(3, 32, 32),
    class_names=_words("airplane automobile bird cat deer dog frog horse ship truck"),
    normalise=Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    augment=FlipAndCrop(4),
    archives=_CIFAR10_ARCHIVES,
)

CIFAR100 = ImageSet(
    source=_source(
        "cifar100",
        "uoft-cs/cifar100",
        "aadb3af77e9048adbea6b47c21a81e47dd092ae5",
        "cifar100",
        ("train", "test"),
        tuple(_CIFAR100_ARCHIVES),
    ),
    image="img",
    label="fine_label",
    shape=(3, 32, 32),
    class_names=_words(
        "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
        "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
        "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
        "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
        "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
        "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
        "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
    ),
    normalise=Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    augment=FlipAndCrop(4),
    archives=_CIFAR100_ARCHIVES,
    label_bytes=2,
    pickled_label="fine_labels",
)

MNIST = ImageSet(
    source=_source("mnist", "ylecun/mnist", "77f3279092a1c1579b2250db8eafed0ad422088c", "mnist", ("train", "test")),
    image="image",
    label="label",
    shape=(1, 28, 28),
    class_names=_TEN,
    normalise=Normalise((0.1307,), (0.3081,)),
    augment=FlipAndCrop(2, flip=False),
    owner="writer_id",
)

FASHION_MNIST = ImageSet(
    source=_source(
        "fashion-mnist",
        "zalando-datasets/fashion_mnist",
        "531be5e2ccc9dba0c201ad3ae567a4f3d16ecdd2",
        "fashion_mnist",
        ("train", "test"),
    ),
    image="image",
    label="label",
    shape=(1, 28, 28),
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    normalise=Normalise((0.2860,), (0.3530,)),
    augment=FlipAndCrop(2, flip=False),
)

FEMNIST = ImageSet(
    source=_source("femnist", "flwrlabs/femnist", "df739a2b09df2b5cc1ec93107659b9a9a8566487", "data", ("train",)),
    image="image",
    label="character",
    shape=(1, 28, 28),
    class_names=(*_TEN, *"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
    # Dark on white, unlike MNIST, whose constants are often used for it; no published ones: measured on 396 writers.
    normalise=Normalise((0.9616,), (0.1638,)),
    augment=FlipAndCrop(2, flip=False),
    owner="writer_id",
    owner_needed=True,
)


def cifar10(*, data_dir: Path | None = None, augment: bool = False) -> Samples:
    """CIFAR-10: 60,000 colour images of 32 x 32 pixels, 10 classes."""
    return load(CIFAR10, data_dir=data_dir, augment=augment)


def cifar100(*, data_dir: Path | None = None, augment: bool = False) -> Samples:
    """CIFAR-100: 60,000 colour images of 32 x 32 pixels, 100 classes (the fine labels)."""
    return load(CIFAR100, data_dir=data_dir, augment=augment)


def mnist(*, data_dir: Path | None = None, augment: bool = False) -> Samples:
    """MNIST: 70,000 handwritten digits of 28 x 28 pixels; with their writers where the files name them."""
    return load(MNIST, data_dir=data_dir, augment=augment)


def fashion_mnist(*, data_dir: Path | None = None, augment: bool = False) -> Samples:
    """Fashion-MNIST: 70,000 pieces of clothing, 28 x 28 pixels, 10 classes."""
    return load(FASHION_MNIST, data_dir=data_dir, augment=augment)


def femnist(*, data_dir: Path | None = None, augment: bool = False) -> Samples:
    """FEMNIST: handwritten digits and letters of 28 x 28 pixels, 62 classes; its clients are the writers."""
    return load(FEMNIST, data_dir=data_dir, augment=augment)


def load(images: ImageSet, *, data_dir: Path | None = None, augment: bool = False) -> Samples:
    """A data set of images: found, decoded once, mapped from the cache."""
    name = images.source.name
    files = find(images.source, data_dir)
    data = cached(files, name, lambda: _read(files, images))
    return Samples(
        name=name,
        pool=ArrayPool(data["inputs"], data["targets"], images.normalise),
        fingerprint=data["fingerprint"].numpy().tobytes().hex(),
        labels=data["targets"].numpy(),
        classes=images.classes,
        owners=_owners(data),
        augment=images.augment if augment else None,
        class_names=images.class_names,
    )


def _read(files: Sequence[Path], images: ImageSet) -> dict[str, Tensor]:
    """Everything that is cached, from whichever kind of file there is."""
    members = images.archives.get(files[0].name)
    data = _read_parquet(files, images) if members is None else _read_archive(files[0], members, images)
    digest = ArrayPool(data["inputs"], data["targets"]).fingerprint()
    return data | {"fingerprint": torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)}


def _owners(data: Mapping[str, Tensor]) -> npt.NDArray[Any] | None:
    """The owner of every sample as text, from their numbers and names."""
    if "owners" not in data:
        return None
    names = np.array(json.loads(data["owner_names"].numpy().tobytes()))
    owners: npt.NDArray[Any] = names[data["owners"].numpy()]
    return owners


# Parquet files of the hub's schema.

_ROWS = 512  # images that are decoded at a time


def _read_parquet(files: Sequence[Path], images: ImageSet) -> dict[str, Tensor]:
    opened = [_open_parquet(path, images) for path in files]
    total = sum(file.metadata.num_rows for file in opened)
    inputs = torch.empty((total, *images.shape), dtype=torch.uint8)
    targets = torch.empty(total, dtype=torch.int64)
    owner = images.owner if all(images.owner in file.schema_arrow.names for file in opened) else None
    owners: list[Any] = []
    pixels, labels, start = inputs.numpy(), targets.numpy(), 0
    workers = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as threads:
        waiting: deque[Future[None]] = deque()  # a bounded queue: few encoded images are in memory at a time
        for path, row, batch in _batches(files, opened, images, owner):
            end = start + batch.num_rows
            labels[start:end] = _labels(batch, path, row, images)
            encoded = batch.column(images.image).flatten()[0].to_pylist()
            waiting.append(threads.submit(_decode, encoded, pixels[start:end], f"{path}, row", row))
            if owner is not None:
                owners.append(_texts(batch, owner, path))
            if len(waiting) > 2 * workers:
                waiting.popleft().result()
            start = end
        for job in waiting:
            job.result()
    return {"inputs": inputs, "targets": targets} | (_numbered(owners) if owner is not None else {})


def _open_parquet(path: Path, images: ImageSet) -> Any:
    """The file, if it has the columns of the data set."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(_damaged(path, "a parquet file", error)) from error
    schema = file.schema_arrow
    wanted = [images.image, images.label] + ([images.owner] if images.owner and images.owner_needed else [])
    absent = [name for name in wanted if name not in schema.names]
    if absent:
        raise DataError(
            f"{path} has the columns {', '.join(schema.names)}; {images.source.name} needs {', '.join(wanted)}. "
            "Is it a file of another data set?"
        )
    image, label = schema.field(images.image).type, schema.field(images.label).type
    if not (pa.types.is_struct(image) and image.get_field_index("bytes") >= 0):
        raise DataError(f"{path}: column {images.image} is {image}; wanted: a struct with the image file as 'bytes'")
    if not pa.types.is_integer(label):
        raise DataError(f"{path}: column {images.label} is {label}; wanted: whole numbers 0..{images.classes - 1}")
    if file.metadata.num_rows == 0:
        raise DataError(f"{path} has no rows")
    _check_class_names(path, schema.metadata or {}, images)
    return file


def _check_class_names(path: Path, metadata: Mapping[bytes, bytes], images: ImageSet) -> None:
    """Digits are not clothes: the hub's files name their classes, and most of the names must be ours."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][images.label]["names"]
        given = [_letters(str(name)) for name in names]
    except (KeyError, TypeError, ValueError):  # a file that does not say
        return
    ours = [_letters(name) for name in images.class_names]
    same = sum(a == b for a, b in zip(given, ours, strict=False))
    if 2 * same < max(len(given), len(ours)):
        raise DataError(
            f"{path} says that its classes are {_some(names)}; those of {images.source.name} are "
            f"{_some(images.class_names)}. Is it a file of another data set?"
        )


def _letters(name: str) -> str:
    return "".join(c for c in name if c.isalnum())


def _some(names: Sequence[Any]) -> str:
    return ", ".join(str(name) for name in names[:4]) + (", ..." if len(names) > 4 else "")


def _batches(
    files: Sequence[Path], opened: Sequence[Any], images: ImageSet, owner: str | None
) -> Iterator[tuple[Path, int, Any]]:
    """Every file in pieces: its path, the number of the first row, the rows."""
    columns = [f"{images.image}.bytes", images.label] + ([owner] if owner is not None else [])
    for path, file in zip(files, opened, strict=True):
        row = 0
        try:
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                yield path, row, batch
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(_damaged(path, "a parquet file", error)) from error


def _labels(batch: Any, path: Path, row: int, images: ImageSet) -> Labels:
    column = batch.column(images.label)
    if column.null_count:
        raise DataError(f"{path} has rows without a {images.label}")
    labels: Labels = column.to_numpy(zero_copy_only=False).astype(np.int64)
    _check_labels(labels, f"{path}, row", row, images)
    return labels


def _check_labels(labels: Labels, where: str, first: int, images: ImageSet) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= images.classes))
    if len(bad):
        raise DataError(
            f"{where} {first + bad[0]}: the label is {labels[bad[0]]}; "
            f"{images.source.name} has the labels 0..{images.classes - 1}"
        )


def _texts(batch: Any, name: str, path: Path) -> Any:
    column = batch.column(name)
    if column.null_count:
        raise DataError(f"{path} has rows without a {name}")
    return column.cast(pa.string())


def _numbered(owners: Sequence[Any]) -> dict[str, Tensor]:
    """Names as numbers and a list of the distinct ones, which tensors can hold."""
    coded = pa.chunked_array(owners).combine_chunks().dictionary_encode()
    names = json.dumps(coded.dictionary.to_pylist()).encode()
    return {
        "owners": torch.from_numpy(coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)),
        "owner_names": torch.tensor(list(names), dtype=torch.uint8),
    }


def _decode(encoded: Sequence[bytes | None], pixels: Bytes, where: str, first: int) -> None:
    """Image files into an array (n, channels, height, width) of bytes."""
    channels, height, width = pixels.shape[1:]
    mode = "L" if channels == 1 else "RGB"
    for i, data in enumerate(encoded):
        if data is None:
            raise DataError(f"{where} {first + i}: there is no image")
        try:
            with Image.open(io.BytesIO(data), formats=("PNG", "WEBP", "JPEG")) as opened:
                size = opened.size
                if size == (width, height):  # an image of any other size is not even decoded
                    image = opened if opened.mode == mode else opened.convert(mode)
                    pixels[i] = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)
        except Exception as error:  # pillow's decoders raise whatever they stumble over
            raise DataError(f"{where} {first + i}: the image cannot be decoded ({error}); fetch it again") from error
        if size != (width, height):
            raise DataError(f"{where} {first + i}: the image is {size[0]} x {size[1]}; wanted: {width} x {height}")


def _damaged(path: Path, what: str, error: Exception) -> str:
    return f"{path} cannot be read as {what}; it is damaged or was copied in part, fetch it again ({error})"


# The official archives.

_LARGEST = 2**29  # bytes of a member; the largest real one has 155 million


def _read_archive(path: Path, members: Sequence[str], images: ImageSet) -> dict[str, Tensor]:
    """The members in the given order, in whichever order the archive has them."""
    read = _read_records if path.name.endswith("-binary.tar.gz") else _read_pickle
    parts: dict[str, tuple[Bytes, Labels]] = {}
    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = _member_name(path, member)
                if name not in members:
                    continue
                content = archive.extractfile(member) if member.isreg() and member.size <= _LARGEST else None
                if content is None or name in parts:
                    raise DataError(f"{path}: {member.name} is not one plain file of at most {_LARGEST} bytes")
                parts[name] = read(content, f"{path}, {name}", images)
                _check_labels(parts[name][1], f"{path}, {name}, record", 0, images)
            while stream.read(2**20):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(_damaged(path, "a gzipped tar archive", error)) from error
    absent = [name for name in members if name not in parts]
    if absent:
        raise DataError(f"{path} lacks {', '.join(absent)}; fetch the official {path.name} again")
    return _joined([parts.pop(name) for name in members], images)


def _joined(parts: list[tuple[Bytes, Labels]], images: ImageSet) -> dict[str, Tensor]:
    """One after the other in one tensor; each part is forgotten once it is copied."""
    targets = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    inputs = torch.empty((len(targets), *images.shape), dtype=torch.uint8)
    pixels, start = inputs.numpy(), 0
    while parts:
        part, _ = parts.pop(0)
        pixels[start : start + len(part)] = part.reshape(-1, *images.shape)
        start += len(part)
    return {"inputs": inputs, "targets": targets}


def _member_name(path: Path, member: tarfile.TarInfo) -> str:
    """A member's name without its folder; one that points out of the archive is refused, though nothing is unpacked."""
    name = PurePosixPath(member.name.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or ":" in member.name:
        raise DataError(f"{path} holds {member.name!r}, a path out of the archive: this is not the official archive")
    return name.name


def _read_records(content: IO[bytes], where: str, images: ImageSet) -> tuple[Bytes, Labels]:
    """The binary form: label bytes (CIFAR-100: coarse, fine), then the pixels, channel by channel."""
    raw = np.frombuffer(content.read(), dtype=np.uint8)
    length = images.label_bytes + prod(images.shape)
    if len(raw) == 0 or len(raw) % length:
        raise DataError(f"{where} has {len(raw)} bytes; wanted: a multiple of {length}. Fetch the archive again")
    records = raw.reshape(-1, length)
    return records[:, images.label_bytes :], records[:, images.label_bytes - 1].astype(np.int64)


def _read_pickle(content: IO[bytes], where: str, images: ImageSet) -> tuple[Bytes, Labels]:
    """The Python form: a pickled dictionary with the pixels as an array and the labels as a list."""
    try:
        made = _ArraysOnly(content, encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in made.items()}
        pixels, labels = fields["data"].value, fields[images.pickled_label]
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{where} is not a batch of the official archive ({reason}); fetch it again") from error
    if pixels.shape != (len(labels), prod(images.shape)) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{where} has pixels of shape {pixels.shape} and {len(labels)} labels; wanted: one row of "
            f"{prod(images.shape)} bytes and one whole number per image"
        )
    return pixels, np.array(labels, dtype=np.int64)


class _Array:
    """What a pickled array of bytes is read into."""

    __slots__ = ("value",)
    value: Bytes

    def __setstate__(self, state: tuple[int, tuple[int, ...], str, bool, bytes]) -> None:
        _, shape, dtype, fortran, data = state
        if dtype != "u1" or not isinstance(data, bytes):
            raise DataError(f"an array of {dtype!r} is in the place of bytes")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype(str):
    """The name of an array's type; what else a pickle says about it does not matter for bytes."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _ArraysOnly(pickle.Unpickler):
    """Reads plain values and arrays of bytes. Whatever else a pickle asks for is refused, and never imported.

    The few names that a pickled numpy array needs lead to methods of this class, not to numpy's.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a global name."""
        allowed = {
            "numpy.core.multiarray._reconstruct": self._reconstruct,
            "numpy._core.multiarray._reconstruct": self._reconstruct,
            "numpy.ndarray": "ndarray",
            "numpy.dtype": self._dtype,
            "_codecs.encode": self._encode,
        }
        wanted = f"{module}.{name}"
        if wanted not in allowed:
            raise DataError(f"the pickle asks for {wanted}; only arrays are read: this is not the official archive")
        return allowed[wanted]

    def _reconstruct(self, *_: object) -> _Array:
        return _Array()

    def _dtype(self, name: bytes | str, *_: object) -> _Dtype:
        return _Dtype(name.decode("ascii") if isinstance(name, bytes) else name)

    def _encode(self, text: str, encoding: bytes | str) -> bytes:
        """How Python 3 writes bytes into old pickles."""
        if encoding not in ("latin1", b"latin1"):
            raise DataError(f"the pickle asks for the encoding {encoding!r}; allowed: latin1")
        return text.encode("latin1")
