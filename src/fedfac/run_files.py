"""What the text files of a run directory must look like, and how they are read: wrong or damaged, they are refused.

Types and bounds are checked before anything is made of a value, so that a file cannot ask for a petabyte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta

from fedfac.anatomy import Rows
from fedfac.disk import refused, worded
from fedfac.errors import ConfigError, RunError
from fedfac.split import Split, mask_of

FORMAT = 2  # 1: before methods had switches
Kind = TypeVar("Kind")
Count = Annotated[int, Meta(ge=1, le=10**9)]
Size = Annotated[int, Meta(ge=0, le=10**12)]
Name = Annotated[str, Meta(max_length=10_000)]
_MOST_NUMBERS = 10**12  # of one tensor
_DEEPEST = 40  # how deep our files are nested is a matter of ten


class LocalSettings(msgspec.Struct, forbid_unknown_fields=True):
    """``Local.describe()``; its own checks come when it is used."""

    epochs: Count
    batch_size: Count
    lr: float
    optimizer: Name
    loss: Name
    momentum: float = 0.0
    weight_decay: float = 0.0


class MethodSettings(msgspec.Struct):
    """``Method.describe()``: a name, and options that differ from method to method."""

    name: Name
    warmup: Annotated[int, Meta(ge=0)] = 0


class Settings(msgspec.Struct):
    """What makes a run this run."""

    method: MethodSettings
    local: LocalSettings
    cohort: Annotated[int, Meta(ge=1, le=10**7)]
    seed: int
    clients: Annotated[int, Meta(ge=1, le=10**7)]
    data: str
    newcomers: Annotated[float, Meta(ge=0, lt=1)]
    evaluate_every: Count | None


class Origin(msgspec.Struct):
    """The tables of the command line; :class:`~fedfac.config.Config` reads them."""

    data: dict[str, Any]
    method: dict[str, Any]
    train: dict[str, Any]
    model: dict[str, Any] = {}


class RunConfig(msgspec.Struct):
    """config.json."""

    format: int
    version: Name
    rounds: Count
    settings: Settings
    tensors: dict[str, tuple[Annotated[list[Size], Meta(max_length=16)], Name]]
    split: str
    names: list[Name] | None
    origin: Origin | None
    resolved: dict[str, Any] = {}
    choice: dict[str, Any] | None = None
    remote: dict[str, Any] | None = None


class Tested(msgspec.Struct):
    """One client's row of the last evaluation; further figures may follow."""

    client: Name
    samples: Size
    loss: float | None
    accuracy: float | None


class LayerRecord(msgspec.Struct):
    """What a record says of a layer; a rule may note more."""

    elements: Size
    shared: Size
    kept: float
    tau: float | Literal["inf"] = 0.0
    factors: Size = 0
    iterations: Size = 0
    dead: Size = 0
    converged: bool = True
    stopped: str = ""


class Figures(msgspec.Struct):
    """The figures of an evaluation; a run's own metrics may follow."""

    model: str = ""
    clients: Size = 0
    samples: Size = 0
    loss: float | None = None
    accuracy: float | None = None
    mean: float | None = None
    std: float | None = None
    median: float | None = None
    worst_decile: float | None = None
    jain: float | None = None


class Record(msgspec.Struct):
    """A round's record, as far as every round has it."""

    round: Annotated[int, Meta(ge=0)]
    shared_share: float = 1.0
    split: dict[str, LayerRecord] = {}
    cohort: list[Size] = []
    left_out: dict[str, str | None] = {}
    train_loss: float | None = None
    test: Figures = msgspec.field(default_factory=Figures)
    validation: Figures = msgspec.field(default_factory=Figures)
    newcomers: dict[str, Figures] = {}
    skipped: str = ""


class Span(msgspec.Struct, rename={"start": "from", "end": "to"}):
    """Samples one after the other."""

    start: Size
    end: Size


class Partition(msgspec.Struct):
    """partition.json: whose samples are whose."""

    clients: dict[str, dict[str, list[Size] | Span]]
    counts: list[list[Size]] | None = None
    class_names: list[Name] | None = None


class _Owner(msgspec.Struct, forbid_unknown_fields=True):
    layer: Name
    tensor: Name
    count: Size
    dim: Size
    first: Size
    tiles: Size
    groups: Size


class _Split(msgspec.Struct, forbid_unknown_fields=True):
    shapes: dict[str, list[Size]]
    personal: list[str]
    owners: dict[str, _Owner]
    masks: dict[str, Annotated[str, Meta(pattern="^[01]*$")]]
    anew: bool = False


