"""Training steps and forward passes as captured CUDA graphs: what makes a lane on a GPU fast.

An eager step of a small model is hundreds of kernel launches from Python; a replay of its graph is one call. A lane
captures the step once for every phase and batch size, with its own tensors, and replays it for every client: loading
a client means copying its numbers into the lane's tensors and zeroing the optimiser's state. A batch is gathered
inside the graph, from the samples resident on the device, by an order that is uploaded once per client. Last batches
come in all sizes: where samples do not see each other (no batch normalisation), one graph serves them all, filled up
with samples of weight 0. The random numbers come from a generator that the graph reads at replay.

What cannot be captured (a model that waits for its own numbers, or that draws from the global generator) takes its
steps eagerly; the engine says so once.
"""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfac.data.pool import ClientData, Pool
from fedfac.errors import EngineWarning
from fedfac.method import Loss, per_sample, supervised
from fedfac.noise import Seeded, taking_turns
from fedfac.numerics import Numerics
from fedfac.state import State, clone, copy_into
from fedfac.training import Local, Work, eager

LEAST = 1 << 14  # room for this many sample numbers at first
ROWS = 1024  # of sums that wait to be read


class Gate:
    """Many lanes work at a time, or one captures alone: nothing else may run while a graph is recorded."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._inside = 0
        self._wanted = 0
        self._alone = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Among others."""
        with self._change:
            self._change.wait_for(lambda: not self._alone and not self._wanted)
            self._inside += 1
        try:
            yield
        finally:
            with self._change:
                self._inside -= 1
                self._change.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """From inside :meth:`open`: step out, wait until all others are out, and be alone."""
        with self._change:
            self._inside -= 1
            self._wanted += 1
            self._change.notify_all()
            self._change.wait_for(lambda: not self._alone and not self._inside)
            self._wanted -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._change:
                self._alone = False
                self._inside += 1
                self._change.notify_all()


@dataclass
class Recorder:
    """What the graphs of one lane have in common."""

    state: State  # the lane's tensors
    stream: torch.cuda.Stream
    gate: Gate
    resident: Pool | None  # samples at fixed places of the device's memory, if the federation has them
    generator: torch.Generator
    fills: bool  # whether a batch may be filled up with samples that do not count
    memory: Any = field(default_factory=lambda: torch.cuda.graph_pool_handle())  # one pool for all graphs of the lane

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of ``run``, which is run once before it; call it alone, inside :meth:`untouched`."""
        run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        collects = gc.isenabled()
        gc.disable()  # a graph of an earlier run that is thrown away now would end the recording
        graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
            if collects:
                gc.enable()
        return graph

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Afterwards the lane's tensors and its generator are as they were."""
        before, drawn = clone(self.state), self.generator.get_state()
        try:
            yield
        finally:
            copy_into(self.state, before)
            self.generator.set_state(drawn)


class GraphSteps:
    """A lane's way to take steps: replays. One :class:`_Slot` for every kind of step (see :func:`_kind`)."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._slots: dict[Any, _Slot] = {}
        self._refused: set[Any] = set()

    def __call__(self, work: Work, batches: Sequence[Tensor]) -> None:
        """Take the steps of a phase."""
        key = _kind(work)
        if key in self._refused or not _capturable(work):
            return eager(work, batches)
        slot = self._slots.get(key)
        if slot is None or not slot.fits(work, batches):
            slot = self._slots[key] = _Slot(self.recorder, work, batches)
        sizes = [len(index) for index in batches]
        if not all(slot.knows(size) for size in sizes):
            try:
                with self.recorder.gate.alone(), self.recorder.untouched(), work.under_way():
                    slot.load(work, batches)
                    slot.capture(sizes, work)
            except RuntimeError as error:
                self._refused.add(key)
                del self._slots[key]
                note(error)
                return eager(work, batches)
        slot.load(work, batches)
        for number, size in enumerate(sizes):
            slot.bring(work, batches[number])
            slot.replay(size)
        slot.hand_back(work)
        return None


def _kind(work: Work) -> tuple[Any, ...]:
    """What the steps of two phases have in common that are the same graph, however many of them are taken."""
    phase = work.phase
    held = tuple(tensor.data_ptr() for tensor, _, _ in work.held)
    return (id(phase.objective), id(phase.before), phase.stacks, work.local.lr, work.data.augment, work.trains, held)


def _capturable(work: Work) -> bool:
    known = work.context is None or isinstance(work.context, Tensor)
    return known and work.seeded is not taking_turns


def note(error: Exception) -> None:
    """Say that a model runs eagerly, and why."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    warnings.warn(
        f"this model cannot be captured as a CUDA graph and runs eagerly, which is slower: {reason}",
        EngineWarning,
        stacklevel=2,
    )


