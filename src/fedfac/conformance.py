"""The laws that every method keeps, as a suite that ships with the package (see ``check_method``)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from fedfac.aggregate import Sums
from fedfac.anatomy import Anatomy
from fedfac.data.federation import Federation
from fedfac.engine.protocol import Engine
from fedfac.errors import MethodError
from fedfac.evaluate import Score
from fedfac.method import PERSONAL, Method
from fedfac.moments import Additive
from fedfac.result import Result
from fedfac.rounds import fit
from fedfac.rules import Rule
from fedfac.seeds import generator, global_stream
from fedfac.split import Split
from fedfac.state import State, references, same
from fedfac.training import Outcome


def small_federation(*, clients: int = 5, seed: int = 0) -> Federation:
    """A few clients whose labels follow different rules on the same kind of small image."""
    draws = generator(seed, "small federation")
    arrays = []
    for client in range(clients):
        x = torch.randn(14 + 5 * client, 2, 6, 6, generator=draws)
        y = (x.flatten(1)[:, client : client + 3].sum(1) > 0).long() + (client % 2)
        arrays.append((x, y))
    return Federation.from_arrays(arrays, classes=3, seed=seed)


def small_model(seed: int = 0) -> nn.Module:
    """Convolution, normalisation, dropout and two fully connected layers: something of everything."""
    with global_stream(seed, "small model"):
        return nn.Sequential(
            nn.Conv2d(2, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 16, 8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 3),
        )


class Watched:
    """An engine that notes everything that crosses the line to the server."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.outcomes: list[dict[int, Outcome]] = []
        self.moments_seen: list[dict[str, Additive]] = []
        self.sums: list[tuple[Split, Sums]] = []

    def train(self, round: int, server: State, split: Split, cohort: Sequence[int]) -> dict[int, Outcome]:
        """Pass on; note the outcomes."""
        self.outcomes.append(self.inner.train(round, server, split, cohort))
        return self.outcomes[-1]

    def moments(self, rule: Rule) -> dict[str, Additive]:
        """Pass on; note the sums."""
        self.moments_seen.append(self.inner.moments(rule))
        return self.moments_seen[-1]

    def collect(self, split: Split) -> Sums:
        """Pass on; note the sums and the split that they are for."""
        self.sums.append((split, self.inner.collect(split)))
        return self.sums[-1][1]

    def keep(self, split: Split) -> None:
        """Pass on."""
        self.inner.keep(split)

    def evaluate(self, round: int, server: State, split: Split, clients: Sequence[int]) -> dict[str, list[Score]]:
        """Pass on."""
        return self.inner.evaluate(round, server, split, clients)

    def serve(self, server: State, split: Split, newcomers: Sequence[int]) -> list[Score]:
        """Pass on."""
        return self.inner.serve(server, split, newcomers)

    def close(self) -> None:
        """Pass on."""
        self.inner.close()


def run_checks(method: Method, *, model: nn.Module | None, federation: Federation | None, seed: int) -> None:
    """All laws, one after the other; the first breach raises."""
    model = small_model(seed) if model is None else model
    federation = small_federation(seed=seed) if federation is None else federation
    watched: list[Watched] = []

    def watch(inner: Engine) -> Engine:
        watched.append(Watched(inner))
        return watched[-1]

    def run(
        rounds: int = 2,
        lanes: int = 1,
        engine: Callable[[Engine], Engine] | None = None,
        out: Path | None = None,
        resume: bool = False,
    ) -> Result:
        return fit(
            model,
            federation,
            method=method,
            rounds=rounds,
            evaluate_every=1,
            rate=0.6,
            epochs=1,
            batch_size=8,
            seed=seed,
            device="cpu",
            lanes=lanes,
            engine=engine,
            out=out,
            resume=resume,
        )

    result = run(engine=watch)
    _check_split(method, model, result)
    _check_sums(method, watched[0])
    _check_untouched(method, model, result)
    _check_equal(method, result, run(lanes=2), "with two lanes instead of one")
    with tempfile.TemporaryDirectory() as folder:
        run(rounds=1, out=Path(folder) / "run")
        _check_equal(method, result, run(out=Path(folder) / "run", resume=True), "stopped after round 1 and resumed")


def _check_split(method: Method, model: nn.Module, result: Result) -> None:
    for number, split in result.splits.items():
        if split.shapes.keys() != result.server.keys():
            raise MethodError(f"{method}: the split of round {number} does not place every tensor of the state")
        if Split.from_json(split.to_json()) != split:
            raise MethodError(f"{method}: the split of round {number} changes on its way through JSON")
        state = result.server
        if not same(split.compose(split.shared(state), split.personal(state)), state):
            raise MethodError(f"{method}: the parts of round {number}'s split do not make up the state")
    if result.template is model:
        raise MethodError(f"{method}: the caller's module itself was trained; work on a copy")


def _check_sums(method: Method, watched: Watched) -> None:
    for split, sums in watched.sums:
        if sums.values.keys() & split.personal_tensors:
            raise MethodError(f"{method}: personal tensors are in the sums that cross to the server")
        for name, value in sums.values.items():
            wanted = int(split.mask(name).sum()) if name in split.cut else torch.Size(split.shapes[name]).numel()
            if value.numel() != wanted:
                raise MethodError(
                    f"{method}: {value.numel()} numbers of {name} cross to the server, but {wanted} are shared"
                )
        if not sums.weight > 0:
            raise MethodError(f"{method}: sums of weight {sums.weight} cross to the server")


def _check_untouched(method: Method, model: nn.Module, result: Result) -> None:
    """Tensors that no phase trains stay where they started, on the server and on every client."""
    wrapped = result.template
    phases = method.plan(Anatomy.of(wrapped)).training.phases
    trains = [result.split.kept if phase.trains == PERSONAL else phase.trains for phase in phases]
    if any(names is None for names in trains):
        return
    trained = frozenset().union(*(names or () for names in trains))
    start = references(method.wrapped(model))
    for client in range(len(result.names)):
        state = result.state(client)
        moved = [name for name in start if name not in trained and not torch.equal(start[name], state[name])]
        if moved:
            raise MethodError(f"{method}: no phase trains {moved}, but client {client} has other values of it")


def _check_equal(method: Method, one: Result, other: Result, how: str) -> None:
    if one.records != other.records:
        raise MethodError(f"{method}: {how}, the record differs")
    if not same(one.server, other.server):
        raise MethodError(f"{method}: {how}, the server's state differs")
    for client in range(len(one.names)):
        if not same(one.state(client), other.state(client)):
            raise MethodError(f"{method}: {how}, the model of client {client} differs")
