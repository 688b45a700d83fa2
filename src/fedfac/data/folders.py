"""Images in folders: ``path/<class>/*.png``, or ``path/<client>/<class>/*.png`` where every client has its own."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedfac.data.pool import ArrayPool
from fedfac.data.samples import Samples, class_order
from fedfac.errors import ConfigError, DataError
from fedfac.limits import PIXELS, check_memory

Pixels = npt.NDArray[np.uint8]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_GRAY = ("1", "L", "LA")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")  # no format that runs programs
_DEEP = ("I", "F")  # and their variants: I;16, F;32F, ...
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, IndexError),  # what decoders say of damage
    *(struct.error, AttributeError, RuntimeError, OverflowError, MemoryError, zlib.error),
    *(Image.DecompressionBombError, Image.DecompressionBombWarning),
)


def image_folder(path: str | Path, *, size: int | None = None, classes: Sequence[str] | None = None) -> Samples:
    """The images below a folder; a folder's name is the class, and the one above it, if there is one, the client.

    Grey if all images are, otherwise RGB. Every image is resized to ``size`` × ``size``, or else to the size of
    the first one. Held as bytes; the model gets numbers from -1 to 1. ``classes`` names all classes in order, of which
    some may have no folder here; by default those that are here, sorted.
    """
    root = Path(path)
    if size is not None and size < 1:
        raise ConfigError(f"images of {size} pixels cannot be made; allowed: 1 or more")
    files = _images(root)
    names = _names(root, files)
    order = class_order(sorted({name[-1] for name in names}), classes, str(root))
    places = {name: number for number, name in enumerate(order)}
    targets = torch.tensor([places[name[-1]] for name in names])
    pool = ArrayPool(_pixels(files, size), targets, from_bytes)
    return Samples(
        name=root.resolve().name,
        pool=pool,
        fingerprint=pool.fingerprint(),
        labels=targets.numpy(),
        classes=len(order),
        owners=np.array([name[0] for name in names]) if len(names[0]) == 2 else None,
        class_names=order,
    )


def from_bytes(batch: Tensor) -> Tensor:
    """Bytes 0..255 to numbers from -1 to 1.

    >>> from_bytes(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    [-1.0, 1.0]
    """
    return batch.float().div_(127.5).sub_(1)


def _images(root: Path) -> list[Path]:
    """Every image below the folder, in order; what begins with a dot is not looked at."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    found = [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(part.startswith((".", "__MACOSX")) for part in path.relative_to(root).parts)
    ]
    if not found:
        raise DataError(
            f"{root} has no images ({', '.join(SUFFIXES)}); wanted: {root.name}/<class>/<image> "
            f"or {root.name}/<client>/<class>/<image>"
        )
    return found


def _names(root: Path, files: Sequence[Path]) -> list[tuple[str, ...]]:
    """(class,) or (client, class) of every image."""
    names = [path.relative_to(root).parts[:-1] for path in files]
    for path, name in zip(files, names, strict=True):
        if len(name) not in (1, 2) or len(name) != len(names[0]):
            raise DataError(
                f"{path} lies {len(name)} folders deep and {files[0]} {len(names[0])}; wanted: all images one deep "
                f"({root.name}/<class>/<image>) or all two deep ({root.name}/<client>/<class>/<image>)"
            )
    return names


def _pixels(files: Sequence[Path], size: int | None) -> Tensor:
    """All images as one tensor (n, channels, height, width) of bytes."""
    grey = all(_is_grey(path) for path in files)
    with opened(files[0]) as first:
        height, width = (size, size) if size else pixels(first, str(files[0])).shape[:2]
    channels = 1 if grey else 3
    check_memory(len(files) * channels * height * width, f"{len(files)} images of {width} × {height} pixels")
    images = torch.empty(len(files), channels, height, width, dtype=torch.uint8)
    for i, path in enumerate(files):
        with opened(path) as image:
            images[i] = channels_first(pixels(image, str(path), (width, height)), channels)
    return images


def _is_grey(path: Path) -> bool:
    with opened(path) as image:
        return image.mode in _GRAY


@contextmanager
def opened(file: Any, where: str = "") -> Iterator[Image.Image]:
    """An image file, or the error that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the bound here is lower, and an error
            image = Image.open(file, formats=FORMATS)
        with image:
            yield image
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(f"{where or file} is not an image that can be read: {error}. Replace or remove it") from error


def pixels(image: Image.Image, where: str, size: tuple[int, int] | None = None) -> Pixels:
    """An image as (height, width) or (height, width, 3) bytes, upright, without transparency."""
    width, height = image.size
    if width * height > PIXELS:
        raise DataError(f"{where} has {width} × {height} pixels; allowed: {PIXELS} in all. Make it smaller first")
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise DataError(f"{where} has several pictures in one file; allowed: one. Take them apart first")
    if image.mode.startswith(_DEEP):
        raise DataError(f"{where} has pixels of type {image.mode!r}; allowed: 8 bits a colour. Convert it first")
    image = ImageOps.exif_transpose(image)
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    image = image.convert("L" if image.mode in _GRAY else "RGB")
    if size is not None and image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    return np.array(image)


def channels_first(image: Pixels, channels: int) -> Tensor:
    """(channels, height, width); a grey image among coloured ones is the same in each channel."""
    tensor = torch.from_numpy(image)
    return tensor.expand(channels, *tensor.shape) if tensor.ndim == 2 else tensor.permute(2, 0, 1)
