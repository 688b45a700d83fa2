"""Data in other people's containers: Hugging Face ``datasets`` and ``flwr-datasets``.

Neither package is imported: whatever has the same few methods will do.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from fedfac.data import folders
from fedfac.data.federation import Federation
from fedfac.data.pool import ArrayPool, ClientArrays, Prepare
from fedfac.data.samples import Samples
from fedfac.errors import ConfigError, DataError, did_you_mean


class Table(Protocol):
    """What a Hugging Face ``Dataset`` and its likes can do: a row by its number, a column by its name."""

    @property
    def column_names(self) -> Any:
        """The names of the columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any: ...


class Partitioner(Protocol):
    """What a partitioner of ``flwr-datasets`` can do."""

    @property
    def num_partitions(self) -> int:
        """How many there are."""

    def load_partition(self, partition_id: int) -> Any:
        """One of them, as a dataset."""


def from_hf(
    dataset: Table, *, label: str, inputs: str | Sequence[str] | None = None, client: str | None = None
) -> Samples:
    """The samples of a Hugging Face dataset (one split of it).

    ``inputs`` is one column or several; without it, all but the label and the client. One column may hold
    images (PIL, encoded bytes, or uint8 arrays; the model gets -1 to 1), arrays or lists of one shape (lists of
    integers stay integers, as the ids of tokens; other numbers become float32, as they are). Several columns
    must be plain numbers. Labels: the classes that the dataset's ``features`` declare, or else the integers or
    texts that occur, in sorted order; real numbers are regression targets. ``client`` is the column that says
    whose row it is.
    """
    _check_table(dataset, "the dataset")
    x, prepare = _inputs(dataset, _input_names(dataset, label, inputs, client))
    codes = _Labels([_column(dataset, label)], _declared(dataset, label), label)
    pool = ArrayPool(x, codes.targets[0], prepare)
    pool.check(codes.classes)
    return Samples(
        name=str(getattr(getattr(dataset, "info", None), "dataset_name", None) or "dataset"),
        pool=pool,
        fingerprint=pool.fingerprint(),
        labels=None if codes.classes is None else pool.targets.numpy(),
        classes=codes.classes,
        owners=None if client is None else _owners(dataset, client),
        class_names=codes.names,
    )


def from_partitioner(
    partitioner: Partitioner,
    n: int | None = None,
    *,
    label: str,
    inputs: str | Sequence[str] | None = None,
    test_share: float = 0.2,
    validation_share: float = 0.0,
    seed: int = 0,
) -> Federation:
    """A federation of the first ``n`` partitions (all, if None) that a ``flwr-datasets`` partitioner makes.

    Columns are read as by :func:`from_hf`; of each partition ``test_share`` is held out. A partitioner by
    natural ids gives its clients their names.
    """
    count = _count(partitioner, n)
    names = _client_names(partitioner, count)
    arrays: list[Tensor] = []
    labels: list[npt.NDArray[Any]] = []
    prepare: Prepare | None = None
    declared: tuple[str, ...] | None = None
    for i in range(count):
        part = _partition(partitioner, i)
        _check_table(part, f"partition {i}")
        x, prepare = _inputs(part, _input_names(part, label, inputs, None))
        arrays.append(x)
        labels.append(_column(part, label))
        declared = _declared(part, label)
    codes = _Labels(labels, declared, label)
    clients: dict[str, ClientArrays] = dict(zip(names, zip(arrays, codes.targets, strict=True), strict=True))
    return Federation.from_arrays(
        clients,
        test_share=test_share,
        validation_share=validation_share,
        classes=codes.classes,
        prepare=prepare,
        seed=seed,
    )


def _partition(partitioner: Partitioner, number: int) -> Any:
    try:
        return partitioner.load_partition(number)
    except AttributeError as error:
        raise DataError(_unready(partitioner, error)) from error


def _unready(partitioner: Partitioner, error: AttributeError) -> str:
    return (
        f"a {type(partitioner).__name__} is no partitioner that is ready: {error}. Wanted: num_partitions and "
        "load_partition(i); one of flwr-datasets needs its dataset first, partitioner.dataset = dataset"
    )


