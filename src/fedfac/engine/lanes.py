"""The in-process engine: lanes.

A lane trains one client at a time with an unmodified copy of the model: on a CPU a thread with one
intra-op thread, on a GPU the device. Which lane a client runs on makes no difference to its numbers, and
everything that is added up is added in the order of the cohort, so results are bitwise the same for any
number of lanes.

Tensors that are shared as a whole are added to the sum as each client finishes; only what is decided by
element, or personal, waits for the split: a cohort of a thousand costs little more than a cohort of ten.
"""

from __future__ import annotations

import copy
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from fedfac.aggregate import Sums
from fedfac.anatomy import Anatomy
from fedfac.data.federation import ClientData, Federation
from fedfac.engine.store import Store
from fedfac.errors import ConfigError
from fedfac.evaluate import Metric, Score, score
from fedfac.method import Phase, Plan
from fedfac.moments import Additive
from fedfac.rules import Rule
from fedfac.split import Split
from fedfac.state import State, clone, copy_into, references
from fedfac.training import Local, Outcome, noise_of, train_client

Item = TypeVar("Item")
Job = TypeVar("Job")
Done = TypeVar("Done")


class Lane:
    """One copy of the model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = copy.deepcopy(model).to(device)
        self.state = references(self.model)
        self._holds: State | None = None

    def load(self, server: State, composed: State | None) -> None:
        """Write a client's model into the lane; the server's own state is not written twice in a row."""
        if composed is not None:
            copy_into(self.state, composed)
            self._holds = None
        elif self._holds is not server:
            copy_into(self.state, server)
            self._holds = server

    def touched(self) -> None:
        """The lane's tensors were trained: they are nobody's state any more."""
        self._holds = None


@dataclass
class _Held:
    """What one client holds between training and keeping."""

    samples: int
    before: State
    after: State


@dataclass
class _Cohort:
    """The clients that have just trained."""

    sums: State = field(default_factory=dict)
    weight: float = 0.0
    held: dict[int, _Held] = field(default_factory=dict)


class LaneEngine:
    """Clients in this process. ``lanes`` defaults to the number of cores (one on a GPU)."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        plan: Plan,
        local: Local,
        store: Store,
        *,
        seed: int,
        lanes: int | None = None,
        device: str | torch.device | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.device = pick_device(device)
        self.lanes = pick_lanes(lanes, self.device)
        on_cpu = self.device.type == "cpu"
        self.federation = federation.to(self.device)
        self.plan, self.local, self.store, self.seed = plan, local, store, seed
        self.metrics = metrics or {}
        self.layers = {layer.name: layer for layer in Anatomy.of(model).layers}
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for _ in range(self.lanes):
            self._free.put(Lane(model, self.device))
        phases = (*plan.phases, *plan.refresh)
        self.seeded = noise_of(model, phases, local, self.federation.client(0), self.device)
        self._threads_before = torch.get_num_threads()
        if on_cpu:
            torch.set_num_threads(1)  # small models lose by more, and sums must not depend on the machine
        self._pool = ThreadPoolExecutor(self.lanes, initializer=torch.set_num_threads, initargs=(1,))
        self._cohort = _Cohort()

    def train(self, round: int, server: State, split: Split, cohort: Sequence[int]) -> dict[int, Outcome]:
        """Clients train in lanes; whole shared tensors are added up in the order of the cohort."""
        now = self._cohort = _Cohort()

        def prepare(client: int) -> tuple[int, ClientData, State]:
            own = self.store.get(client) if split.kept else None
            return client, self.federation.client(client), split.overlay(server, own)

        def work(lane: Lane, job: tuple[int, ClientData, State]) -> tuple[int, Outcome, _Held]:
            client, data, composed = job
            lane.load(server, composed)
            outcome = self._train(lane, data, composed, split, self.plan.phases, round, client, "train")
            before = {name: composed[name] for name in split.owners}
            after = {} if outcome.problem else clone(lane.state)
            return client, outcome, _Held(outcome.samples, before, after)

        outcomes: dict[int, Outcome] = {}
        for client, outcome, held in self._in_order(cohort, prepare, work):
            outcomes[client] = outcome
            if outcome.problem is None:
                whole = {name: held.after.pop(name) for name in list(held.after) if name not in split.kept}
                _add(now.sums, whole, held.samples)
                now.weight += held.samples
                now.held[client] = held
        return outcomes

    def moments(self, rule: Rule) -> dict[str, Additive]:
        """Clients measure in lanes; the sum is in the order of the cohort."""
        totals: dict[str, Additive] = {}
        names = [name for name in rule.tau if name in self.layers]

        def measure(lane: Lane, held: _Held) -> dict[str, Additive | None]:  # noqa: ARG001
            return {name: rule.measure(self.layers[name], held.before, held.after) for name in names}

        for measured in self._in_order(self._cohort.held.values(), lambda held: held, measure):
            for name, value in measured.items():
                if value is not None:
                    totals[name] = totals[name] + value if name in totals else value
        return totals

    def collect(self, split: Split) -> Sums:
        """The sums that were waiting, and of the other tensors what the split shares."""
        values = dict(self._cohort.sums)
        for held in self._cohort.held.values():
            _add(values, split.shared(held.after), held.samples)
        return Sums(values, self._cohort.weight)

    def keep(self, split: Split) -> None:
        """Every client of the cohort stores its own tensors."""
        if split.kept:
            for client, held in self._cohort.held.items():
                self.store.put(client, {name: held.after[name].cpu() for name in sorted(split.kept)})
        self._cohort = _Cohort()

    def evaluate(self, round: int, server: State, split: Split, clients: Sequence[int]) -> dict[str, list[Score]]:
        """Each client's composed (and, if the method says so, refreshed) model on its held-out samples."""

        def prepare(client: int) -> tuple[int, ClientData, State | None]:
            own = self.store.get(client) if split.kept else None
            composed = split.overlay(server, own) if own else None
            return client, self.federation.client(client), composed

        def work(lane: Lane, job: tuple[int, ClientData, State | None]) -> dict[str, Score]:
            client, data, composed = job
            lane.load(server, composed)
            if self.plan.refresh:
                start = composed or server
                tuned = self._train(lane, data, start, split, self.plan.refresh, round, client, "refresh")
                if tuned.problem is not None:  # a copy that did not stay finite is thrown away at once
                    lane.load(server, composed)
            parts = {"test": data.test, "validation": data.validation}
            loss, classes = self.local.loss, self.federation.classes
            return {
                part: score(lane.model, client, data.pool, index, loss, classes, self.metrics)
                for part, index in parts.items()
                if part == "test" or len(index)
            }

        found: dict[str, list[Score]] = {"test": []}
        for scores in self._in_order(clients, prepare, work):
            for part, value in scores.items():
                found.setdefault(part, []).append(value)
        return found

    def close(self) -> None:
        """Wait for running clients, drop the others, and give the cores back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def _train(
        self,
        lane: Lane,
        data: ClientData,
        start: State,
        split: Split,
        phases: Sequence[Phase],
        round: int,
        client: int,
        purpose: str,
    ) -> Outcome:
        lane.touched()
        return train_client(
            lane.model,
            lane.state,
            data,
            phases,
            self.local,
            received=start,
            split=split,
            seeded=self.seeded,
            seed=self.seed,
            round=round,
            client=client,
            device=self.device,
            purpose=purpose,
        )

    def _in_order(
        self, items: Iterable[Item], prepare: Callable[[Item], Job], work: Callable[[Lane, Job], Done]
    ) -> Iterator[Done]:
        """Map over lanes; results come in the order of the items, and only a few wait at a time."""

        def on_lane(job: Job) -> Done:
            lane = self._free.get()
            try:
                return work(lane, job)
            finally:
                self._free.put(lane)

        waiting: deque[Future[Done]] = deque()
        try:
            for item in items:
                if len(waiting) >= 3 * self.lanes:
                    yield waiting.popleft().result()
                waiting.append(self._pool.submit(on_lane, prepare(item)))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; by default a GPU if there is one."""
    if device is not None and str(device) != "auto":
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"device is {device!r}: {error}") from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_lanes(lanes: int | None, device: torch.device) -> int:
    """The number of lanes asked for; by default the number of cores, and one on a GPU."""
    if lanes is not None:
        if lanes < 1:
            raise ConfigError(f"lanes is {lanes}; at least one client must be trained at a time")
        return lanes
    if device.type != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@torch.no_grad()
def _add(sums: State, part: State, weight: int) -> None:
    for name, tensor in part.items():
        if name in sums:
            sums[name].add_(tensor.double(), alpha=weight)
        else:
            sums[name] = tensor.double() * weight