@dataclass
class _Tray:
    """A pool at a fixed place: the batch that the next replay eats (for clients whose samples are not resident)."""

    batches: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.batches[len(index)]

    def to(self, device: torch.device) -> _Tray:
        return self


class _Slot:
    """One kind of step on one lane: tensors at fixed places, an optimiser, and graphs.

    There is a graph for whole batches; other batches share one that is filled up, or have one for every size.
    """

    def __init__(self, recorder: Recorder, work: Work, batches: Sequence[Tensor]) -> None:
        device = work.numerics.device
        self.recorder = recorder
        self.resident = work.data.pool is recorder.resident
        self.tray = _Tray()
        self.width = work.local.batch_size + 1  # of a batch that is filled up: a last sample joins the batch before it
        self.order = torch.zeros(_room(sum(map(len, batches)) + self.width), dtype=torch.int64, device=device)
        self.place = torch.zeros((), dtype=torch.int64, device=device)  # how far the steps have come
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # the samples of a batch that is filled up
        self.ahead = torch.arange(max(map(len, batches)) + self.width, device=device)
        self.numbers = torch.zeros(_room(work.data.size), dtype=torch.int64, device=device)
        context = work.context
        if isinstance(context, Tensor):
            context = context.new_zeros((len(self.numbers), *context.shape[1:]))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.filled: torch.cuda.CUDAGraph | None = None
        self.fills = recorder.fills and self.resident and (work.phase.stacks or work.phase.objective is supervised)
        self.optimizer = work.local.make_optimizer(work.trained, capturable=True)
        self.work = replace(
            work,
            data=replace(work.data, pool=work.data.pool if self.resident else self.tray, train=self.numbers),
            received=clone(work.received) if work.phase.objective is not supervised else {},
            context=context,
            held=[(tensor, stays.clone(), value.clone()) for tensor, stays, value in work.held],
            draws=recorder.generator,
            total=torch.zeros_like(work.total),
        )

    def fits(self, work: Work, batches: Sequence[Tensor]) -> bool:
        """Whether the client has no more samples and steps than there is room for."""
        resident = work.data.pool is self.recorder.resident
        return (
            self.resident == resident
            and sum(map(len, batches)) + self.width <= len(self.order)
            and work.data.size <= len(self.numbers)
        )

    def load(self, work: Work, batches: Sequence[Tensor]) -> None:
        """Bring a client's numbers to the places that the graphs read."""
        order = torch.cat(list(batches))
        self.order[: len(order)].copy_(order, non_blocking=True)
        self.place.zero_()
        self.work.total.zero_()
        if self.resident:
            self.numbers[: work.data.size].copy_(work.data.train, non_blocking=True)
        if isinstance(work.context, Tensor):
            self.work.context[: len(work.context)].copy_(work.context)
        copy_into(self.work.received, {name: work.received[name] for name in self.work.received})
        for (_, stays, value), (_, new_stays, new_value) in zip(self.work.held, work.held, strict=True):
            stays.copy_(new_stays)
            value.copy_(new_value)
        self.recorder.generator.set_state(work.draws.get_state())
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        if tensors := [value for value in kept if isinstance(value, Tensor)]:
            torch._foreach_zero_(tensors)

    def knows(self, size: int) -> bool:
        """Whether there is a graph for batches of this size."""
        return size in self.graphs or (self._is_filled(size) and self.filled is not None)

    def _is_filled(self, size: int) -> bool:
        """Whether batches of this size are filled up; a whole batch has a graph of its own."""
        return self.fills and size != self.work.local.batch_size

    def replay(self, size: int) -> None:
        """Take the next step."""
        if self._is_filled(size) and self.filled is not None:
            self.count.fill_(size)
            self.filled.replay()
        else:
            self.graphs[size].replay()

    def capture(self, sizes: Sequence[int], work: Work) -> None:
        """Record what is missing for batches of these sizes."""
        for size in sorted(set(sizes) - self.graphs.keys(), reverse=True):
            if self._is_filled(size):
                self.filled = self.filled or self._record(self.width, self.count.fill_(size))
            else:
                if not self.resident:
                    inputs, targets = work.data.pool.batch(work.data.train[torch.zeros(size, dtype=torch.int64)])
                    self.tray.batches[size] = inputs.clone(), targets.clone()
                self.graphs[size] = self._record(size)

    def _record(self, size: int, count: Tensor | None = None) -> torch.cuda.CUDAGraph:
        def run() -> None:
            self.work.step(self.optimizer, self.order[self.place + self.ahead[:size]], count)
            self.place.add_(size if count is None else count)

        self.place.zero_()
        return self.recorder.record(run)

    def bring(self, work: Work, index: Tensor) -> None:
        """Put the next batch onto the tray, unless the graph gathers it by itself."""
        if not self.resident:
            for place, tensor in zip(
                self.tray.batches[len(index)], work.data.pool.batch(work.data.train[index]), strict=True
            ):
                place.copy_(tensor)

    def hand_back(self, work: Work) -> None:
        """The client goes on where the replays have ended."""
        work.total.add_(self.work.total)
        work.draws.set_state(self.recorder.generator.get_state())


