"""What a run is asked for, as frozen dataclasses: the one definition behind TOML files and flags.

A file has the tables ``[data]``, ``[model]``, ``[method]`` and ``[train]``; every key is also a flag. An unknown
key fails with the nearest known one. This module does not import PyTorch.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from fedfac.errors import ConfigError, did_you_mean
from fedfac.limits import check_depth, file_bytes, reason
from fedfac.words import printable

MOST_CLASSES = 100_000
_DOTS = 1000  # in a line of TOML: the parser takes minutes for a key of many parts
_TEXT = 2**20  # bytes of a config file


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """[data]: which data, and how it is cut into clients."""

    name: str = _option(
        "digits",
        "data set: digits, cifar10, cifar100, mnist, fashion-mnist, femnist, shakespeare, "
        "hapt, heart; or a CSV or parquet file, or a folder of images, of your own",
    )
    data_dir: str | None = _option(None, "folder with the data files (default: FEDFAC_DATA, else they are downloaded)")
    label: str | None = _option(None, "label column of a file of your own")
    client: str | None = _option(None, "client column of a file of your own")
    classes: str | None = _option(
        None, "all classes of a file or folder of your own in order, 'no,yes'; or their number, if labels are 0, 1, ..."
    )
    drop: str | None = _option(None, "columns of a file of your own that are no inputs: 'id,name'")
    partition: str = _option(
        "auto",
        "how it is cut into clients: natural (writer, role, person, hospital), dirichlet, "
        "dirichlet-by-class, pathological, shards, quantity or iid; auto: natural if it can be",
    )
    clients: int | None = _option(None, "number of clients (default: 60 for digits, else 100; natural ones: all)")
    alpha: float = _option(0.1, "Dirichlet parameter: the smaller, the fewer classes a client sees")
    classes_per_client: int = _option(2, "for pathological: how many classes a client sees")
    shards_per_client: int = _option(2, "for shards: how many shards a client gets")
    min_samples: int = _option(1, "natural clients with fewer samples are left out")
    max_samples: int | None = _option(None, "natural clients with more samples keep so many of them, evenly spaced")
    test_share: float = _option(0.2, "share of each client's samples held out for testing")
    validation_share: float = _option(0.0, "share of each client's training samples held out for validation")
    augment: bool = _option(False, "images: random crops (and flips) of training batches")

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """What ``classes`` lists.

        >>> DataConfig(classes="no, yes").class_names, DataConfig(classes="3").class_names
        (('no', 'yes'), ('0', '1', '2'))
        """
        if self.classes is None:
            return None
        text = self.classes.strip()
        if not (text.isascii() and text.isdigit()):
            return tuple(name.strip() for name in text.split(","))
        if len(text) > 12 or not 1 <= int(text) <= MOST_CLASSES:
            raise ConfigError(f"classes is {printable(text)}; a number of classes is from 1 to {MOST_CLASSES}")
        return tuple(str(number) for number in range(int(text)))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: how long, how many, how fast."""

    rounds: int = _option(50, "communication rounds")
    rate: float | None = _option(None, "share of clients in a round (default: a tenth, at least ten clients)")
    cohort: int | None = _option(None, "number of clients in a round, instead of --rate")
    cohort_of_one: bool = _option(
        False, "let a rule measure one client alone: whoever has its sums has that client's personal weights"
    )
    epochs: int = _option(5, "local epochs in a round")
    batch_size: int = _option(32, "local batch size")
    lr: float = _option(1e-3, "local learning rate")
    optimizer: str = _option("adam", "local optimiser: adam or sgd")
    momentum: float = _option(0.0, "momentum of sgd")
    weight_decay: float = _option(0.0, "weight decay")
    seed: int = _option(0, "everything random is a function of it")
    evaluate_every: int | None = _option(
        None,
        "test every so many rounds (default: as often as it costs a fifth of the training at most, and in three of the "
        "last ten rounds)",
    )
    evaluate_from: int = _option(1, "the first round that may be tested")
    evaluate_clients: int | None = _option(None, "test on that many clients only")
    newcomers: float = _option(0.0, "share of clients kept out of training, and served after the last round")
    precision: str = _option("auto", "fp32, tf32 or bf16; auto: bf16 for convolutional models on a GPU, else fp32")
    layout: str = _option("auto", "contiguous or channels-last; auto: channels-last for convolutional models")
    deterministic: bool = _option(False, "on a GPU: only kernels that give the same bits every time (slower)")
    stack: bool | None = _option(None, "train the clients of a small fully connected model as one (default: if it is)")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment."""

    data: DataConfig = field(default_factory=DataConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedfac"})
    train: TrainConfig = field(default_factory=TrainConfig)
    trust_code: bool = field(default=False, compare=False)  # whether [model] may name a function, module:function

    @property
    def method_name(self) -> str:
        """The method's name."""
        return str(self.method.get("name", "fedfac"))

    @property
    def method_options(self) -> dict[str, Any]:
        """The method's options."""
        return {key: value for key, value in self.method.items() if key != "name"}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a TOML or JSON file holds them."""
        return {
            "data": {key: value for key, value in asdict(self.data).items() if value is not None},
            "model": dict(self.model),
            "method": {"name": self.method_name, **self.method_options},
            "train": {key: value for key, value in asdict(self.train).items() if value is not None},
        }

    def to_toml(self) -> str:
        """The text of a TOML file that ``fedfac run --config`` takes."""
        tables = {name: table for name, table in self.to_dict().items() if table}
        return "\n".join(
            "\n".join([f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""])
            for name, table in tables.items()
        )

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], *, trust_code: bool = False) -> Config:
        """Read plain tables; unknown keys and wrong types fail."""
        try:
            check_depth(tables)
        except ValueError as error:
            raise ConfigError(f"the config cannot be used: {error}") from error
        for name, table in tables.items():
            if name not in SECTIONS:
                raise ConfigError(f"unknown table [{name}]. {did_you_mean(name, SECTIONS)}")
            _check_table(name, table)
        return cls(
            data=read_table("data", DataConfig, tables.get("data", {})),
            model=dict(tables.get("model", {})),
            method={"name": "fedfac", **tables.get("method", {})},
            train=read_table("train", TrainConfig, tables.get("train", {})),
            trust_code=trust_code,
        )


SECTIONS = ("data", "model", "method", "train")  # and [compare] and [tune], which only those commands read
TYPED_SECTIONS: Mapping[str, type[Any]] = {"data": DataConfig, "train": TrainConfig}
Table = TypeVar("Table")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        text = file_bytes(Path(path), _TEXT).decode()
        for number, line in enumerate(text.split("\n"), start=1):
            if line.count(".") > _DOTS:
                raise ValueError(f"line {number} has {line.count('.')} dots; allowed: {_DOTS}")
        tables = tomllib.loads(text)
        check_depth(tables)
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                raise ValueError(f"{printable(name)} is {printable(table)}; it must be a table, [{printable(name)}]")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {reason(error)}") from error
    return tables


def _check_table(name: str, table: Any) -> None:
    """A table of the config; the names of a model and a method are text."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} is {table!r}; it must be a table, [{name}]")
    for key in ("name", "weights") if name in ("model", "method") else ():
        if not isinstance(table.get(key, ""), str):
            raise ConfigError(f"{key} in [{name}] is {table[key]!r}; it must be of type str")


def merged(tables: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Tables with some values replaced; None replaces nothing."""
    result = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    for name, table in overrides.items():
        given = {key: value for key, value in table.items() if value is not None}
        if given:
            result[name] = {**result.get(name, {}), **given}
    return result


def _toml(value: Any) -> str:
    """A plain value as TOML writes it.

    >>> _toml({"fc1": ["50%", 1e-05, True]})
    '{"fc1" = ["50%", 1e-05, true]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_type(hint: Any) -> type:
    """The plain type of a field: ``int | None`` is an int."""
    options = [t for t in get_args(hint) if t is not type(None)]
    return options[0] if options else hint  # type: ignore[no-any-return]


def read_table(section: str, kind: type[Table], table: Mapping[str, Any]) -> Table:
    """A table of plain values as its dataclass; unknown keys and wrong types fail."""
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in [{section}]. {did_you_mean(key, known)}")
        wanted = value_type(hints[key])
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"{key} in [{section}] is {value!r}; it must be of type {wanted.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} in [{section}] is {value}; it must be a finite number")
        values[key] = value
    return kind(**values)
