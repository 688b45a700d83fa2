"""Tables: the user's own CSV or parquet file, and two data sets with natural clients, heart and HAPT.

What becomes of a column of a table:

- numbers: float32, standardised over all rows of the table (mean 0, standard deviation 1; a column with one
  value only becomes 0). A missing value is filled with the mean of the others, which is 0 after standardising;
  nothing marks it.
- text: one column for each distinct value (at most 100), 1 where it occurs; a missing text is 0 in all of them.
- in a CSV file an empty field, ``?``, ``NA``, ``NaN``, ``null`` and the like are missing.

Means and standard deviations are those of all clients' rows together, test rows included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfac.config import MOST_CLASSES
from fedfac.data.bounded import MOST_COLUMNS, check_text, coded, is_text, npz_arrays, parquet_table, readable
from fedfac.data.files import Source, find
from fedfac.data.pool import ArrayPool
from fedfac.data.samples import Samples, class_order
from fedfac.errors import ConfigError, DataError, did_you_mean
from fedfac.limits import check_memory, check_name
from fedfac.words import printable, quoted

Numbers = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]

DISTINCT = 100
PARQUET = (".parquet", ".pq")
CSV = {".csv": ",", ".tsv": "\t"}


def csv_or_parquet(
    path: str | Path,
    *,
    label: str,
    client: str | None = None,
    drop: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> Samples:
    """The samples in a table: one a row; every column is an input except the label, the client and ``drop``.

    A label of integers, truth values or text gives classes, in sorted order, or in that of ``classes``, which must
    name them all (some may not occur in this file). A label of real numbers (1.0 is one) gives regression targets of
    shape (n, 1). ``client`` names the column that says whose row it is.
    """
    path = Path(path)
    features: list[str] = []

    def wanted(known: Sequence[str]) -> list[str]:
        _check_columns(path, known, label, client, drop)
        features.extend(name for name in known if name not in {label, client, *drop})
        if not features:
            raise DataError(f"{path} has no input columns beside {sorted({label, client or label, *drop})}")
        return [*features, label, *([] if client is None else [client])]

    table = _read(path, wanted)
    check_memory(8 * table.num_rows * len(features), f"{path}, {len(features)} columns")
    made = [_feature(table[name], f"{path}, column {quoted(name)}") for name in features]
    inputs = np.concatenate(made, axis=1)
    targets, names = _targets(table[label], f"{path}, label {quoted(label)}", classes)
    owners = None if client is None else _owners(table[client], f"{path}, client {quoted(client)}")
    return _samples(path.stem, ArrayPool(torch.from_numpy(inputs), targets), names, owners)


def is_table(path: Path) -> bool:
    """Whether a file's name says that it holds a table."""
    return path.suffix.lower() in (*CSV, *PARQUET)


def columns_of(path: str | Path) -> list[str]:
    """The names of a table's columns."""
    return [printable(name) for name in _read(Path(path), lambda known: known).column_names]


def _samples(name: str, pool: ArrayPool, names: tuple[str, ...] | None, owners: npt.NDArray[Any] | None) -> Samples:
    return Samples(
        name=name,
        pool=pool,
        fingerprint=pool.fingerprint(),
        labels=None if names is None else pool.targets.numpy(),
        classes=None if names is None else len(names),
        owners=owners,
        class_names=names,
    )


def _read(path: Path, wanted: Callable[[Sequence[str]], Sequence[str]]) -> Any:
    """The ``wanted`` columns of the file as an arrow table with at least one row."""
    suffix = path.suffix.lower()
    if not path.is_file():
        raise DataError(f"there is no file {path}{_nearby(path)}")
    if not is_table(path):
        raise DataError(f"{path} ends in {suffix!r}; allowed: {', '.join((*CSV, *PARQUET))}")
    with readable(path, "Is it whole, and in every row as many fields as in the first?"):
        if suffix in PARQUET:
            table = parquet_table(path, wanted)
        else:
            whole = _read_csv(path, delimiter=CSV[suffix])
            table = whole.select(list(wanted(whole.column_names)))
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows; its columns are {[printable(name) for name in table.column_names]}")
    return table