@torch.no_grad()
def fillable(model: nn.Module, data: ClientData, local: Local, seeded: Seeded, numerics: Numerics) -> bool:
    """Whether samples of weight 0 may fill a batch up: the loss is a mean over samples that do not see each other.

    It is tried: a sample goes through a copy of the model, in training, among others and among copies of itself.
    """
    if "reduction" not in inspect.signature(local.loss).parameters:
        return False
    inputs, _ = data.pool.batch(data.train[: local.batch_size + 1])
    if bool((inputs == inputs[:1]).all()):
        return False  # it cannot be told
    found: list[Tensor] = []
    for batch in (inputs, inputs[:1].expand_as(inputs).contiguous()):
        trial = numerics.place(copy.deepcopy(model)).train()
        with seeded(torch.Generator(numerics.device)), numerics.autocast():
            outputs = trial(numerics.inputs(batch))
        if not isinstance(outputs, Tensor):
            return False
        found.append(outputs[0].float())
    among, alone = found
    return torch.allclose(among, alone, rtol=1e-3, atol=1e-4)


class GraphSums:
    """Sums over some samples as graphs, one for every power of two of them.

    In evaluation mode samples do not see each other, so padding (numbers below 0) changes no sample's output. Every
    call writes its sums to the next row of a table, which is waited for when it is read.
    """

    def __init__(self, recorder: Recorder, function: Callable[[Pool, Tensor], Tensor]) -> None:
        self.recorder, self.function = recorder, function
        device = recorder.generator.device
        self.rows = torch.zeros(ROWS, 3, dtype=torch.float64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # the next row
        self.asked = 0  # rows since they were last read
        self._read: list[list[float]] = []
        self._made: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._refused = False

    def takes(self, pool: Pool) -> bool:
        """Whether samples of this pool can be summed here."""
        return pool is self.recorder.resident and not self._refused

    def __call__(self, pool: Pool, numbers: Tensor) -> bool:
        """Sum over samples with :func:`padded` numbers; False: it cannot be captured."""
        room = len(numbers)
        if room not in self._made:
            try:
                with self.recorder.gate.alone():
                    self._made[room] = self._capture(pool, room)
            except RuntimeError as error:
                self._refused = True
                note(error)
                return False
        if self.asked - len(self._read) == ROWS:
            self._fetch()
        graph, place = self._made[room]
        place.copy_(numbers, non_blocking=True)
        graph.replay()
        self.asked += 1
        return True

    def read(self) -> list[list[float]]:
        """All rows since the last call."""
        self._fetch()
        found, self._read, self.asked = self._read, [], 0
        return found

    def _fetch(self) -> None:
        if new := self.asked - len(self._read):
            self._read += self.rows[:new].tolist()
            self.place.zero_()

    @torch.no_grad()
    def _capture(self, pool: Pool, room: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        numbers = torch.zeros(room, dtype=torch.int64, device=self.place.device)

        def run() -> None:
            self.rows.index_copy_(0, self.place, self.function(pool, numbers)[None])
            self.place.add_(1)

        self._fetch()  # a trial writes a row, too
        graph = self.recorder.record(run)
        self.place.zero_()
        return graph, numbers


def padded(index: Tensor) -> Tensor:
    """Sample numbers, filled up with -1 to a power of two.

    >>> padded(torch.tensor([4, 2])).tolist()[:4], len(padded(torch.arange(33)))
    ([4, 2, -1, -1], 64)
    """
    room = 1 << max(5, (len(index) - 1).bit_length())
    return torch.cat([index, index.new_full((room - len(index),), -1)])


def counted(outputs: Tensor, targets: Tensor, valid: Tensor, loss: Loss, classes: int | None) -> Tensor:
    """(Σ loss, answers, correct answers) of the samples that are ``valid``."""
    if not isinstance(outputs, Tensor):
        raise RuntimeError("its output is not one tensor")
    lost = (per_sample(loss, outputs, targets).double() * valid).sum()
    count = valid.sum().double()
    if classes is None:
        return torch.stack([lost, count, torch.zeros_like(lost)])
    right = (outputs.argmax(1) == targets).reshape(len(targets), -1)
    return torch.stack([lost, count * right.shape[1], (right.sum(1) * valid).sum().double()])


def _room(count: int) -> int:
    return max(LEAST, 1 << (count - 1).bit_length())
