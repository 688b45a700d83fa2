"""What a run's config and a node's config say.

A run's config is Flower's: the tables under ``[tool.flwr.app.config]`` of the app's pyproject, with ``flwr run
--run-config`` on top. It has the tables of every fedfac config (``data``, ``model``, ``method``, ``train``) and
``deploy``. A node's config is what its SuperNode was started with (``--node-config``): it stays on the node, and
what it says about the node's data and privacy cannot be changed by a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from fedfac import evaluate, methods, models
from fedfac.anatomy import Anatomy
from fedfac.config import Config, read_table
from fedfac.data import sources
from fedfac.engine.flower.wire import SAMPLES, is_name
from fedfac.errors import ConfigError
from fedfac.experiment import loss_of
from fedfac.method import Method, Plan
from fedfac.options import value_of
from fedfac.state import digest
from fedfac.training import Local

DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """[deploy]: whom the server waits for, for how long, and where it keeps the run."""

    out: str = field(default="run", metadata={"help": "the server's run directory"})
    clients: int = field(default=2, metadata={"help": "how many nodes a new run waits for: these are its clients"})
    deadline: float = field(default=600.0, metadata={"help": "seconds that a request waits for replies"})
    minimum: float = field(default=0.5, metadata={"help": "share of a cohort that must reply, or the round is skipped"})
    keys: bool = field(
        default=True,
        metadata={"help": "nodes have keys of their own: a client's name belongs to the node that first had it"},
    )
    most_samples: int = field(default=SAMPLES, metadata={"help": "a client that says it has more samples is refused"})

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ConfigError(f"clients in [deploy] is {self.clients}; a run needs at least one node")
        if not 0 < self.minimum <= 1:
            raise ConfigError(f"minimum in [deploy] is {self.minimum}; it is a share, above 0 and at most 1")
        if not 0 < self.deadline < float("inf"):
            raise ConfigError(f"deadline in [deploy] is {self.deadline}; it is a positive number of seconds")
        if not 0 < self.most_samples <= 2**53:
            raise ConfigError(f"most_samples in [deploy] is {self.most_samples}; it is a whole number from 1 up")


@dataclass(frozen=True)
class Keeps:
    """How much of earlier runs stays in a node's folder: what is beyond any of these is removed, the oldest first."""

    runs: int = 20
    days: int = 90
    bytes: int = 10 * 2**30


@dataclass(frozen=True)
class Deployment:
    """A run, as both sides read it."""

    config: Config
    deploy: DeployConfig
    flat: Mapping[str, Any]  # as Flower gave it

    @classmethod
    def read(cls, flat: Mapping[str, Any]) -> Deployment:
        """From Flower's flat run config: ``train.rounds`` is the key ``rounds`` of the table ``train``."""
        tables: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            section, dot, name = key.partition(".")
            if not dot:
                raise ConfigError(f"{key} in the run's config is in no table; write it as train.{key}, for example")
            tables.setdefault(section, {})[name.replace("-", "_")] = value
        deploy = read_table("deploy", DeployConfig, tables.pop("deploy", {}))
        method = tables.setdefault("method", {})
        name = method.setdefault("name", "fedfac")
        known = methods.options_of(name)
        for key, value in method.items():  # Flower's config has no lists: layers come as text
            if key != "name" and isinstance(value, str):
                method[key] = value_of(name, key, value, known)
        return cls(Config.from_dict(tables), deploy, dict(flat))

    def identity(self, client: int, classes: int | None) -> str:
        """A digest of what a node trains in this run: all of it but how long, and when it is tested."""
        tables = self.config.to_dict()
        for key in ("rounds", "evaluate_every", "evaluate_from", "evaluate_clients"):
            tables["train"].pop(key, None)
        return digest(json.dumps([tables, client, classes], sort_keys=True, default=repr).encode())

    @property
    def method(self) -> Method:
        """The method that is trained."""
        return methods.build(self.config.method_name, self.config.method_options)

    @property
    def model_name(self) -> str:
        """The network's name."""
        return str(self.config.model.get("name") or sources.default_model(self.config.data.name))

    def local(self, classes: int | None) -> Local:
        """How clients train."""
        asked = {f.name: getattr(self.config.train, f.name) for f in fields(Local) if f.name != "loss"}
        return Local(**asked, loss=loss_of(classes))

    def model(self, shape: tuple[int, ...], classes: int | None, *, start: bool = False) -> nn.Module:
        """The network; with ``start``, from the weights file that the config may name (the server has it)."""
        options = {k: v for k, v in self.config.model.items() if k != "name" and (start or k != "weights")}
        return models.build(self.model_name, shape=shape, classes=classes or 1, seed=self.config.train.seed, **options)

    def plan(self, model: nn.Module) -> tuple[nn.Module, Plan]:
        """The module that the method trains, and the method for it."""
        method = self.method
        template = method.wrapped(model)
        return template, method.plan(Anatomy.of(template))

    def metrics(self, classes: int | None) -> dict[str, evaluate.Metric]:
        """What is measured beside the accuracy."""
        return evaluate.named_metrics(None, classes)


@dataclass(frozen=True)
class NodeConfig:
    """What a SuperNode was started with."""

    name: str
    folder: Path
    values: Mapping[str, Any]  # all of it: a data source of the user's own may read more

    @classmethod
    def read(cls, values: Mapping[str, Any], node: int) -> NodeConfig:
        """The client's name is ``client``, else ``partition-id``, else the number that the SuperLink gave the node."""
        name = next((str(values[key]) for key in ("client", "partition-id") if key in values), str(node))
        if not is_name(name):
            raise ConfigError(
                f"the client of this node is called {name[:100]!r}; a name is up to 100 printable characters"
            )
        folder = Path(str(values.get("folder", Path.home() / ".fedfac"))).expanduser()
        read = cls(name, folder, values)
        read.check()
        return read

    def check(self) -> None:
        """Fail now if a word of the owner cannot be understood, and not when it is needed."""
        for key in ("share-weights", "begin-anew", "go-back"):
            self._agrees(key)
        _ = self.keeps

    @property
    def data(self) -> str | None:
        """A file or folder of the node's own, or ``module:function``; None: what the run says."""
        found = self.values.get("data")
        return None if found is None else str(found)

    @property
    def shares_weights(self) -> bool:
        """Whether numbers from which this client's personal weights can be computed may leave the node."""
        return self._agrees("share-weights")

    @property
    def begins_anew(self) -> bool:
        """Whether the node may go on without a personal state that it once had and has lost."""
        return self._agrees("begin-anew")

    @property
    def goes_back(self) -> bool:
        """Whether the server may ask for a round that this node has already done, from another state."""
        return self._agrees("go-back")

    @property
    def keeps(self) -> Keeps:
        """What of earlier runs stays in the node's folder."""
        asked = {key: self.values.get(f"keep-{key}", getattr(Keeps(), key)) for key in ("runs", "days", "bytes")}
        for key, value in asked.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"keep-{key} in the node's config is {value!r}; it is a whole number from 1 up")
        return Keeps(**asked)

    def _agrees(self, key: str) -> bool:
        """A word of the owner: true or false, nothing that could be taken for either."""
        found = self.values.get(key, False)
        if not isinstance(found, bool):
            raise ConfigError(f"{key} in the node's config is {found!r}; it is true or false (without quotation marks)")
        return found

    @property
    def device(self) -> str | None:
        """Where it trains."""
        found = self.values.get("device")
        return None if found is None else str(found)