def _nearby(path: Path) -> str:
    files = [f.name for f in path.parent.iterdir() if f.is_file()] if path.parent.is_dir() else []
    return f". {did_you_mean(path.name, sorted(files))}" if files else f": the folder {path.parent} has none"


def _read_csv(path: Path, *, delimiter: str = ",", names: Sequence[str] | None = None) -> Any:
    """One block, so that a column's type is found from all of its rows."""
    from pyarrow import csv

    check_text(path)
    with path.open("rb") as file:
        columns = file.readline(2**24).count(delimiter.encode()) + 1
    if columns > MOST_COLUMNS:
        raise DataError(f"{path} has {columns} columns; allowed: {MOST_COLUMNS}")
    size = min(max(path.stat().st_size, 1) + 1, 2**31 - 1)
    missing = csv.ConvertOptions().null_values
    return csv.read_csv(
        path,
        read_options=csv.ReadOptions(block_size=size, column_names=names),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=csv.ConvertOptions(null_values=[*missing, "?"], strings_can_be_null=True),
    )


def _check_columns(path: Path, known: Sequence[str], label: str, client: str | None, drop: Sequence[str]) -> None:
    twice = sorted(name for name, times in Counter(known).items() if times > 1)
    if twice:
        raise DataError(f"{path} has several columns of the name {twice[0]!r}: rename them")
    if isinstance(drop, str):
        raise ConfigError(f"drop is the text {drop!r}; give a list of columns: [{drop!r}]")
    for name in (label, *([] if client is None else [client]), *drop):
        if name not in known:
            raise DataError(f"{path} has no column {name!r}. {did_you_mean(name, known)}{_separated(known)}")
    if label in drop or client in drop or label == client:
        raise ConfigError(f"label {label!r}, client {client!r} and drop {list(drop)} must be different columns")


def _separated(columns: Sequence[str]) -> str:
    """What may be wrong with a table of one column."""
    other = next((c for c in ";\t|" if len(columns) == 1 and c in columns[0]), None)
    return "" if other is None else f" Its columns seem to be separated by {other!r}: write the file with commas."


# ---------------------------------------------------------------- columns


def _plain(column: Any) -> Any:
    """A column as one array; only texts stay numbers of texts."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type) and not is_text(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks()


def _is_real(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_floating(kind) or types.is_decimal(kind))


def _is_counted(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_boolean(kind))


def _feature(column: Any, where: str) -> Features:
    """A column as (n, 1) standardised numbers, or (n, distinct) zeros and ones."""
    column = _plain(column)
    if column.null_count == len(column):
        raise DataError(f"{where} is empty in all {len(column)} rows: leave it out (--drop; in Python drop=)")
    if is_text(column.type):
        return _one_hot(column, where)
    if _is_real(column.type) or _is_counted(column.type):
        return standardise(_numbers(column), where)[:, None]
    raise DataError(f"{where} is of type {column.type}; allowed: numbers, truth values, text. Convert it or drop it")


def _numbers(column: Any) -> Numbers:
    """Numbers, with NaN where one is missing."""
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    values: Numbers = np.array(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
    return values


def standardise(values: Numbers, where: str) -> Features:
    """Mean 0 and standard deviation 1 over all rows; missing values (NaN) are at the mean.

    >>> standardise(np.array([1.0, 3.0, np.nan]), "age").tolist()
    [-1.2247449159622192, 1.2247449159622192, 0.0]
    """
    known = ~np.isnan(values)
    if not known.any():
        raise DataError(f"{where} is empty in all {len(values)} rows: leave it out (--drop; in Python drop=)")
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        raise DataError(f"{where} is infinite in {len(infinite)} rows, the first is row {infinite[0]}: clean it first")
    there = values[known]
    result = np.zeros(len(values), dtype=np.float32)
    if there.min() == there.max():
        return result
    there = there / np.abs(there).max()  # or the squares of large numbers would not be finite
    there -= there.mean()
    result[known] = there / np.sqrt(np.square(there).sum() / len(values))
    return result


def _one_hot(column: Any, where: str) -> Features:
    """One column for each distinct text, in sorted order."""
    names, codes = coded(column, where)
    if len(names) > DISTINCT:
        raise DataError(
            f"{where} has {len(names)} distinct texts; allowed: {DISTINCT}, because each becomes an input. "
            "Leave it out (--drop; in Python drop=), or name it as the client"
        )
    check_memory(4 * len(codes) * len(names), where)
    hot: Features = (codes[:, None] == np.arange(len(names))).astype(np.float32)
    return hot


def _targets(column: Any, where: str, classes: Sequence[str] | None = None) -> tuple[Tensor, tuple[str, ...] | None]:
    """Class numbers and the classes' names; or real targets (n, 1) and None."""
    column = _complete(_plain(column), where)
    if _is_real(column.type):
        values = _numbers(column)
        if not np.isfinite(values).all():
            raise DataError(f"{where} is not a finite number in row {np.flatnonzero(~np.isfinite(values))[0]}")
        return torch.from_numpy(values.astype(np.float32))[:, None], None
    if not (_is_counted(column.type) or is_text(column.type)):
        raise DataError(f"{where} is of type {column.type}; allowed: integers, real numbers, truth values, text")
    names, codes = _distinct(column, where)
    if len(names) > MOST_CLASSES:
        raise DataError(f"{where} has {len(names)} distinct values; allowed: {MOST_CLASSES}. Is it the label?")
    for name in names:
        check_name(name, f"{where}: the class")
    order = class_order(names, classes, where)
    places = {name: number for number, name in enumerate(order)}
    numbers = np.array([places[name] for name in names], dtype=np.int64)
    return torch.from_numpy(numbers[codes]), order


