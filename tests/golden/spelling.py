"""How this version of fedfac runs a case, and where it keeps what came out: all that a rebuilt house has to adapt.

What comes out is an :class:`record.Outcome`: flat records without times, and tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import loopback
import torch
import torch.nn.functional as F
from cases import AnyCase, Case, Chosen, Network, Together
from problems import Problem, problem
from record import Outcome
from torch import Tensor

import fedfac
from fedfac import comparison, experiment, methods
from fedfac.deploy.export import export
from fedfac.method import Method
from fedfac.newcomers import serve
from fedfac.options import value_of
from fedfac.result import Result
from fedfac.state import references

Record = dict[str, Any]
LANES, RESUMED, ALONE = "two lanes", "resumed", "each by itself"  # ways that must come to the same

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "cohort": 4,
    "epochs": 1,
    "batch_size": 8,
    "lr": 0.01,
    "evaluate_every": 1,
    "device": "cpu",
}
TABLES: dict[str, Any] = {
    "data": {"name": "digits", "clients": 6, "alpha": 0.5, "validation_share": 0.2},
    "model": {"name": "mlp", "hidden": 12},
    "train": {"rounds": 3, "cohort": 4, "epochs": 1, "newcomers": 0.2, "evaluate_every": 1},
}
CHOICE = ("metric", "cost", "layers")
TRIAL = ("figure", "behind", "error", "rounds", "personal")

# What of a record is compared. Other keys are listed as added ones.
ROUND = frozenset(
    {"round", "cohort", "left_out", "samples", "train_loss", "shared_share", "skipped", "not_tested", "split"}
)
LAYER = frozenset({"elements", "shared", "kept", "tau", "factors", "iterations", "converged", "stopped", "dead"})
FIGURES = frozenset(
    {"model", "clients", "samples", "loss", "accuracy", "mean", "std", "median", "worst_decile", "jain"}
    | {"mse", "mae", "r2"}
)


def ways(case: AnyCase) -> tuple[str, ...]:
    """The ways to run a case beside the plain one."""
    if isinstance(case, Case):
        return LANES, RESUMED
    return (ALONE,) if isinstance(case, Together) else ()


def run(case: AnyCase, folder: Path, way: str | None = None) -> Outcome:
    """Run a case in an empty folder."""
    if isinstance(case, Case):
        return _fit(case, folder, way)
    if isinstance(case, Together):
        return _together(case, folder, alone=way == ALONE)
    return _chosen(case) if isinstance(case, Chosen) else _network(case, folder)


def method(spelled: str, options: Mapping[str, Any]) -> Method:
    """A method from its text, and options that a text cannot spell."""
    if spelled == "given":
        return methods.given_split(**options)
    name, texts = comparison.parse_method(spelled)
    known = methods.options_of(name)
    read = {option: value_of(name, option, text, known) for option, text in texts.items()}
    return methods.build(name, {**read, **options})


def _fit(case: Case, folder: Path, way: str | None) -> Outcome:
    posed, chosen = problem(case.on), method(case.method, case.options)
    federation = _federation(posed)
    settings: dict[str, Any] = {**SETTINGS, "loss": _loss(posed), "lanes": 2 if way == LANES else 1, **case.settings}
    if way != RESUMED:
        result = fedfac.fit(posed.model(), federation, method=chosen, **settings)
        return _outcome(result, posed)
    seen: list[int] = []
    fedfac.fit(
        posed.model(),
        federation,
        method=chosen,
        out=folder / "run",
        on_round=lambda record: seen.append(record["round"]),
        should_stop=lambda: seen[-1] == 1,
        **settings,
    )
    fedfac.fit(posed.model(), federation, method=chosen, out=folder / "run", resume=True, **settings)
    loaded = fedfac.load(folder / "run", posed.model(), method=chosen, federation=federation, loss=_loss(posed))
    return _outcome(loaded, posed)


def _together(case: Together, folder: Path, *, alone: bool) -> Outcome:
    plan = comparison.plan(folder / "compared", methods=list(case.methods.values()), tables=TABLES)
    if not alone:
        failed = comparison.train(plan, lanes=1, device="cpu")
        if failed:
            raise RuntimeError(f"runs of a comparison failed: {failed}")
    outcomes = []
    for label, cell in zip(case.methods, plan.cells, strict=True):
        if alone:
            experiment.run(cell.config, out=cell.folder, lanes=1, device="cpu")
        result = fedfac.load(cell.folder)
        outcomes.append(_named(label, _outcome(result, None)))
    return _joined(outcomes)


def _chosen(case: Chosen) -> Outcome:
    posed = problem(case.on)
    federation = _federation(posed)
    asked = {key: SETTINGS[key] for key in ("cohort", "epochs", "batch_size", "lr", "device")}
    choice = fedfac.choose(posed.model(), federation, rounds=10, trial_rounds=60, lanes=1, loss=_loss(posed), **asked)
    told = choice.to_dict()
    table = {key: told[key] for key in CHOICE}
    table |= {f"trial {n}.{key}": trial[key] for n, trial in enumerate(told["trials"]) for key in TRIAL}
    result = fedfac.fit(
        posed.model(), federation, method=choice.method, **{**SETTINGS, "lanes": 1, "loss": _loss(posed)}
    )
    outcome = _outcome(result, posed)
    return Outcome(records=[table, *outcome.records], added=outcome.added, tensors=outcome.tensors)


def _network(case: Network, folder: Path) -> Outcome:
    changes = {f"method__{key}": value for key, value in case.options.items()}
    result = loopback.over_the_wire(loopback.deployment(case.method, **changes), folder)
    tensors = {f"server/{name}": tensor for name, tensor in result.server.items()}
    for client in range(loopback.CLIENTS):
        export(folder / str(client), folder / f"model-{client}")
        own = fedfac.load(folder / f"model-{client}").model(str(client))
        tensors |= {f"model/{client}/{name}": tensor for name, tensor in references(own).items()}
    records, added = _records(result)
    return Outcome(records=records, added=added, tensors=tensors)


def _federation(posed: Problem) -> fedfac.Federation:
    return fedfac.Federation.from_arrays(posed.clients, classes=posed.classes, validation_share=0.2)


def _loss(posed: Problem) -> Callable[[Any, Tensor], Tensor]:
    return F.mse_loss if posed.classes is None else F.cross_entropy


def _outcome(result: Result, posed: Problem | None) -> Outcome:
    """Of a run in this process."""
    records, added = _records(result)
    tensors = dict(_tensors(result, posed))
    if posed is not None and result.newcomers:
        served = serve(result, lanes=1, device="cpu")
        records.append({f"served.{rule}.{key}": value for rule, own in served.items() for key, value in own.items()})
    return Outcome(records=records, added=added, tensors=tensors)


@torch.no_grad()
def _tensors(result: Result, posed: Problem | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in result.server.items():
        yield f"server/{name}", tensor
    for client in range(len(result.names)):
        for name, tensor in (result.store.get(client) or {}).items():
            yield f"personal/{client}/{name}", tensor
        for name, tensor in result.state(client).items():
            yield f"composed/{client}/{name}", tensor
        predicts = result.model(client)  # refreshed, where the method does that
        for name, tensor in references(predicts).items():
            yield f"model/{client}/{name}", tensor
        if posed is not None:
            yield f"predictions/{client}", predicts(posed.batch)
    if posed is not None and result.newcomers:
        for client in result.newcomers:
            adapted = result.adapt(posed.clients[str(client)], client=client)
            yield f"adapted/{client}", adapted(posed.batch)
        yield "ensemble", result.ensemble()(posed.batch)


def _records(result: Result) -> tuple[list[Record], frozenset[str]]:
    """The records and masks of a result, and the keys that are not compared."""
    records: list[Record] = []
    added: set[str] = set()
    for record in result.records:
        flat = dict(_flat(record))
        masks = result.masks[record["round"]]
        known = {key: value for key, value in flat.items() if _is_known(key)}
        added |= flat.keys() - known.keys()
        records.append(known | {f"mask.{layer}": _text(mask) for layer, mask in masks.items()})
    return records, frozenset(added)


def _flat(table: Mapping[str, Any], within: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Nested tables as one, with | between the keys: names of layers have dots."""
    for key, value in table.items():
        path = (*within, str(key))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path)
        elif isinstance(value, float) and not math.isfinite(value):
            yield "|".join(path), str(value)
        else:
            yield "|".join(path), value


def _is_known(key: str) -> bool:
    first, *rest = key.split("|")
    if first == "split" and rest:
        return rest[-1] in LAYER
    if first in ("test", "validation", "newcomers") and rest:
        return rest[-1] in FIGURES
    return first in ROUND


def _text(mask: tuple[bool, ...]) -> str:
    return "".join("1" if shared else "0" for shared in mask)


def _named(label: str, outcome: Outcome) -> Outcome:
    """The same, as one of several."""
    parts = {name: name.partition("/") for name in outcome.tensors}
    return Outcome(
        records=[{"run": label, **record} for record in outcome.records],
        added=outcome.added,
        tensors={f"{part}/{label}/{rest}": outcome.tensors[name] for name, (part, _, rest) in parts.items()},
    )


def _joined(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        records=[record for outcome in outcomes for record in outcome.records],
        added=frozenset[str]().union(*(outcome.added for outcome in outcomes)),
        tensors={name: tensor for outcome in outcomes for name, tensor in outcome.tensors.items()},
    )
