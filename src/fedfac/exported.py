"""One client's model in a folder of its own: weights as safetensors, and a config that says how it is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from fedfac import methods, models
from fedfac.engine.store import MemoryStore
from fedfac.errors import RunError
from fedfac.result import Result
from fedfac.split import Split
from fedfac.state import check_same_tensors, from_bytes, references

FORMAT = "fedfac model 1"
CONFIG, WEIGHTS = "model.json", "model.safetensors"


def is_exported(path: str | Path) -> bool:
    """Whether the folder holds one client's model."""
    return (Path(path) / CONFIG).exists()


def load(path: str | Path, model: nn.Module | None = None, *, trust_code: bool = False) -> Result:
    """The client's model as a result that has this one client.

    ``model`` is needed only if the network cannot be built by its name here; its weights do not matter. A folder that
    names a function (``module:function``) is read with ``model``, or with ``trust_code``: building it runs that code.
    """
    path = Path(path)
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text())
        state = from_bytes((path / WEIGHTS).read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} does not hold a whole model: {error}") from error
    if config.get("format") != FORMAT:
        raise RunError(f"{path} is of format {config.get('format')!r}; this version of fedfac reads {FORMAT!r}")
    if model is None:
        models.check_trusted(config["model"]["name"], trust_code=trust_code)
        options = {k: v for k, v in config["model"].items() if k not in ("name", "weights")}
        shape, classes = tuple(config["shape"]), config["classes"] or 1
        model = models.build(config["model"]["name"], shape=shape, classes=classes, seed=0, **options)
    options = {k: v for k, v in config["method"].items() if k != "name"}
    wrap = methods.build(config["method"]["name"], options).wrap
    template = wrap(model) if wrap is not None else model
    check_same_tensors(references(template), state)
    return Result(
        template=template,
        server=state,
        split=Split.from_json(config["split"]),
        store=MemoryStore(),
        names=[config["client"]],
        records=[],
        masks={},
        clients=[],
        path=path,
        finished=True,
    )