def _owners(column: Any, where: str) -> npt.NDArray[Any]:
    """Whose row it is, as text."""
    column = _complete(_plain(column), where)
    if not (_is_counted(column.type) or is_text(column.type)):
        raise DataError(f"{where} is of type {column.type}; allowed: integers, truth values, text")
    names, codes = _distinct(column, where)
    longest = max(len(check_name(name, f"{where}: the name")) for name in names)
    check_memory(4 * longest * len(codes), where)
    return np.array(names)[codes]


def _distinct(column: Any, where: str) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The distinct values as text, in the order of the values, and the number of each row's."""
    if is_text(column.type):
        texts, numbers = coded(column, where)
        return tuple(texts), numbers
    found, codes = np.unique(column.to_numpy(zero_copy_only=False), return_inverse=True)
    return tuple(str(name) for name in found), codes.astype(np.int64)


def _complete(column: Any, where: str) -> Any:
    """The column, in which no value may be missing."""
    if column.null_count:
        first = column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise DataError(
            f"{where} is missing in {column.null_count} of {len(column)} rows, the first is row {first}: "
            "fill them or leave these rows out"
        )
    return column


# ---------------------------------------------------------------- heart

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART_FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
HEART = Source(
    name="heart",
    repo=None,
    revision=None,
    files=tuple(f"processed.{hospital}.data" for hospital in HOSPITALS),
    patterns=("processed.*.data",),
)


def heart(*, data_dir: Path | None = None) -> Samples:
    """Heart disease at four hospitals (Detrano et al. 1989, UCI): 13 numbers, disease or not.

    ``?`` is a missing value; zeros are taken as they are, also where (cholesterol in Switzerland) they can only
    mean that nobody measured.
    """
    files = {path.name: path for path in find(HEART, data_dir)}
    absent = [name for name in HEART.files if name not in files]
    if absent:
        raise DataError(f"of the four files of heart, {', '.join(absent)} is not there; found: {sorted(files)}")
    tables = [_heart_file(files[name]) for name in HEART.files]
    rows = np.concatenate(tables)
    inputs = [standardise(rows[:, i], f"heart, feature {name!r}") for i, name in enumerate(HEART_FEATURES)]
    targets = torch.from_numpy((rows[:, -1] > 0).astype(np.int64))
    owners = np.repeat(HOSPITALS, [len(table) for table in tables])
    pool = ArrayPool(torch.from_numpy(np.stack(inputs, axis=1)), targets)
    return _samples("heart", pool, ("no disease", "disease"), owners)


