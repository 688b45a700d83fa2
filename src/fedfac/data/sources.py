"""Data sets by name, and from a data set to a federation."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedfac.config import DataConfig
from fedfac.data import partition
from fedfac.data.federation import Federation, Index
from fedfac.data.pool import ArrayPool
from fedfac.data.samples import Samples
from fedfac.errors import ConfigError, DataError, did_you_mean
from fedfac.seeds import stream
from fedfac.words import quoted

log = logging.getLogger(__name__)
CLIENTS = 100  # that data without clients of its own is cut into
FEW = 20  # a label with no more distinct whole numbers than this is probably meant as classes


@dataclass(frozen=True)
class Known:
    """A data set that has a name: where its loader is, and the network that it is trained with by default."""

    loader: str  # module and function below fedfac.data; imported when it is needed
    model: str
    clients: int = CLIENTS
    augments: bool = False


SOURCES: Mapping[str, Known] = {
    "digits": Known("digits.digits", "cnn", clients=60),
    "cifar10": Known("vision.cifar10", "resnet18", augments=True),
    "cifar100": Known("vision.cifar100", "vgg16", augments=True),
    "mnist": Known("vision.mnist", "femnist-cnn", augments=True),
    "fashion-mnist": Known("vision.fashion_mnist", "femnist-cnn", augments=True),
    "femnist": Known("vision.femnist", "femnist-cnn", augments=True),
    "shakespeare": Known("text.shakespeare", "char-lstm"),
    "hapt": Known("tables.hapt", "signal-cnn"),
    "heart": Known("tables.heart", "mlp"),
}
PARAMETERS = {
    "dirichlet": ("alpha",),
    "dirichlet-by-class": ("alpha",),
    "quantity": ("alpha",),
    "pathological": ("classes_per_client",),
    "shards": ("shards_per_client",),
}


def load(config: DataConfig, *, seed: int) -> Federation:
    """The federation that a config asks for."""
    return federate(load_samples(config), config, seed=seed)


def federate(samples: Samples, config: DataConfig, *, seed: int) -> Federation:
    """A data set, cut into clients."""
    parts = cut(samples, config, seed=seed)
    return Federation.from_pool(
        samples.pool,
        parts,
        classes=samples.classes,
        fingerprint=samples.fingerprint,
        validation_share=config.validation_share,
        augment=samples.augment,
        class_names=samples.class_names,
        seed=seed,
    )


def load_samples(config: DataConfig) -> Samples:
    """The data set itself: one with a name, or a file or folder of the user's."""
    try:
        return _samples_of(config)
    except OSError as error:  # a name that no file can have, a folder that may not be looked into
        raise DataError(
            f"the data {quoted(config.name)} cannot be read: {error}. Check --data and --data-dir"
        ) from error


def _samples_of(config: DataConfig) -> Samples:
    known = SOURCES.get(config.name)
    if known is not None:
        options: dict[str, Any] = {"data_dir": Path(config.data_dir) if config.data_dir else None}
        if known.augments:
            options["augment"] = config.augment
        elif config.augment:
            raise ConfigError(f"augment is for images; {config.name!r} has none that are augmented")
        samples: Samples = _loader(known.loader)(**options)
        return samples
    path = Path(config.name)
    if path.is_dir():
        folder: Samples = _loader("folders.image_folder")(path, classes=config.class_names)
        return folder
    if _loader("tables.is_table")(path):
        return _own_table(path, config)
    raise ConfigError(
        f"there is no data set {config.name!r}, and no such CSV file, parquet file or folder. "
        f"{did_you_mean(config.name, SOURCES)}"
    )


def _own_table(path: Path, config: DataConfig) -> Samples:
    if config.label is None:
        columns = ", ".join(_loader("tables.columns_of")(path))
        raise ConfigError(f"say which column of {path} is the label: --label NAME. Its columns: {columns}.")
    drop = [name.strip() for name in (config.drop or "").split(",") if name.strip()]
    samples: Samples = _loader("tables.csv_or_parquet")(
        path, label=config.label, client=config.client, drop=drop, classes=config.class_names
    )
    if samples.classes is None and _look_like_classes(samples):
        _note(f"the label {config.label!r} holds real numbers: this is regression. For classes write 0 and 1, or text")
    if config.client is None and config.partition == "auto":
        _note(
            f"no client column was named, so {path} is cut into {config.clients or CLIENTS} clients at random "
            "(--partition dirichlet). Name the column that says whose row it is: --client NAME"
        )
    return samples


