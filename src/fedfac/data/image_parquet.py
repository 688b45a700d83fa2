"""Images in parquet files of the hub's schema: decoded row group by row group into one tensor of bytes."""

from __future__ import annotations

import io
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from fedfac.data.bounded import is_bytes, is_text
from fedfac.data.images import Bytes, ImageSet, Labels, check_labels, damaged
from fedfac.errors import DataError
from fedfac.limits import NAME, check_unpacked

_ROWS = 512  # images that are decoded at a time
_BATCH_BYTES = 2**29


def read_parquet(files: Sequence[Path], images: ImageSet) -> dict[str, Tensor]:
    """Inputs, targets and, where there are any, owners of all rows."""
    opened = [_open_parquet(path, images) for path in files]
    total = sum(file.metadata.num_rows for file in opened)
    stored = sum(path.stat().st_size for path in files)
    check_unpacked(total * prod(images.shape), stored, f"{files[0].parent}: {total} images")
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
            if end > total:
                raise DataError(f"{path} has more rows than it says; it is damaged, fetch it again")
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
    if start != total:
        raise DataError(f"{files[0].parent} has {start} images and says {total}; a file is damaged, fetch it again")
    return {"inputs": inputs, "targets": targets} | (_numbered(owners) if owner is not None else {})


def _open_parquet(path: Path, images: ImageSet) -> Any:
    """The file, if it has the columns of the data set."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(damaged(path, "a parquet file", error)) from error
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
    names = [field.name for field in image]
    if not is_bytes(image.field(names.index("bytes")).type):
        raise DataError(f"{path}: column {images.image} has 'bytes' that are none; wanted: the image file as bytes")
    if not pa.types.is_integer(label):
        raise DataError(f"{path}: column {images.label} is {label}; wanted: whole numbers 0..{images.classes - 1}")
    if file.metadata.num_rows == 0:
        raise DataError(f"{path} has no rows")
    _check_class_names(path, schema.metadata or {}, images)
    return file


def _rows_at_a_time(file: Any) -> int:
    """So many rows that a batch is small even if each of them is the largest image that a row group can hold."""
    groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
    return int(max(1, min(_ROWS, _BATCH_BYTES // max(1, *groups))))


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
            for batch in file.iter_batches(batch_size=_rows_at_a_time(file), columns=columns):
                yield path, row, batch
                row += batch.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(damaged(path, "a parquet file", error)) from error


def _labels(batch: Any, path: Path, row: int, images: ImageSet) -> Labels:
    column = batch.column(images.label)
    if column.null_count:
        raise DataError(f"{path} has rows without a {images.label}")
    labels: Labels = column.to_numpy(zero_copy_only=False).astype(np.int64)
    check_labels(labels, f"{path}, row", row, images)
    return labels


def _texts(batch: Any, name: str, path: Path) -> Any:
    column = batch.column(name)
    if column.null_count:
        raise DataError(f"{path} has rows without a {name}")
    if is_text(column.type):
        longest = pc.max(pc.utf8_length(column)).as_py() or 0
        if longest > NAME:
            raise DataError(f"{path} has a {name} of {longest} characters; allowed: {NAME}")
    try:
        return column.cast(pa.string())
    except pa.ArrowException as error:
        raise DataError(f"{path}: the column {name} is of type {column.type}; wanted: text or whole numbers") from error


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
