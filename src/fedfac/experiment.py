"""From a config to a run, and from a run directory back to a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from fedfac import exported, methods, models
from fedfac.anatomy import Anatomy
from fedfac.config import Config
from fedfac.data import sources
from fedfac.data.federation import Federation, numbers
from fedfac.engine.store import Elsewhere
from fedfac.errors import ModelError, RunError
from fedfac.limits import reason
from fedfac.method import Loss, Method
from fedfac.observers import Observer
from fedfac.preflight import hold_out_newcomers, json_like, name_of
from fedfac.records import Record
from fedfac.result import Result
from fedfac.rounds import Session
from fedfac.run import RunDirectory, read_config, split_of
from fedfac.settings import divided
from fedfac.split import Split
from fedfac.state import check_same_tensors, references
from fedfac.training import Local

Kind = TypeVar("Kind")


class Started(msgspec.Struct, frozen=True):
    """What a run's config.json says of a run that the command line started."""

    origin: dict[str, dict[str, Any]]
    rounds: int


class Recorded(msgspec.Struct, frozen=True):
    """What a run's config.json says that a result needs."""

    class Settings(msgspec.Struct, frozen=True):
        """Of a run."""

        clients: Annotated[int, msgspec.Meta(ge=1, le=10**8)]
        newcomers: Annotated[float, msgspec.Meta(ge=0, lt=1)]
        seed: int
        method: dict[str, Any]
        local: dict[str, Any]

    settings: Settings
    rounds: int
    split: str
    names: list[str] | None


def build(config: Config, *, federation: Federation | None = None) -> tuple[nn.Module, Federation, Method]:
    """Model, federation and method of a config. The seed decides the data's cut and the model's start.

    Where many runs share one federation, it is loaded once and handed in.
    """
    seed = config.train.seed
    if config.model.get("name"):
        models.check_trusted(config.model["name"], trust_code=config.trust_code)  # before any data is read
    method = methods.build(config.method_name, config.method_options)
    federation = sources.load(config.data, seed=seed) if federation is None else federation
    first = federation.client(0)
    inputs, _ = first.pool.batch(first.train[:1])
    options = dict(config.model)
    name = options.pop("name", None) or sources.default_model(config.data.name)
    model = models.build(name, shape=tuple(inputs.shape[1:]), classes=federation.classes or 1, seed=seed, **options)
    method.plan(Anatomy.of(method.wrapped(model)))  # unknown layers fail here
    return model, federation, method


def loss_of(classes: int | None) -> Loss:
    """Cross-entropy for classes, mean squared error for real targets."""
    return F.cross_entropy if classes is not None else F.mse_loss


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    from_round: int | None = None,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    on_round: Callable[[Record], None] | None = None,
    observers: Sequence[Observer] = (),
    should_stop: Callable[[], bool] | None = None,
    choice: Mapping[str, Any] | None = None,
) -> Result:
    """Train what a config asks for; ``choice`` is recorded with it."""
    asked = session(
        config,
        out=out,
        resume=resume,
        lanes=lanes,
        device=device,
        observers=observers,
        choice=choice,
        from_round=from_round,
    )
    return asked.drive(on_round, should_stop)