def _look_like_classes(samples: Samples) -> bool:
    """Whether real targets are a few whole numbers, such as 0.0 and 1.0."""
    if not isinstance(samples.pool, ArrayPool):
        return False
    values = np.unique(samples.pool.targets.numpy())
    return len(values) <= FEW and bool((values == values.round()).all())


@cache
def _note(text: str) -> None:
    """Something that a user may not have meant, said once in a process."""
    log.warning("note: %s", text)


def _loader(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"fedfac.data.{module}"), function)
    return found


def default_model(name: str) -> str:
    """The network that a data set is trained with unless another is named."""
    if name in SOURCES:
        return SOURCES[name].model
    return "cnn" if Path(name).is_dir() else "mlp"


def cut(samples: Samples, config: DataConfig, *, seed: int) -> dict[str, tuple[Index, Index]]:
    """Who has which samples, for training and for testing."""
    how = config.partition
    if how == "auto":
        how = "natural" if samples.owners is not None or samples.fixed is not None else "dirichlet"
    if how == "natural":
        return _natural(samples, config, seed)
    if config.max_samples is not None:
        raise ConfigError(f"max_samples is for natural clients; {how!r} cuts all samples into --clients clients")
    if samples.labels is None:
        raise DataError(f"{samples.name} has no class labels to cut it by {how!r}: use its natural clients")
    function = partition.by_name(how)
    clients = config.clients or (SOURCES[config.name].clients if config.name in SOURCES else CLIENTS)
    parameters = {name: getattr(config, name) for name in PARAMETERS.get(how, ())}
    parts = function(samples.labels, clients=clients, seed=seed, **parameters)
    return {
        str(i): partition.hold_out(part, config.test_share, seed=seed, client=i, purpose="test")
        for i, part in enumerate(parts)
    }


def _natural(samples: Samples, config: DataConfig, seed: int) -> dict[str, tuple[Index, Index]]:
    """The data set's own clients; with ``clients``, a random choice of that many of them."""
    if samples.fixed is not None:
        parts = dict(samples.fixed)
    elif samples.owners is not None:
        parts = {
            name: partition.hold_out(part, config.test_share, seed=seed, client=i, purpose="test")
            for i, (name, part) in enumerate(partition.natural(samples.owners).items())
        }
    else:
        raise ConfigError(f"{samples.name} has no natural clients; use --partition dirichlet, iid, ...")
    parts = {name: p for name, p in parts.items() if len(p[0]) + len(p[1]) >= config.min_samples}
    if not parts:
        raise DataError(f"no client of {samples.name} has {config.min_samples} samples")
    if config.clients is not None:
        if not 1 <= config.clients <= len(parts):
            raise DataError(f"{config.clients} clients were asked for; {samples.name} has {len(parts)}")
        draws = stream(seed, "partition", "natural")
        chosen = set(np.sort(draws.choice(len(parts), config.clients, replace=False)).tolist())
        parts = {name: p for i, (name, p) in enumerate(parts.items()) if i in chosen}
    most = config.max_samples
    if most is None:
        return parts
    if most < 2:
        raise ConfigError(f"max_samples is {most}; a client needs at least 2, one to train on and one for the test")
    return {name: _thinned(p, most) if len(p[0]) + len(p[1]) > most else p for name, p in parts.items()}


def _thinned(part: tuple[Index, Index], most: int) -> tuple[Index, Index]:
    """Both sides with the same share of their samples, evenly spaced: neighbours in a text are nearly the same."""
    share = most / sum(map(len, part))
    train, test = (_evenly(np.asarray(side, dtype=np.int64), share) for side in part)  # some data sets give ranges
    return train, test


def _evenly(side: partition.Index, share: float) -> partition.Index:
    kept = min(len(side), max(1, round(share * len(side))))
    return side[np.arange(kept) * len(side) // max(1, kept)]
