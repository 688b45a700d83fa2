"""fit(): the one round loop.

1 draw a cohort                     uniform, without replacement, from (seed, round)
2 train                             clients train; results stay with them
3 measure and decide                only sums reach the rule; it makes the new split
4 collect and aggregate             Σ n_k·shared, Σ n_k
5 keep                              clients store what is personal
6 evaluate, record, commit          a round is wholly on disk, or not at all
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedfac import evaluate
from fedfac.aggregate import aggregate
from fedfac.anatomy import Anatomy
from fedfac.data.federation import Federation, are_numbers
from fedfac.engine.lanes import LaneEngine, pick_device, pick_lanes
from fedfac.engine.protocol import Engine, Score
from fedfac.engine.store import MemoryStore, Store
from fedfac.errors import ConfigError, ModelError, TrainingError
from fedfac.method import Loss, Method, Plan
from fedfac.methods import fedfac as default_method
from fedfac.result import Result
from fedfac.rules import Decision, decide
from fedfac.run import RunDirectory, check_same_run, read_config
from fedfac.seeds import stream
from fedfac.split import Split
from fedfac.state import State, check_same_tensors, state_of
from fedfac.training import Local, Outcome

Record = dict[str, Any]


def fit(
    model: nn.Module,
    federation: Federation,
    *,
    method: Method | None = None,
    rounds: int = 50,
    rate: float | None = None,
    cohort: int | None = None,
    epochs: int = 5,
    batch_size: int = 32,
    lr: float = 1e-3,
    optimizer: str = "adam",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    evaluate_every: int = 1,
    evaluate_clients: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    on_round: Callable[[Record], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    engine: Callable[[LaneEngine], Engine] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Result:
    """Train a personalised model for every client of a federation.

    Parameters
    ----------
    model
        Any ``nn.Module``. Its present weights are the common start W⁰; the module itself is not changed.
    federation
        The clients' data.
    method
        For example ``fedfac.methods.fedfac(layers=[2], tau="50%")``; dynamic FedFac on the last hidden
        layer by default.
    rounds
        Communication rounds, T.
    rate, cohort
        The share of clients that train in a round, or their number. By default a tenth of them, but at
        least ten (all of them if there are fewer).
    epochs, batch_size, lr, optimizer, momentum, weight_decay, loss
        Local training. The paper: Adam at 1e-3, reset every round.
    seed
        Everything random is a function of it.
    evaluate_every, evaluate_clients
        Test every so many rounds (and after the last one), on all clients or on that many of them.
    out, resume
        The run directory, and whether to go on with the run that is in it.
    lanes, device
        How many clients train at a time, and where. They do not change the results (``lanes``) or only
        their rounding (``device``).
    on_round
        Called with the record of every round.
    should_stop
        Asked after every round; True ends the run there. It can be resumed.
    engine
        Wraps the in-process engine, for instance to watch what crosses the line to the server.
    origin
        What the command line was asked for, so that it can rebuild the run.
    """
    method = default_method() if method is None else method
    local = Local(
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        loss=loss,
    )
    _at_least_one(rounds=rounds, evaluate_every=evaluate_every)
    size = cohort_size(len(federation), rate, cohort)
    device = pick_device(device)
    lanes = pick_lanes(lanes, device)
    template = copy.deepcopy(model)
    template = method.wrap(template) if method.wrap else template
    plan = method.plan(Anatomy.of(template))
    start = state_of(template)
    check_fits(template, federation, local)
    asked = _json_like(
        {
            "method": method.describe(),
            "local": {k: v for k, v in vars(local).items() if k != "loss"} | {"loss": _name_of(loss)},
            "cohort": size,
            "seed": seed,
            "evaluate_every": evaluate_every,
            "evaluate_clients": evaluate_clients,
            "clients": len(federation),
            "data": federation.fingerprint,
        }
    )
    identity = {
        "settings": asked,
        "tensors": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in start.items()},
        "split": plan.split.to_json(),
        "names": None if are_numbers(federation.names) else list(federation.names),
    }
    run = _open_run(out, resume, identity, start, rounds, origin)
    inner: LaneEngine | None = None
    try:
        inner = LaneEngine(
            template,
            federation,
            plan.phases,
            local,
            run or MemoryStore(),
            seed=seed,
            lanes=lanes,
            device=device,
        )
        loop = _Loop(
            engine=inner if engine is None else engine(inner),
            run=run,
            plan=plan,
            rate=method.server_rate,
            seed=seed,
            clients=len(federation),
            cohort=size,
            tested=_tested(len(federation), evaluate_clients, seed),
            names=federation.names,
            start={name: t.to(inner.device) for name, t in start.items()},
        )
        last = loop.first_round
        for number in range(loop.first_round, rounds + 1):
            loop.round(number, test=number % evaluate_every == 0 or number == rounds, notify=on_round)
            last = number
            if should_stop is not None and should_stop():
                break
    finally:
        if inner is not None:
            inner.close()
        if run is not None:
            run.close()
    store: Store = RunDirectory.read(run.path) if run is not None else inner.store
    return Result(
        template=template,
        server={name: t.cpu() for name, t in loop.server.items()},
        split=loop.split,
        store=store,
        names=federation.names,
        records=loop.records,
        masks=loop.masks,
        clients=loop.client_table,
        path=None if run is None else run.path,
        finished=last >= rounds,
    )


class _Loop:
    """The server's side between rounds: its state, the split, and what has been recorded."""

    def __init__(
        self,
        *,
        engine: Engine,
        run: RunDirectory | None,
        plan: Plan,
        rate: float,
        seed: int,
        clients: int,
        cohort: int,
        tested: list[int],
        names: Any,
        start: State,
    ) -> None:
        self.engine, self.run, self.plan, self.rate, self.seed = engine, run, plan, rate, seed
        self.clients, self.cohort, self.tested, self.names = clients, cohort, tested, names
        self.server, self.split = start, plan.split
        self.records: list[Record] = []
        self.masks: dict[int, Mapping[str, tuple[bool, ...]]] = {}
        self.client_table: list[dict[str, Any]] = []
        decides_once = plan.rule is not None and not plan.every_round
        self.first_round = 0 if decides_once else 1
        saved = None if run is None else run.checkpoint()
        if run is not None and saved is not None:
            self.server = {name: t.to(start[name].device) for name, t in saved.server.items()}
            self.split = plan.split.with_masks(saved.masks)
            self.records, self.masks = run.records(), dict(run.masks())
            self.client_table = run.clients()
            self.first_round = saved.round + 1

    def round(self, number: int, *, test: bool, notify: Callable[[Record], None] | None) -> None:
        """One round; number 0 is the static methods' decision before the first one."""
        clock = _Clock()
        before = self.split
        rule = self.plan.rule
        decision: Decision | None = None
        outcomes: dict[int, Outcome] = {}
        record: Record = {"round": number}

        if number > 0 or (rule is not None and rule.measures):
            everyone = number == 0 and self.plan.probe_all
            cohort = (
                list(range(self.clients)) if everyone else draw_cohort(self.clients, self.cohort, self.seed, number)
            )
            outcomes = self.engine.train(number, self.server, self.split, cohort)
            record |= _training_record(outcomes, self.names)
            if all(o.problem for o in outcomes.values()):
                if self.run is not None:
                    self.run.rollback()
                problems = sorted({str(o.problem) for o in outcomes.values()})
                raise TrainingError(
                    f"round {number}: no client of the cohort trained to finite numbers ({'; '.join(problems)}). "
                    "Lower the learning rate or look at the data; the last good round is saved."
                )
            clock.lap("train")
        if rule is not None and (number == 0 or self.plan.every_round):
            sums = self.engine.moments(rule) if rule.measures else {}
            clock.lap("moments")
            decision = decide(rule, self.split, sums, seed=self.seed, round=number)
            self.split = decision.split
            clock.lap("decide")
        if number > 0:
            total = self.engine.collect(self.split)
            self.server = aggregate(self.server, total, self.split, before=before, rate=self.rate)
            self.engine.keep(self.split)
            clock.lap("aggregate")
        record["shared_share"] = self.split.shared_share
        record["split"] = _split_record(self.split, before, decision)
        scores: list[Score] | None = None
        if test and number > 0:
            scores = self.engine.evaluate(self.server, self.split, self.tested)
            record["test"] = evaluate.summary(scores)
            self.client_table = evaluate.table(scores, self.names)
            clock.lap("evaluate")
        self.records.append(record)
        self.masks[number] = self.split.masks
        if self.run is not None:
            self.run.commit(
                record,
                self.server,
                self.split,
                scores={} if decision is None else decision.scores,
                clients=None if scores is None else self.client_table,
                timing=clock.seconds,
            )
        if notify is not None:
            notify(record | {"seconds": sum(clock.seconds.values())})


