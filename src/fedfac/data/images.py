"""What the image data sets have in common: their description, normalisation and augmentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedfac.data.files import Source
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


def check_labels(labels: Labels, where: str, first: int, images: ImageSet) -> None:
    """Fail with the first label that the data set does not have."""
    bad = np.flatnonzero((labels < 0) | (labels >= images.classes))
    if len(bad):
        raise DataError(
            f"{where} {first + bad[0]}: the label is {labels[bad[0]]}; "
            f"{images.source.name} has the labels 0..{images.classes - 1}"
        )


def damaged(path: Path, what: str, error: Exception) -> str:
    """What to say of a file that cannot be read."""
    return f"{path} cannot be read as {what}; it is damaged or was copied in part, fetch it again ({error})"
