"""From a config to a run, and from a run directory back to a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfac import methods, models
from fedfac.anatomy import Anatomy
from fedfac.config import Config
from fedfac.data import sources
from fedfac.data.federation import Federation, numbers
from fedfac.errors import RunError
from fedfac.method import Method
from fedfac.result import Result
from fedfac.rounds import Record, fit
from fedfac.run import RunDirectory, read_config
from fedfac.split import Split
from fedfac.state import check_same_tensors, references


def build(config: Config) -> tuple[nn.Module, Federation, Method]:
    """Model, federation and method of a config. The seed decides the data's cut and the model's start."""
    seed = config.train.seed
    method = methods.build(config.method_name, config.method_options)
    federation = sources.load(config.data, seed=seed)
    first = federation.client(0)
    inputs, _ = first.pool.batch(first.train[:1])
    model = models.build(config.model.name, shape=tuple(inputs.shape[1:]), classes=federation.classes or 1, seed=seed)
    return model, federation, method


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    on_round: Callable[[Record], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """Train what a config asks for."""
    if out is not None and not resume:
        RunDirectory.check_free(out)
    model, federation, method = build(config)
    settings = {name: value for name, value in vars(config.train).items() if value is not None}
    return fit(
        model,
        federation,
        method=method,
        **settings,
        out=out,
        resume=resume,
        lanes=lanes,
        device=device,
        on_round=on_round,
        should_stop=should_stop,
        origin=config.to_dict(),
    )


def config_of(path: str | Path) -> Config:
    """The config of a run that was started from the command line."""
    found = read_config(path)
    if found.get("origin") is None:
        raise RunError(
            f"{path} was started from Python with a model of its own, which the command line cannot rebuild: "
            "call fedfac.fit(...) again with the same arguments and resume=True"
        )
    return Config.from_dict({**found["origin"], "train": {**found["origin"]["train"], "rounds": found["rounds"]}})


def load(path: str | Path, model: nn.Module | None = None, *, method: Method | None = None) -> Result:
    """The result of a run directory: models of all clients, metrics, splits.

    A run that was started from Python needs its ``model`` again (and its ``method``, if that wraps the
    model); its weights do not matter.
    """
    found = read_config(path)
    if model is None:
        model, _, method = build(config_of(path))
    template = method.wrap(model) if method is not None and method.wrap is not None else model
    directory = RunDirectory.read(path)
    saved = directory.checkpoint()
    if saved is None:
        raise RunError(f"{path} has no whole round yet; there is nothing to load")
    check_same_tensors(references(template), saved.server)
    names: Any = found["names"] or numbers(found["settings"]["clients"])
    return Result(
        template=template,
        server=saved.server,
        split=Split.from_json(found["split"]).with_masks(saved.masks),
        store=directory,
        names=names,
        records=directory.records(),
        masks=directory.masks(),
        clients=directory.clients(),
        path=Path(path),
        finished=saved.round >= found["rounds"],
    )


def check(model: nn.Module, method: Method) -> None:
    """Fail if the method does not fit the model."""
    method.plan(Anatomy.of(method.wrap(model) if method.wrap is not None else model))