class _Clock:
    """Seconds by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, step: str) -> None:
        now = perf_counter()
        self.seconds[step] = round(now - self._last, 6)
        self._last = now


def draw_cohort(clients: int, size: int, seed: int, round: int) -> list[int]:
    """The clients of one round, in ascending order (sums are taken in this order)."""
    return sorted(stream(seed, "cohort", round).choice(clients, size, replace=False, shuffle=False).tolist())


def cohort_size(clients: int, rate: float | None, cohort: int | None) -> int:
    """K = max(1, ⌊rate·C⌋), or the number asked for.

    >>> cohort_size(100, 0.1, None), cohort_size(4, None, None), cohort_size(1000, None, None)
    (10, 4, 100)
    """
    if cohort is not None:
        if rate is not None:
            raise ConfigError(f"both rate={rate} and cohort={cohort} were given; give one of them")
        if not 1 <= cohort <= clients:
            raise ConfigError(f"a cohort of {cohort} clients was asked for; the federation has {clients}")
        return cohort
    if rate is None:
        return min(clients, max(10, clients // 10))
    if not 0 < rate <= 1:
        raise ConfigError(f"rate is {rate}; it is the share of clients in a round, above 0 and at most 1")
    return max(1, math.floor(rate * clients + 1e-9))


@torch.no_grad()
def check_fits(model: nn.Module, federation: Federation, local: Local) -> None:
    """Run two samples through a copy of the model and fail now rather than in round one."""
    data = federation.client(0)
    inputs, targets = data.pool.batch(data.train[:2])
    trial = copy.deepcopy(model).eval()
    given = f"inputs of shape {tuple(inputs.shape)} and type {inputs.dtype}"
    try:
        outputs = trial(inputs)
    except Exception as error:
        raise ModelError(
            f"the model cannot be run on the data: {given} gave {type(error).__name__}: {error}"
        ) from error
    classes = federation.classes
    if classes is not None and isinstance(outputs, torch.Tensor):
        shape = tuple(outputs.shape)
        if len(shape) < 2 or shape[0] != len(inputs) or shape[1] < classes:
            raise ModelError(
                f"the model's output does not fit the classes: {given} gave {shape}, but {classes} classes "
                f"need ({len(inputs)}, {classes}) or more columns"
            )
    try:
        value = local.loss(outputs, targets)
    except Exception as error:
        raise ModelError(
            f"the loss {_name_of(local.loss)} cannot be taken of the model's output and targets of shape "
            f"{tuple(targets.shape)} and type {targets.dtype}: {error}"
        ) from error
    if value.numel() != 1:
        raise ModelError(f"the loss {_name_of(local.loss)} gives {tuple(value.shape)}; it must give one number, a mean")


def _open_run(
    out: str | Path | None,
    resume: bool,
    identity: dict[str, Any],
    start: State,
    rounds: int,
    origin: Mapping[str, Any] | None,
) -> RunDirectory | None:
    from fedfac import __version__

    if out is None:
        if resume:
            raise ConfigError("resume=True needs out=, the folder of the run to go on with")
        return None
    if not resume:
        config = {"version": __version__, "rounds": rounds, **identity, "origin": origin}
        return RunDirectory.create(out, _json_like(config))
    found = read_config(out)
    empty = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in found["tensors"].items()}
    check_same_tensors(start, empty)
    check_same_run(Path(out), found["settings"], identity["settings"])
    return RunDirectory.resume(out, rounds=rounds)


def _training_record(outcomes: Mapping[int, Outcome], names: Any) -> Record:
    good = {client: o for client, o in outcomes.items() if o.problem is None}
    samples = sum(o.samples for o in good.values())
    return {
        "cohort": list(outcomes),
        "left_out": {names[client]: o.problem for client, o in outcomes.items() if o.problem is not None},
        "samples": samples,
        "train_loss": sum(o.loss * o.samples for o in good.values()) / samples if samples else None,
    }


def _split_record(split: Split, before: Split, decision: Decision | None) -> Record:
    changes = split.diff(before)
    return {
        layer: {
            "elements": len(mask),
            "shared": sum(mask),
            "kept": changes[layer].kept,
            **({} if decision is None else decision.notes[layer]),
        }
        for layer, mask in split.masks.items()
    }


def _tested(clients: int, number: int | None, seed: int) -> list[int]:
    if number is None or number >= clients:
        return list(range(clients))
    _at_least_one(evaluate_clients=number)
    return sorted(stream(seed, "tested").choice(clients, number, replace=False, shuffle=False).tolist())


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it is a whole number from 1 up")


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _json_like(value: Any) -> Any:
    """The value as it will be read back from JSON, so that comparisons are exact."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise ConfigError(f"the options of a method must be plain values that JSON can hold: {error}") from error