def _heart_file(path: Path) -> Numbers:
    """13 features and the label 0..4 of one hospital, NaN for ``?``."""
    columns = (*HEART_FEATURES, "num")
    with readable(path, f"Is it UCI's table of {len(columns)} numbers a row?"):
        table = _read_csv(path, names=columns)
        rows = np.stack([_numbers(_plain(table[name])) for name in columns], axis=1)
    wrong = np.flatnonzero(~np.isin(rows[:, -1], range(5)))
    if len(wrong):
        raise DataError(f"{path}, row {wrong[0]}: the diagnosis is {rows[wrong[0], -1]}; allowed: 0, 1, 2, 3, 4")
    return rows


# ---------------------------------------------------------------- HAPT

ACTIVITIES = (
    *("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying"),
    *("stand to sit", "sit to stand", "sit to lie", "lie to sit", "stand to lie", "lie to stand"),
)
HAPT = Source(name="hapt", repo=None, revision=None, files=("windows.npz",), patterns=("windows.npz",))
_HAPT_ARRAYS = {"signal": "(n, 128, 6)", "label": "(n,)", "subject": "(n,)"}


@dataclass(frozen=True)
class PerChannel:
    """Signals (B, channels, time) in half precision to float32 with mean 0 and deviation 1 in every channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, signals: Tensor) -> PerChannel:
        """Mean and deviation of every channel over all signals."""
        values = signals.double()
        mean, std = values.mean((0, 2)), values.std((0, 2), correction=0)
        return cls(tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist()))

    def __call__(self, batch: Tensor) -> Tensor:
        """A batch as the model eats it."""
        mean, std = _on(self, batch.device)
        return (batch.float() - mean) / std


@lru_cache(maxsize=16)
def _on(channels: PerChannel, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation as (channels, 1) on the device, moved there once."""
    return torch.tensor(channels.mean, device=device)[:, None], torch.tensor(channels.std, device=device)[:, None]


def hapt(*, data_dir: Path | None = None) -> Samples:
    """Thirty people's phones (Reyes-Ortiz et al. 2016, UCI HAPT): acceleration and rotation to 12 activities.

    A sample is 6 channels × 128 readings (2.56 s). Windows half overlap, so windows drawn at random to test
    share readings with those that train.
    """
    (path,) = find(HAPT, data_dir)
    arrays = npz_arrays(path, _HAPT_ARRAYS)
    signal, label, subject = (arrays[name] for name in _HAPT_ARRAYS)
    _check_hapt(path, signal, label, subject)
    signals = torch.from_numpy(np.ascontiguousarray(signal.transpose(0, 2, 1)))
    targets = torch.from_numpy(label.astype(np.int64))
    pool = ArrayPool(signals, targets, PerChannel.of(signals))
    return _samples("hapt", pool, ACTIVITIES, subject.astype(str))


def _check_hapt(path: Path, signal: npt.NDArray[Any], label: npt.NDArray[Any], subject: npt.NDArray[Any]) -> None:
    shapes = [array.shape for array in (signal, label, subject)]
    n = len(label) if label.ndim else 0
    if n == 0 or shapes != [(n, 128, 6), (n,), (n,)]:
        raise DataError(f"{path} has arrays of shapes {shapes}; wanted: {list(_HAPT_ARRAYS.values())}")
    kinds = [array.dtype.kind for array in (signal, label, subject)]
    if kinds[0] != "f" or signal.itemsize > 8 or kinds[1] not in "iu" or kinds[2] not in "iu":
        types = [str(array.dtype) for array in (signal, label, subject)]
        raise DataError(f"{path} has arrays of {types}; wanted: real numbers, integers, integers")
    if not np.isfinite(signal).all():
        raise DataError(f"{path} has signals that are not finite numbers")
    if not 0 <= label.min() <= label.max() < len(ACTIVITIES):
        raise DataError(f"{path} has labels from {label.min()} to {label.max()}; allowed: 0..{len(ACTIVITIES) - 1}")
