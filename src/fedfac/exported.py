"""One client's model in a folder of its own: weights as safetensors, and a config that says how it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import nn

from fedfac import methods, models
from fedfac.engine.store import MemoryStore
from fedfac.errors import ModelError, RunError
from fedfac.limits import fitting, read_json
from fedfac.result import Result
from fedfac.split import Split
from fedfac.state import State, check_same_tensors, from_file, nbytes, references

FORMAT = "fedfac model 2"
CONFIG, WEIGHTS = "model.json", "model.safetensors"
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the config says."""

    client: str
    model: dict[str, Any]  # the network's name and options
    method: dict[str, Any]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]  # of a sample
    classes: _Size | None
    split: str
    format: str = FORMAT
    version: str = ""
    run: str = ""
    round: int = 0


def is_exported(path: str | Path) -> bool:
    """Whether the folder holds one client's model."""
    return (Path(path) / CONFIG).exists()


def load(path: str | Path, model: nn.Module | None = None, *, trust_code: bool = False) -> Result:
    """The client's model as a result that has this one client.

    ``model`` is needed only if the network cannot be built by its name here; its weights do not matter. A folder that
    names a function (``module:function``) is read with ``model``, or with ``trust_code``: building it runs that code.
    """
    path = Path(path)
    about = _about(path)
    try:
        state = from_file(path / WEIGHTS)
    except OSError as error:
        raise RunError(f"{path} does not hold a whole model: {error}") from error
    model = _built(path, about, state, trust_code=trust_code) if model is None else model
    options = {k: v for k, v in about.method.items() if k != "name"}
    template = methods.build(_named(path, "method", about.method), options).wrapped(model)
    check_same_tensors(references(template), state)
    return Result(
        template=template,
        server=state,
        split=_split(path, about.split, state),
        store=MemoryStore(),
        names=[about.client],
        records=[],
        masks={},
        clients=[],
        path=path,
        finished=True,
    )


def _about(path: Path) -> About:
    found = read_json(path / CONFIG, dict[str, Any], what="the config of a model", error=RunError)
    if found.get("format") != FORMAT:
        raise RunError(
            f"{path} is of format {found.get('format')!r}; this version of fedfac reads {FORMAT!r}. "
            f"Use the version that wrote it ({found.get('version', 'unknown')}), or export the model of a new run: "
            "options of methods have other names now (CHANGELOG.md)."
        )
    return fitting(found, About, str(path / CONFIG))


def _built(path: Path, about: About, state: State, *, trust_code: bool) -> nn.Module:
    """The network; one that is larger than the weights is not even built."""
    name = _named(path, "model", about.model)
    models.check_trusted(name, trust_code=trust_code)
    options = {k: v for k, v in about.model.items() if k not in ("name", "weights")}
    given = {"shape": about.shape, "classes": about.classes or 1, **options}
    if set(options) <= set(models.options_of(name)) and models.bytes_of(name, **given) > nbytes(state):
        raise ModelError(f"the model {name!r} of {path / CONFIG} does not fit the checkpoint: it is larger")
    return models.build(name, seed=0, **given)


def _named(path: Path, what: str, table: dict[str, Any]) -> str:
    name = table.get("name")
    if not isinstance(name, str):
        raise RunError(f"{path / CONFIG}: the name of the {what} is {name!r}; it must be text")
    return name


def _split(path: Path, text: str, state: State) -> Split:
    """The split, of exactly the tensors that there are."""
    split = Split.from_json(text)
    if dict(split.shapes) != {name: tuple(tensor.shape) for name, tensor in state.items()}:
        raise RunError(f"{path / CONFIG}: the split is of other tensors than the weights")
    return split
