"""Images: CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST and FEMNIST (paper, section 5; facts, section 5).

A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Y. LeCun, C. Cortes, C. Burges, The
MNIST database, 1998. H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST, 2017. S. Caldas and others, LEAF, 2018.

Training and test files are pooled, the training files first (60,000 of MNIST's and Fashion-MNIST's 70,000
samples, 50,000 of CIFAR's 60,000); the paper cuts the pool into clients and holds out a share of each. Pixels
stay bytes: they are decoded once, cached (:func:`fedfac.data.files.cached`) and normalised batch by batch.

The files are the hub's parquet files, the official CIFAR archives, or LEAF's JSON (FEMNIST). Nothing in an archive
is unpacked to disk, and the pickles of the Python archives are read without running anything they ask for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfac.data.archives import read_archive
from fedfac.data.files import Source, cached, find
from fedfac.data.image_parquet import read_parquet
from fedfac.data.images import FlipAndCrop, ImageSet, Normalise, flip_and_crop
from fedfac.data.leaf import read_images as read_leaf
from fedfac.data.pool import ArrayPool
from fedfac.data.samples import Samples

__all__ = [
    "FlipAndCrop",
    "ImageSet",
    "Normalise",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "femnist",
    "flip_and_crop",
    "load",
    "mnist",
]

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
    source=_source(
        "femnist", "flwrlabs/femnist", "df739a2b09df2b5cc1ec93107659b9a9a8566487", "data", ("train",), ("*.json",)
    ),
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
    if members is not None:
        data = read_archive(files[0], members, images)
    elif files[0].suffix == ".json":
        data = read_leaf(files, images)
    else:
        data = read_parquet(files, images)
    digest = ArrayPool(data["inputs"], data["targets"]).fingerprint()
    return data | {"fingerprint": torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)}


def _owners(data: Mapping[str, Tensor]) -> npt.NDArray[Any] | None:
    """The owner of every sample as text, from their numbers and names."""
    if "owners" not in data:
        return None
    names = np.array(json.loads(data["owner_names"].numpy().tobytes()))
    owners: npt.NDArray[Any] = names[data["owners"].numpy()]
    return owners