def session(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    observers: Sequence[Observer] = (),
    federation: Federation | None = None,
    method: Method | None = None,
    choice: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Session:
    """The run that a config asks for, to be gone through round by round.

    ``federation`` and ``method`` stand in for the config's own, ``changes`` replace keys of [train].
    """
    if out is not None and not resume:
        RunDirectory.check_free(out)
    model, federation, asked_for = build(config, federation=federation)
    method = asked_for if method is None else method
    asked = {**vars(config.train), **changes, "loss": loss_of(federation.classes)}
    running = {"out": out, "resume": resume, "lanes": lanes, "device": device, "observers": observers, "choice": choice}
    local, settings = divided({**asked, **running, "origin": config.to_dict()})
    return Session(model, federation, method, local, settings)


def config_of(path: str | Path, *, trust_code: bool = False) -> Config:
    """The config of a run that was started from the command line."""
    found = read_config(path)
    if "remote" in found:
        raise RunError(f"{path} was trained over a network: 'flwr run' its app again to go on with it")
    if found.get("origin") is None:
        raise RunError(
            f"{path} was started from Python with a model of its own, which the command line cannot rebuild: "
            "call fedfac.fit(...) again with the same arguments and resume=True"
        )
    started = _said(path, found, Started)
    tables = {**started.origin, "train": {**started.origin.get("train", {}), "rounds": started.rounds}}
    return Config.from_dict(tables, trust_code=trust_code)


def _said(path: str | Path, found: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """A run's config.json as its type; what else it says does not matter here."""
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RunError(
            f"{Path(path) / 'config.json'} is no run's config: {reason(error)}; nothing was changed"
        ) from error


def _warmup(method: Mapping[str, Any]) -> int:
    rounds = method.get("warmup", 0)
    return rounds if isinstance(rounds, int) else 0


def _local(path: str | Path, said: Mapping[str, Any], loss: Loss) -> Local:
    try:
        return Local(**{**said, "loss": loss})
    except TypeError as error:
        raise RunError(f"{Path(path) / 'config.json'} is no run's config: {error}; nothing was changed") from error


def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    method: Method | None = None,
    federation: Federation | None = None,
    loss: Loss = F.cross_entropy,
    trust_code: bool = False,
) -> Result:
    """The result of a run directory: models of all clients, metrics, splits.

    A run that was started from Python needs its ``model`` again (its weights do not matter); its ``method`` if
    newcomers are to be adapted or if it wraps the model; its ``federation`` if the method fine-tunes before it
    predicts; and its ``loss`` if that is not the cross-entropy. A model that ``fedfac deploy export`` wrote is
    loaded too, as the result of its one client. Where the folder names the network as a function
    (``module:function``), building it runs code that the folder chose: that needs ``trust_code=True``.
    """
    if exported.is_exported(path):
        return exported.load(path, model, trust_code=trust_code)
    found = read_config(path)
    if model is None and "remote" in found:
        raise RunError(
            f"{path} was trained over a network, and the clients' personal parts are on their nodes: "
            "'fedfac deploy export' there gives a client's model. With model=..., load gives what is shared"
        )
    if model is None:
        model, federation, method = build(config_of(path, trust_code=trust_code))
        loss = loss_of(federation.classes)
    template = model if method is None else method.wrapped(model)
    directory = RunDirectory.read(path)
    saved = directory.checkpoint()
    if saved is None:
        raise RunError(f"{path} has no whole round yet; there is nothing to load")
    try:
        check_same_tensors(references(template), saved.server)
    except ModelError as error:
        if method is None:
            raise ModelError(
                f"{error} If its method wraps the model (FedEM, Ditto, ...), give that too: method="
            ) from error
        raise
    recorded = _said(path, found, Recorded)
    settings = recorded.settings
    if method is not None and json_like(method.describe()) != settings.method:
        raise RunError(f"{path} was trained by the method {settings.method}, not by {method}: give that one")
    same_loss = settings.local.get("loss") == name_of(loss)
    names = recorded.names or numbers(settings.clients)
    plan = method.plan(Anatomy.of(template)) if method is not None else None
    split = split_of(found, Path(path))
    if plan is not None:
        split = plan.split_in(saved.round, saved.masks)
    elif saved.round <= _warmup(settings.method) > 0:
        split = Split(split.shapes)
    else:
        split = split.with_masks(saved.masks)
    return Result(
        template=template,
        server=saved.shown,
        split=split,
        store=Elsewhere() if "remote" in found else directory,
        names=names,
        records=directory.records(),
        masks=directory.masks(),
        clients=directory.clients(),
        path=Path(path),
        finished=saved.round >= recorded.rounds,
        seed=settings.seed,
        plan=plan,
        local=_local(path, settings.local, loss) if same_loss else None,
        federation=federation,
        newcomers=hold_out_newcomers(settings.clients, settings.newcomers, settings.seed)[1],
    )
