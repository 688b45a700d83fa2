"""A lane: one copy of the model, and the way in which it takes steps and tests clients.

On a GPU a lane is a stream with captured graphs, and nothing that it is told to do is waited for until it is asked for
what has come out: scores are rows of a table on the device, read once for many clients.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedfac.data.federation import REMEMBERED, Federation
from fedfac.data.pool import ClientData, Pool
from fedfac.engine.graphs import Gate, GraphSteps, GraphSums, Recorder, counted, padded
from fedfac.evaluate import BATCH, Metric, Score, predict, tally
from fedfac.method import Loss
from fedfac.numerics import Numerics
from fedfac.state import State, copy_into, references
from fedfac.training import Steps, eager

Numbers = Callable[[int, str], Sequence[Tensor]]


@dataclass(frozen=True)
class _Rows:
    """A score that is still being counted: which rows of the table, over how many samples."""

    client: int
    first: int
    end: int
    samples: int


class Lane:
    """One copy of the model on one stream or thread."""

    def __init__(
        self,
        model: nn.Module,
        numerics: Numerics,
        gate: Gate,
        federation: Federation,
        loss: Loss,
        numbers: Numbers,
        fills: bool = False,
    ) -> None:
        self.model = numerics.place(copy.deepcopy(model))
        self.state = references(self.model)
        self.numerics, self.loss, self.classes, self.numbers = numerics, loss, federation.classes, numbers
        self.steps: Steps = eager
        self.sums: GraphSums | None = None
        self.stream: torch.cuda.Stream | None = None
        if numerics.device.type == "cuda":
            self.stream = torch.cuda.Stream(numerics.device)  # type: ignore[no-untyped-call]
            recorder = Recorder(self.state, self.stream, gate, federation.pool, torch.Generator(numerics.device), fills)
            self.steps = GraphSteps(recorder)
            if "reduction" in inspect.signature(loss).parameters:  # a mean over samples, one by one
                self.sums = GraphSums(recorder, self._count)
        self._holds: State | None = None
        self._tested: list[dict[str, Score | _Rows]] = []

    def load(self, server: State, composed: State, kept: Iterable[str]) -> None:
        """Write a client's model into the lane; what is shared as a whole is not written twice in a row."""
        if self._holds is server:
            copy_into(self.state, {name: composed[name] for name in kept})
        else:
            copy_into(self.state, composed)
        self._holds = server

    def touched(self) -> None:
        """The lane's tensors were trained: they are nobody's state any more."""
        self._holds = None

    @torch.no_grad()
    def test(self, client: int, data: ClientData, metrics: Mapping[str, Metric]) -> None:
        """Test the model that the lane holds on a client's held-out samples; :meth:`scores` has what comes out."""
        if self.model.training:  # to go through its modules takes longer than to replay a small one
            self.model.eval()
        parts = {"test": data.test} | ({"validation": data.validation} if len(data.validation) else {})
        self._tested.append({part: self._score(client, data.pool, part, parts[part], metrics) for part in parts})

    def scores(self) -> list[dict[str, Score]]:
        """The scores of all clients tested since the last call, in order: the device is waited for once."""
        tested, self._tested = self._tested, []
        rows = self.sums.read() if self.sums is not None else []

        def read(score: Score | _Rows) -> Score:
            if isinstance(score, Score):
                return score
            lost, answers, correct = (sum(column) for column in zip(*rows[score.first : score.end], strict=True))
            return Score(
                score.client, int(answers), None if self.classes is None else int(correct), lost / score.samples
            )

        return [{part: read(score) for part, score in own.items()} for own in tested]

    def _score(self, client: int, pool: Pool, part: str, index: Tensor, metrics: Mapping[str, Metric]) -> Score | _Rows:
        if self.sums is not None and self.sums.takes(pool) and not metrics and len(index):
            first = self.sums.asked
            if all(self.sums(pool, piece) for piece in self.numbers(client, part)):
                return _Rows(client, first, self.sums.asked, len(index))
        pieces = torch.split(index, BATCH) if len(index) else ()
        answered = (predict(self.model, self.numerics, pool, piece) for piece in pieces)
        return tally(client, answered, self.loss, self.classes, metrics)

    def _count(self, pool: Pool, numbers: Tensor) -> Tensor:
        outputs, targets = predict(self.model, self.numerics, pool, numbers.clamp(min=0))
        return counted(outputs, targets, numbers >= 0, self.loss, self.classes)

    @contextmanager
    def entered(self, *, waits: bool = True) -> Iterator[None]:
        """Inside, work goes to the lane's stream, after all that came before; if it ``waits``, until it is done."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.default_stream(self.numerics.device))
        with torch.cuda.stream(self.stream):
            yield
            if waits:
                self.stream.synchronize()


def numbers_of(federation: Federation) -> Numbers:
    """The sample numbers of a client's part as graphs want them, made once, where a GPU can fetch them by itself."""

    @lru_cache(2 * REMEMBERED)
    def numbers(client: int, part: str) -> Sequence[Tensor]:
        return [padded(piece).pin_memory() for piece in torch.split(getattr(federation.client(client), part), BATCH)]

    return numbers
