"""Images in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import message
from PIL import Image

from fedfac.data.folders import image_folder
from fedfac.errors import ConfigError, DataError


def grey(seed: int, size: tuple[int, int] = (6, 5)) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def colour(seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def save(path: Path, pixels: npt.NDArray[np.uint8], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def test_a_class_is_a_folder(tmp_path: Path) -> None:
    save(tmp_path / "dog" / "1.png", grey(1))
    save(tmp_path / "cat" / "b.PNG", grey(2))
    save(tmp_path / "cat" / "a.bmp", grey(3))
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.png").write_text("not looked at")
    samples = image_folder(tmp_path)
    assert samples.pool.inputs.dtype == torch.uint8  # type: ignore[attr-defined]
    x, y = samples.pool.batch(torch.arange(3))
    wanted = np.stack([grey(3), grey(2), grey(1)])[:, None].astype(np.float32) / 127.5 - 1
    assert np.allclose(x.numpy(), wanted, atol=1e-6)
    assert y.tolist() == [0, 0, 1]
    assert samples.labels is not None
    assert samples.labels.tolist() == [0, 0, 1]
    assert (samples.classes, samples.class_names, samples.owners) == (2, ("cat", "dog"), None)
    assert samples.name == tmp_path.name


def test_a_client_is_a_folder_above(tmp_path: Path) -> None:
    save(tmp_path / "anna" / "cat" / "1.png", colour(1))
    save(tmp_path / "bert" / "dog" / "1.webp", colour(2), lossless=True)
    save(tmp_path / "bert" / "cat" / "1.png", grey(3))
    samples = image_folder(tmp_path)
    assert samples.owners is not None
    assert samples.owners.tolist() == ["anna", "bert", "bert"]
    inputs = samples.pool.inputs  # type: ignore[attr-defined]
    assert np.array_equal(inputs[0].permute(1, 2, 0), colour(1))
    assert np.array_equal(inputs[1], np.stack([grey(3)] * 3)), "grey among coloured images"
    assert np.array_equal(inputs[2].permute(1, 2, 0), colour(2))
    assert samples.pool.batch(torch.arange(3))[1].tolist() == [0, 0, 1]


def test_sizes(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", grey(1, (4, 8)))
    save(tmp_path / "a" / "2.png", np.full((9, 9), 7, dtype=np.uint8))
    as_first = image_folder(tmp_path).pool.inputs  # type: ignore[attr-defined]
    assert as_first.shape == (2, 1, 4, 8)
    assert (as_first[1] == 7).all()
    assert image_folder(tmp_path, size=3).pool.inputs.shape == (2, 1, 3, 3)  # type: ignore[attr-defined]
    assert "images of 0 pixels" in message(ConfigError, lambda: image_folder(tmp_path, size=0))


def test_palettes_transparency_and_turned_photographs(tmp_path: Path) -> None:
    red = np.zeros((2, 3, 4), dtype=np.uint8)
    red[..., [0, 3]] = 255
    save(tmp_path / "a" / "1.png", red)
    Image.fromarray(red).quantize(4).save(tmp_path / "a" / "2.png", transparency=b"\x00\xff")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = np.zeros((3, 2, 3), dtype=np.uint8)
    turned[..., 0] = 255
    save(tmp_path / "a" / "3.png", turned, exif=exif)
    inputs = image_folder(tmp_path).pool.inputs  # type: ignore[attr-defined]
    assert inputs.shape == (3, 3, 2, 3)
    assert inputs[:, 0].min() == 255
    assert inputs[:, 1:].max() == 0


def test_no_images(tmp_path: Path) -> None:
    assert "there is no folder" in message(DataError, lambda: image_folder(tmp_path / "no"))
    said = message(DataError, lambda: image_folder(tmp_path))
    assert "has no images (.png, .jpg" in said
    assert "/<client>/<class>/<image>" in said


@pytest.mark.parametrize("other", ["3.png", "anna/cat/3.png", "x/y/z/3.png"])
def test_mixed_depth(tmp_path: Path, other: str) -> None:
    save(tmp_path / "cat" / "1.png", grey(1))
    save(tmp_path / other, grey(2))
    said = message(DataError, lambda: image_folder(tmp_path))
    assert "folders deep" in said
    assert "3.png" in said


@pytest.mark.parametrize(("name", "cut"), [("b.png", 60), ("b.jpg", 200), ("b.webp", 30), ("b.bmp", 70), ("b.png", 0)])
def test_a_damaged_image_is_named(tmp_path: Path, name: str, cut: int) -> None:
    save(tmp_path / "cat" / "a.png", colour(1))
    save(tmp_path / "cat" / name, colour(2))
    path = tmp_path / "cat" / name
    path.write_bytes(path.read_bytes()[:cut])
    said = message(DataError, lambda: image_folder(tmp_path))
    assert f"{path} is not an image that can be read" in said


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.full((4, 4), 60000, dtype=np.uint16)).save(tmp_path / "cat" / "deep.png")
    said = message(DataError, lambda: image_folder(tmp_path))
    assert "deep.png has pixels of type 'I;16'; allowed: 8 bits a colour" in said