def parsed(text: Any, kind: type[Kind], what: str) -> Any:
    """JSON as plain values, if it is of that kind, and nothing in it is nested deeper than anything of ours."""
    try:
        value = json.loads(text)
        _check_depth(value)
        msgspec.convert(value, kind)
    except (ValueError, TypeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RunError(f"{what} cannot be read ({why}); nothing was changed") from error
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_DEEPEST):
        inner = [found.values() if isinstance(found, dict) else found for found in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def read_config(path: str | Path) -> dict[str, Any]:
    """A run's config.json, of the format that this version reads."""
    path = Path(path)
    file = path / "config.json"
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(f"{path} holds no run: there is no {file.name} in it{_runs_in(path)}") from error
    except OSError as error:
        raise RunError(refused(file, error)) from error
    except UnicodeDecodeError as error:
        raise RunError(f"{file} cannot be read ({error}); nothing was changed") from error
    config = parsed(text, object, str(file))
    found = config.get("format") if isinstance(config, dict) else None
    if found != FORMAT:
        version = config.get("version", "unknown") if isinstance(config, dict) else "?"
        raise RunError(
            f"{path} was written in run format {found!r}; this version of fedfac reads format {FORMAT}. "
            f"Use the version that wrote it ({version}), or train it again: options of methods have other names now "
            "(CHANGELOG.md)."
        )
    _check_config(file, config)
    return dict(worded(config))


def _check_config(file: Path, config: dict[str, Any]) -> None:
    try:
        known = msgspec.convert(config, RunConfig)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong(file, str(error)) from error
    if known.names is not None and len(known.names) != known.settings.clients:
        raise _wrong(file, f"it has {len(known.names)} names for {known.settings.clients} clients")
    for name, (shape, kind) in known.tensors.items():
        if not isinstance(getattr(torch, kind, None), torch.dtype):
            raise _wrong(file, f"tensor {name!r} is of type {kind!r}")
        if math.prod(shape) > _MOST_NUMBERS:
            raise _wrong(file, f"tensor {name!r} has {math.prod(shape):,} numbers; allowed: up to {_MOST_NUMBERS:,}")


def _wrong(file: Path, why: str) -> RunError:
    return RunError(
        f"{file} is not what a run is described by: {why}. It was changed by hand or damaged: restore it from a "
        "backup; nothing was changed"
    )


def _runs_in(path: Path) -> str:
    """The runs of a comparison, for somebody who named the folder of all of them."""
    runs = sorted(str(found.parent) for found in path.glob("**/config.json"))
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return f". Name one of the runs in it: {', '.join(runs[:5])}{more}" if runs else ""


def tensors_of(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The run's tensors by name, shape and type; nothing is in them, and they take no memory."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
        for name, (shape, kind) in config["tensors"].items()
    }


def split_of(config: Mapping[str, Any], path: Path) -> Split:
    """The run's split before any decision, if it fits the run's tensors."""
    file = path / "config.json"
    parsed(config["split"], _Split, f"the split in {file}")
    known = msgspec.json.decode(config["split"], type=_Split)
    if known.shapes != {name: list(shape) for name, (shape, _) in config["tensors"].items()}:
        raise _wrong(file, "its split is of other tensors than its own")
    for name, owner in known.owners.items():
        rows = Rows(owner.tensor, owner.count, owner.dim, owner.first, owner.tiles, owner.groups)
        elements = len(known.masks.get(owner.layer, ""))
        if name not in known.shapes or not _fits(rows, known.shapes[name], elements):
            raise _wrong(file, f"its split gives {name!r} to elements of {owner.layer!r} that it does not have")
    try:
        return Split.from_json(config["split"])
    except ConfigError as error:
        raise _wrong(file, str(error)) from error


def _fits(rows: Rows, shape: list[int], elements: int) -> bool:
    """Whether the elements own just the numbers of such a tensor."""
    if rows.first + rows.count > elements or rows.dim >= len(shape) or not rows.groups:
        return False
    if rows.groups == 1:
        return rows.count * rows.tiles == shape[rows.dim]
    divided = shape[0] % rows.groups == 0 and rows.count % rows.groups == 0
    return divided and len(shape) > 1 and shape[1] == rows.count // rows.groups


def masks_from(text: Any, what: str) -> dict[str, tuple[bool, ...]]:
    """The masks of a round."""
    return {layer: mask_of(mask) for layer, mask in parsed(text, dict[str, str], what).items()}


def differences(found: Mapping[str, Any], asked: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """The keys in which two settings differ, and how."""
    for key in sorted(found.keys() | asked.keys()):
        was, now = found.get(key), asked.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from differences(was, now, f"{within}{key}.")
        elif was != now:
            yield f"{within}{key} was {was!r}, now {now!r}"


def check_same_run(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Fail unless the run in the folder is the one that is asked for; says which keys differ."""
    if different := "; ".join(differences(found, asked)):
        todo = "Resume it with its own settings, or choose another folder; nothing was changed."
        raise RunError(f"{path} holds another run: {different}. {todo}")