def _count(partitioner: Partitioner, n: int | None) -> int:
    try:
        available = int(partitioner.num_partitions)
    except AttributeError as error:
        raise DataError(_unready(partitioner, error)) from error
    if n is not None and not 1 <= n <= available:
        raise ConfigError(f"{n} partitions were asked for; the partitioner has {available}")
    return available if n is None else n


def _client_names(partitioner: Partitioner, count: int) -> list[str]:
    """Natural ids, where the partitioner knows them, or numbers."""
    ids = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    names = [str(ids.get(i, i)) for i in range(count)]
    return names if len(set(names)) == count else [str(i) for i in range(count)]


# ---------------------------------------------------------------- columns


def _check_table(dataset: Any, where: str) -> None:
    if isinstance(dataset, Mapping):
        raise DataError(f"{where} is a collection of {sorted(dataset)}: give one of them, for example dataset['train']")
    missing = [name for name in ("column_names", "__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"{where} is a {type(dataset).__name__} without {', '.join(missing)}; wanted: a map-style dataset "
            "with named columns, such as a Hugging Face Dataset that is not streamed"
        )
    if len(dataset) == 0:
        raise DataError(f"{where} has no rows; its columns are {list(dataset.column_names)}")


def _input_names(dataset: Table, label: str, inputs: str | Sequence[str] | None, client: str | None) -> list[str]:
    known = list(dataset.column_names)
    asked = [inputs] if isinstance(inputs, str) else list(inputs or [])
    for name in [label, *asked, *([] if client is None else [client])]:
        if name not in known:
            raise DataError(f"the dataset has no column {name!r}. {did_you_mean(name, known)}")
    if label in asked:
        raise ConfigError(f"column {label!r} is the label; it cannot be an input as well")
    names = asked or [name for name in known if name not in (label, client)]
    if not names:
        raise DataError(f"the dataset has no input columns beside {known}")
    return names


def _inputs(dataset: Table, names: Sequence[str]) -> tuple[Tensor, Prepare | None]:
    """Inputs of every row, and what turns them into numbers."""
    if len(names) == 1 and _is_image(dataset[0][names[0]]):
        return _images(dataset, names[0]), folders.from_bytes
    columns = [_numbers(dataset, name) for name in names]
    if len(names) > 1 or columns[0].ndim == 1:
        for name, column in zip(names, columns, strict=True):
            if column.ndim != 1:
                raise DataError(
                    f"column {name!r} holds arrays of shape {column.shape[1:]} and is one of {len(names)} inputs "
                    f"({', '.join(names)}): name the one column to learn from"
                )
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32)), None
    (values,) = columns
    tokens = values.ndim == 2 and values.dtype.kind in "iu"
    return torch.from_numpy(values.astype(np.int64 if tokens else np.float32)), None


def _is_image(value: Any) -> bool:
    if isinstance(value, np.ndarray | Tensor):
        colours = value.shape[0 if isinstance(value, Tensor) else -1] if value.ndim == 3 else 1
        return value.dtype in (np.uint8, torch.uint8) and value.ndim in (2, 3) and colours in (1, 3)
    return isinstance(value, Image.Image) or (isinstance(value, Mapping) and {"bytes", "path"} & value.keys() != set())


def _images(dataset: Table, name: str) -> Tensor:
    """(n, channels, height, width) bytes; RGB if any image is."""
    images = [_pixels(dataset[i][name], f"row {i}, column {name!r}") for i in range(len(dataset))]
    for i, image in enumerate(images):
        if image.shape[:2] != images[0].shape[:2]:
            raise DataError(
                f"row {i}, column {name!r} has {image.shape[1]} × {image.shape[0]} pixels and row 0 "
                f"{images[0].shape[1]} × {images[0].shape[0]}: bring them to one size first (dataset.map)"
            )
    channels = 3 if any(image.ndim == 3 for image in images) else 1
    return torch.stack([folders.channels_first(image, channels) for image in images])


