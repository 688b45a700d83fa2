"""A node's samples: a file or folder of its own, a function of the user's, or its part of a named data set.

Three ways, the node's config first:

- ``data="visits.csv"`` (or parquet, or a folder of images): all of it is this client's. The run's ``[data]`` says
  which column is the label, and ``classes`` names all classes: a node may see only some of them. If ``[data]`` names
  a client column, the node takes the rows that bear its name.
- ``data="hospital.data:load"``: ``load(node_config)`` returns ``(x, y)``, ``(x, y, x_test, y_test)`` or a ``Dataset``.
- nothing: the run's ``[data]`` is loaded on the node and cut into clients, and the node takes the one of its name.
  For trials, where every node may see all data.

Numbers are standardised over the node's own rows: nobody knows the others'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fedfac.data import partition, sources
from fedfac.data.federation import Federation, numbers
from fedfac.data.pool import ArrayPool, Augment, ClientData, Pool, tensors_of
from fedfac.engine.flower.settings import DOTTED, Deployment, NodeConfig
from fedfac.errors import ConfigError, DataError, did_you_mean
from fedfac.models import imported


def load(run: Deployment, node: NodeConfig, *, client: int) -> tuple[ClientData, int | None]:
    """The node's samples as client number ``client``, and the number of classes that it knows of."""
    config = run.config.data
    if node.data is not None and DOTTED.fullmatch(node.data):
        return _from_function(run, node, client)
    if node.data is None:
        return _named(sources.load(config, seed=run.config.train.seed), node)
    samples = sources.load_samples(replace(config, name=node.data))
    if samples.classes is not None and config.classes is None:
        raise ConfigError(
            "a node sees its own labels only, so the run must say which classes there are: in [data], "
            f"classes = {','.join(samples.class_names or ())!r} (all of them, in one order for all nodes)"
        )
    if samples.owners is not None or samples.fixed is not None:
        return _named(sources.federate(samples, config, seed=run.config.train.seed), node)
    everything = np.arange(len(samples.pool.targets) if isinstance(samples.pool, ArrayPool) else 0)
    if not len(everything):
        raise DataError(f"{node.data} gives samples that cannot be counted; use a function of your own instead")
    return _own(samples.pool, everything, run, client, samples.augment), samples.classes


def _from_function(run: Deployment, node: NodeConfig, client: int) -> tuple[ClientData, int | None]:
    made: Any = imported(str(node.data))(dict(node.values))
    if isinstance(made, tuple) and len(made) not in (2, 4):
        raise DataError(f"{node.data} gave {len(made)} arrays; allowed: (x, y), (x, y, x_test, y_test), a Dataset")
    if not isinstance(made, tuple | Dataset):
        raise DataError(f"{node.data} gave a {type(made).__name__}; allowed: (x, y), (x, y, x_test, y_test), a Dataset")
    tensors = tensors_of(node.name, made)
    pool = ArrayPool(torch.cat(tensors[::2]), torch.cat(tensors[1::2]))
    names = run.config.data.class_names
    classes = pool.check(None if names is None else len(names))
    n = len(tensors[1])
    if len(tensors) == 2:
        return _own(pool, np.arange(n), run, client), classes
    nothing = torch.empty(0, dtype=torch.int64)
    return ClientData(pool, torch.arange(n), torch.arange(n, len(pool.targets)), nothing), classes


def _named(federation: Federation, node: NodeConfig) -> tuple[ClientData, int | None]:
    names = list(federation.names)
    if node.name not in names:
        raise DataError(
            f"this node is {node.name!r}, but the data has no such client. {did_you_mean(node.name, names)}"
        )
    return federation.client(names.index(node.name)), federation.classes


def _own(
    pool: Pool, index: partition.Index, run: Deployment, client: int, augment: Augment | None = None
) -> ClientData:
    """All samples of a pool as one client's, with the shares held out that the run asks for."""
    config, seed = run.config.data, run.config.train.seed
    train, test = partition.hold_out(index, config.test_share, seed=seed, client=client, purpose="test")
    held = np.empty(0, dtype=np.int64)
    if config.validation_share:
        train, held = partition.hold_out(train, config.validation_share, seed=seed, client=client, purpose="validation")
    parts = [torch.from_numpy(part) for part in (train, test, held)]
    return ClientData(pool, parts[0], parts[1], parts[2], augment)


def federation_of_one(data: ClientData, client: int, classes: int | None) -> Federation:
    """The client, under its number, as the only one that anybody asks for."""
    return Federation(lambda _: data, names=numbers(client + 1), classes=classes, fingerprint="")
