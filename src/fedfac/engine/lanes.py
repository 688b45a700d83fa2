"""The in-process engine: lanes.

A lane trains one client at a time with an unmodified copy of the model: on a CPU a thread with one
intra-op thread, on a GPU a stream with captured graphs (``graphs``). Small fully connected models go through a lane
in groups of clients (``stacked``). Which lane a client runs on makes no difference to its numbers, and
everything that is added up is added in the order of the cohort, so results are bitwise the same for any
number of lanes (on a GPU: if its kernels are deterministic).

Tensors that are shared as a whole are added to the sum as each client finishes; only what is decided by
element, or personal, waits for the split: a cohort of a thousand costs little more than a cohort of ten.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from fedfac.aggregate import Sums
from fedfac.anatomy import Anatomy
from fedfac.data.federation import Federation
from fedfac.engine import stacked
from fedfac.engine.graphs import Gate, fillable
from fedfac.engine.lane import Lane, numbers_of
from fedfac.engine.store import Store
from fedfac.errors import ConfigError
from fedfac.evaluate import Metric, Score
from fedfac.method import Phase, Plan
from fedfac.moments import Additive
from fedfac.numerics import Numerics
from fedfac.rules import Rule
from fedfac.split import Split
from fedfac.state import State, clone, copy_into
from fedfac.training import Local, Outcome, noise_of, train_client

Item = TypeVar("Item")
Job = TypeVar("Job")
Done = TypeVar("Done")


CUDA_LANES = 10  # streams; the usual cohort
TESTED = 8  # clients that a lane is told to test before it is the next one's turn


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


@dataclass(frozen=True)
class _Lanes:
    """Lanes, and who may use them: on a CPU one thread each."""

    gate: Gate
    all: list[Lane]
    free: queue.SimpleQueue[Lane]
    pool: ThreadPoolExecutor


class LaneEngine:
    """Clients in this process. ``lanes`` defaults to the number of cores, and to ten streams on a GPU.

    ``stack`` None stacks the clients of small fully connected models by a fixed rule; True insists, False never does.
    ``beside`` is an engine that outlives this one and never works at the same time: its lanes, and on a GPU their
    graphs, are used if they are of the same federation, tensors and local training.
    """

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
        numerics: Numerics | None = None,
        stack: bool | None = None,
        metrics: Mapping[str, Metric] | None = None,
        beside: LaneEngine | None = None,
    ) -> None:
        self.numerics = numerics or Numerics.choose(model, pick_device(None))
        self.device = self.numerics.device
        self.lanes = pick_lanes(lanes, self.device)
        anatomy = Anatomy.of(model)
        self._made_for = federation, anatomy.shapes, local, self.numerics, self.lanes
        lender = beside if beside is not None and beside._made_for == self._made_for else None
        self.federation: Federation = federation.to(self.device) if lender is None else lender.federation
        self.plan, self.local, self.store, self.seed = plan, local, store, seed
        self.metrics = metrics or {}
        self.lent: frozenset[str] = frozenset()  # tensors of the cohort that others ask about once the round is over
        self.layers = {layer.name: layer for layer in anatomy.layers}
        phases = (*plan.training.phases, *plan.prediction.refresh, *plan.prediction.newcomer)
        self.seeded = noise_of(model, phases, local, self.federation.client(0), self.device)
        reason = stacked.why_not(model, phases, self.federation.client(0), self.seeded)
        if stack and reason is not None:
            raise ConfigError(f"the clients of this model cannot be stacked: {reason}. Leave out stack=True.")
        self.stacked = reason is None and stack is not False
        self._borrows = lender is not None
        self._lanes: _Lanes = self._made_lanes(model) if lender is None else lender._lanes
        self._threads_before = torch.get_num_threads()
        # small models lose by more, sums must not depend on the machine, and a small eigenproblem that is split among
        # the threads of a busy machine takes a hundred times as long
        torch.set_num_threads(1)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._switches = ExitStack()
        self._switches.enter_context(self.numerics.backend())
        self._cohort = _Cohort()

    def _made_lanes(self, model: nn.Module) -> _Lanes:
        client, numerics, loss = self.federation.client(0), self.numerics, self.local.loss
        fills = self.device.type == "cuda" and fillable(model, client, self.local, self.seeded, numerics)
        gate, numbers = Gate(), numbers_of(self.federation)
        made = [Lane(model, numerics, gate, self.federation, loss, numbers, fills) for _ in range(self.lanes)]
        free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in made:
            free.put(lane)
        return _Lanes(
            gate, made, free, ThreadPoolExecutor(self.lanes, initializer=torch.set_num_threads, initargs=(1,))
        )

    def train(self, round: int, server: State, split: Split, cohort: Sequence[int]) -> dict[int, Outcome]:
        """Clients train in lanes; whole shared tensors are added up in the order of the cohort."""
        now = self._cohort = _Cohort()

        def prepare(group: Sequence[int]) -> list[stacked.Client]:
            return [
                stacked.Client(
                    client,
                    self.federation.client(client),
                    split.overlay(server, self.store.get(client) if split.kept else None),
                )
                for client in group
            ]

        def work(lane: Lane, group: list[stacked.Client]) -> list[tuple[int, Outcome, _Held]]:
            trained = self._train(lane, group, split, self.plan.training.phases, round, "train")
            done = []
            for client, (outcome, after) in zip(group, trained, strict=True):
                before = {name: client.start[name] for name in self.lent.union(split.owners)}
                kept = {} if outcome.problem else hand_over(after, self.device)
                done.append((client.number, outcome, _Held(outcome.samples, before, kept)))
            return done

        outcomes: dict[int, Outcome] = {}
        apart = split.personal_tensors | split.owners.keys()
        waits = apart | split.kept | self.lent
        for done in self._in_order(_groups(cohort, stacked.GROUP if self.stacked else 1), prepare, work):
            for client, outcome, held in done:
                outcomes[client] = outcome
                if outcome.problem is None:
                    whole = {name: tensor for name, tensor in held.after.items() if name not in apart}
                    held.after = {name: tensor for name, tensor in held.after.items() if name in waits}
                    _add(now.sums, whole, held.samples)
                    now.weight += held.samples
                    now.held[client] = held
        return outcomes

    def moments(self, rule: Rule) -> dict[str, Additive]:
        """Clients measure in lanes; the sum is in the order of the cohort."""
        totals: dict[str, Additive] = {}
        names = [name for name in rule.tau if name in self.layers]

        def measure(held: _Held) -> dict[str, Additive | None]:
            return {name: rule.measure(self.layers[name], held.before, held.after) for name in names}

        measured = self._cohort.held.values()
        for own in (
            map(measure, measured)  # a GPU works by itself: handing over to lanes would cost more than it gives
            if self.device.type == "cuda"
            else self._in_order(measured, lambda held: held, lambda lane, held: measure(held))
        ):
            for name, value in own.items():
                if value is not None:
                    totals[name] = totals[name] + value if name in totals else value
        return totals

    def collect(self, split: Split) -> Sums:
        """The sums that were waiting, and of the other tensors what the split shares."""
        waiting: State = {}
        for held in self._cohort.held.values():
            _add(waiting, {name: held.after[name] for name in split.owners}, held.samples)
        return Sums({**self._cohort.sums, **split.shared(waiting)}, self._cohort.weight)

    def keep(self, split: Split) -> None:
        """Every client of the cohort stores its own tensors."""
        if split.kept:
            for client, held in self._cohort.held.items():
                self.store.put(client, {name: held.after[name] for name in sorted(split.kept)})
        if not self.lent:
            self._cohort = _Cohort()

    def evaluate(self, round: int, server: State, split: Split, clients: Sequence[int]) -> dict[str, list[Score]]:
        """Each client's composed (and, if the method says so, refreshed) model on its held-out samples."""
        return self._test(server, split, clients, self.plan.prediction.refresh, round, "refresh")

    def serve(self, server: State, split: Split, newcomers: Sequence[int]) -> list[Score]:
        """Newcomers have stored nothing, so they begin from the server's values; the rest is as in an evaluation."""
        tested = [client for client in newcomers if len(self.federation.client(client).test)]
        return self._test(server, split, tested, self.plan.prediction.newcomer, 0, "adapt")["test"]

    def close(self) -> None:
        """Wait for running clients, drop the others, and give the cores back."""
        if not self._borrows:
            self._lanes.pool.shutdown(wait=True, cancel_futures=True)
        self._switches.close()
        torch.set_num_threads(self._threads_before)

    def _test(
        self,
        server: State,
        split: Split,
        clients: Sequence[int],
        phases: Sequence[Phase],
        round: int,
        purpose: str,
    ) -> dict[str, list[Score]]:
        """Each client's composed model on its held-out samples, after a copy of it went through some phases."""

        def prepare(group: Sequence[int]) -> list[stacked.Client]:
            jobs = []
            for client in group:
                own = self.store.get(client) if split.kept else None
                start = split.overlay(server, own) if own else server
                jobs.append(stacked.Client(client, self.federation.client(client), start))
            return jobs

        def look(lane: Lane, group: list[stacked.Client]) -> None:
            for client in group:
                if not phases or self._train(lane, [client], split, phases, round, purpose)[0][0].problem:
                    lane.load(server, client.start, split.kept)
                lane.test(client.number, client.data, self.metrics)

        def work(lane: Lane, group: list[stacked.Client]) -> list[dict[str, Score]]:
            if not self.stacked:
                look(lane, group)
                return lane.scores()
            states = [client.start for client in group]
            if phases:
                tuned = self._train(lane, group, split, phases, round, purpose)
                # a copy that did not stay finite is thrown away at once
                states = [s if o.problem else t for s, (o, t) in zip(states, tuned, strict=True)]
            return self._stacked_scores(lane, group, states)

        if self.device.type == "cuda" and not self.stacked and not phases:
            tested = self._by_itself(_groups(clients, TESTED), prepare, look)
        else:
            groups = self._in_order(_groups(clients, stacked.GROUP if self.stacked else 1), prepare, work)
            tested = [scores for group in groups for scores in group]
        found: dict[str, list[Score]] = {"test": []}
        for scores in tested:
            for part, value in scores.items():
                found.setdefault(part, []).append(value)
        return found

    def _by_itself(
        self,
        groups: Sequence[Sequence[int]],
        prepare: Callable[[Sequence[int]], list[stacked.Client]],
        look: Callable[[Lane, list[stacked.Client]], None],
    ) -> list[dict[str, Score]]:
        """Tell a GPU's lanes in turn what to test, from one thread, and wait for them once.

        A small model is tested in less time than it takes to tell a lane to; threads would only wait for each other.
        """
        with self._lanes.gate.open():
            for number, group in enumerate(groups):
                lane = self._lanes.all[number % self.lanes]
                with lane.entered(waits=False):
                    look(lane, prepare(group))
            done = []
            for lane in self._lanes.all:
                with lane.entered():
                    done.append(iter(lane.scores()))
        return [next(done[number % self.lanes]) for number, group in enumerate(groups) for _ in group]

    def _train(
        self, lane: Lane, group: list[stacked.Client], split: Split, phases: Sequence[Phase], round: int, purpose: str
    ) -> list[tuple[Outcome, State]]:
        """Outcomes and trained states; those of a single client are the lane's own tensors."""
        common: dict[str, Any] = {"split": split, "seed": self.seed, "round": round, "purpose": purpose}
        if self.stacked:
            return stacked.train_clients(lane.model, group, phases, self.local, **common)
        (client,) = group
        copy_into(lane.state, client.start)
        lane.touched()
        outcome = train_client(
            lane.model,
            lane.state,
            client.data,
            phases,
            self.local,
            received=client.start,
            client=client.number,
            seeded=self.seeded,
            numerics=self.numerics,
            steps=lane.steps,
            **common,
        )
        return [(outcome, lane.state)]

    def _stacked_scores(
        self, lane: Lane, group: list[stacked.Client], states: Sequence[State]
    ) -> list[dict[str, Score]]:
        clients = [(client.number, client.data) for client in group]
        own: list[dict[str, Score]] = [{} for _ in group]
        for part in ("test", "validation"):
            scores = stacked.score_clients(
                lane.model, clients, states, part, self.local.loss, self.federation.classes, self.metrics
            )
            for found, (_, data), value in zip(own, clients, scores, strict=True):
                if part == "test" or len(getattr(data, part)):
                    found[part] = value
        return own

    def _in_order(
        self, items: Iterable[Item], prepare: Callable[[Item], Job], work: Callable[[Lane, Job], Done]
    ) -> Iterator[Done]:
        """Map over lanes; results come in the order of the items, and only a few wait at a time."""

        def on_lane(job: Job) -> Done:
            lane = self._lanes.free.get()
            try:
                with self._lanes.gate.open(), lane.entered():
                    return work(lane, job)
            finally:
                self._lanes.free.put(lane)

        waiting: deque[Future[Done]] = deque()
        try:
            for item in items:
                if len(waiting) >= 3 * self.lanes:
                    yield waiting.popleft().result()
                waiting.append(self._lanes.pool.submit(on_lane, prepare(item)))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _groups(clients: Sequence[int], size: int) -> list[Sequence[int]]:
    """What goes through a lane at a time."""
    return [clients[start : start + size] for start in range(0, len(clients), size)]


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; by default a GPU if there is one."""
    if device is not None and str(device) != "auto":
        try:
            asked = torch.device(device)
            torch.zeros(1, device=asked).tolist()
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # not built for it, or none is there
            why = str(error).partition("\n")[0]
            raise ConfigError(
                f"device is {str(device)!r}, which cannot be used here: {why}. Without a device it is a GPU if there "
                "is one, else the CPU; 'fedfac doctor' says what there is"
            ) from error
        return asked
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_lanes(lanes: int | None, device: torch.device) -> int:
    """The number of lanes asked for; by default the number of cores, and ten streams on a GPU."""
    if lanes is not None:
        if lanes < 1:
            raise ConfigError(f"lanes is {lanes}; at least one client must be trained at a time")
        return lanes
    if device.type == "cuda":
        return CUDA_LANES
    if device.type != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hand_over(state: State, device: torch.device) -> State:
    """A copy of a lane's tensors for the engine's own thread."""
    copied = clone(state)
    if device.type == "cuda":  # made on the lane's stream, used on the default one: not to be reused before that
        user = torch.cuda.default_stream(device)
        for tensor in copied.values():
            tensor.record_stream(user)
    return copied


def keep_freed_memory() -> None:
    """Tell glibc to keep memory that a step frees for the next step, instead of giving it back and taking it again.

    Page faults are a third of the time of a small convolutional network otherwise. Where there is no glibc, nothing
    happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(parameter, 1 << 30)


@torch.no_grad()
def _add(sums: State, part: State, weight: int) -> None:
    """Σ n_k·W_k in double precision; one call for all tensors, because on a GPU a launch costs more than the sum."""
    weighted = {name: torch.empty_like(tensor, dtype=torch.float64) for name, tensor in part.items()}
    if not weighted:
        return
    copy_into(weighted, part)
    torch._foreach_mul_(list(weighted.values()), weight)
    old = [name for name in weighted if name in sums]
    if old:
        torch._foreach_add_([sums[name] for name in old], [weighted[name] for name in old])
    sums |= {name: tensor for name, tensor in weighted.items() if name not in sums}