def _pixels(value: Any, where: str) -> folders.Pixels:
    if isinstance(value, Image.Image):
        return folders.pixels(value, where)
    if _is_image(value) and isinstance(value, np.ndarray | Tensor):
        array = _array(value.movedim(0, -1) if isinstance(value, Tensor) and value.ndim == 3 else value)
        return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is of type {type(value).__name__}; wanted: an image, as in row 0")
    data = value.get("bytes")
    file = io.BytesIO(data) if data is not None else value.get("path")
    if file is None:
        raise DataError(f"{where} has neither bytes nor a path; wanted: an image")
    with folders.opened(file, where) as image:
        return folders.pixels(image, where)


def _array(values: Any) -> npt.NDArray[Any]:
    """A copy of an array, a tensor, or a list of them."""
    if isinstance(values, list) and values and isinstance(values[0], Tensor):
        values = torch.stack(values)
    return np.array(values.numpy(force=True) if isinstance(values, Tensor) else values)


def _column(dataset: Table, name: str) -> npt.NDArray[Any]:
    """A column as one array; rows must have one shape."""
    values = dataset[name]
    try:
        array = _array(values if isinstance(values, np.ndarray | Tensor) else list(values))
    except (ValueError, RuntimeError) as error:
        raise DataError(f"column {name!r} has rows of different shapes: pad or cut them to one length") from error
    if array.dtype.kind == "O":
        empty = sum(value is None for value in values)
        what = f"{empty} missing values" if empty else f"values such as {values[0]!r:.60}"
        raise DataError(f"column {name!r} has {what}; wanted: numbers or text in every row")
    return array


def _numbers(dataset: Table, name: str) -> npt.NDArray[Any]:
    values = _column(dataset, name)
    if values.dtype.kind not in "biuf":
        raise DataError(f"column {name!r} holds {_show(values)}; wanted: numbers or images. Name the inputs to use")
    return values


def _owners(dataset: Table, client: str) -> npt.NDArray[Any]:
    values = _column(dataset, client)
    if values.ndim != 1 or values.dtype.kind not in "biuU":
        raise DataError(f"client column {client!r} holds {_show(values)}; wanted: text or integers")
    return values.astype(str)


def _show(values: npt.NDArray[Any]) -> str:
    return repr(values[0].tolist())[:60]


def _declared(dataset: Table, label: str) -> tuple[str, ...] | None:
    """The class names that a ``ClassLabel`` feature declares."""
    features = getattr(dataset, "features", None)
    names = getattr(features.get(label), "names", None) if isinstance(features, Mapping) else None
    return tuple(str(name) for name in names) if names else None


class _Labels:
    """Targets of several tables that share their classes."""

    def __init__(self, columns: Sequence[npt.NDArray[Any]], declared: tuple[str, ...] | None, label: str) -> None:
        kinds = {column.dtype.kind for column in columns}
        self.classes: int | None = None
        self.names: tuple[str, ...] | None = None
        if kinds == {"f"}:
            self.targets = [torch.from_numpy(_upright(column).astype(np.float32)) for column in columns]
            return
        if len({kind in "U" for kind in kinds}) != 1 or not kinds <= set("biuU") or any(c.ndim != 1 for c in columns):
            raise DataError(
                f"label {label!r} holds {_show(columns[0])}; wanted: one integer, text or real number a row"
            )
        everything = np.concatenate(columns)
        if declared is None or kinds == {"U"}:
            found, codes = np.unique(everything, return_inverse=True)
            self.names = tuple(str(name) for name in found)
        else:
            codes = _check_declared(everything.astype(np.int64), declared, label)
            self.names = declared
        self.classes = len(self.names)
        ends = np.cumsum([len(column) for column in columns])[:-1]
        self.targets = [torch.from_numpy(part.copy()) for part in np.split(codes.astype(np.int64), ends)]


def _check_declared(codes: npt.NDArray[np.int64], declared: Sequence[str], label: str) -> npt.NDArray[np.int64]:
    wrong = np.flatnonzero((codes < 0) | (codes >= len(declared)))
    if len(wrong):
        raise DataError(
            f"label {label!r} is {codes[wrong[0]]} in row {wrong[0]} and out of range in {len(wrong)} rows; "
            f"the dataset declares {len(declared)} classes, 0..{len(declared) - 1} (-1 stands for an unknown label)"
        )
    return codes


def _upright(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column[:, None] if column.ndim == 1 else column
