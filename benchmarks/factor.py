"""Factor analysis in a round of dynamic FedFac: the cold solver, the warm one, and the warm one without its subspaces.

python benchmarks/factor.py [cpu|cuda]

Moments like those of real runs: a common random start, on top of it a few factors, a drift from round to round that
all clients share, and each client's own. (At d = 64 and 512 their spectrum asks for about as many factors as the
FEMNIST and ResNet-18 runs do, ¾ d at κ = .85.) All see the same rounds, in turn; times are medians over rounds with
their quartiles, ratios are within a round. The first round, in which all do the same, is left out. *whole* is the warm
solver with an ``eigh`` in every iteration. ``agrees`` is the share of elements on the same side as in the warm solver's
masks, ``kept`` the share that keeps its side from one round to the next.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedfac import subspace
from fedfac.moments import Moments
from fedfac.rules import Asked, FactorRule, Memory, Threshold
from fedfac.seeds import generator
from fedfac.split import Mask

SIZES = ((64, 800, 12), (512, 4608, 6), (1024, 2048, 6))  # elements, input weights of each, rounds
CLIENTS = 10
TAU = Threshold.parse("50%")


def rounds(elements: int, inputs: int, number: int, device: torch.device) -> Iterator[Moments]:
    draws = generator(0, "benchmark", elements)
    factors = torch.randn(elements, elements // 8, generator=draws)
    weights = torch.randn(elements, inputs, generator=draws)
    for _ in range(number):
        weights = weights + 0.02 * factors @ torch.randn(elements // 8, inputs, generator=draws)
        total = None
        for _ in range(CLIENTS):
            own = (weights + 0.5 * torch.randn(elements, inputs, generator=draws)).double().to(device)
            one = Moments(inputs, own.sum(1), own @ own.T)
            total = one if total is None else total + one
        if total is not None:
            yield total


def kept(masks: Sequence[Mask]) -> float:
    pairs = [a == b for one, then in itertools.pairwise(masks) for a, b in zip(one, then, strict=True)]
    return sum(pairs) / len(pairs)


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


@contextmanager
def without_subspaces(wanted: bool) -> Iterator[None]:
    least = subspace.LEAST
    subspace.LEAST = sys.maxsize if wanted else least
    try:
        yield
    finally:
        subspace.LEAST = least


def agreement(one: Sequence[Mask], other: Sequence[Mask]) -> float:
    pairs = [a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(pairs) / len(pairs)


def compare(elements: int, inputs: int, number: int, device: torch.device) -> str:
    names = ["cold", "whole", "warm"]
    rules = {name: FactorRule({"l": TAU}, {"l": 0.85}, solver="cold" if name == "cold" else "warm") for name in names}
    memory: dict[str, Memory] = {name: {} for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    masks: dict[str, list[Mask]] = {name: [] for name in names}
    factors = 0
    for turn, total in enumerate(rounds(elements, inputs, number + 1, device)):
        for name in names if turn % 2 else reversed(names):  # none is always first
            with without_subspaces(name == "whole"):
                start = time.perf_counter()
                made = rules[name].score(Asked("l", elements, total, seed=0, round=turn, memory=memory[name]))
                seconds[name].append(time.perf_counter() - start)  # the scores are on the CPU: nothing is under way
            memory[name] = made.memory
            masks[name].append(TAU.cut(made.values)[0])
            factors = made.notes["factors"]
    cold, whole, warm = (seconds[name][1:] for name in names)
    cells = [
        f"{elements}",
        f"{factors}",
        *(quartiles([1e3 * s for s in one]) for one in (cold, whole, warm)),
        *(quartiles([a / b for a, b in zip(one, warm, strict=True)]) for one in (cold, whole)),
        *(f"{agreement(masks[name], masks['warm']):.3f}" for name in ("cold", "whole")),
        *(f"{kept(masks[name]):.2f}" for name in ("cold", "warm")),
    ]
    return f"| {' | '.join(cells)} |"


def main(where: str = "cpu") -> None:
    device = torch.device(where)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in a run
    head = ["elements", "factors", "cold, ms", "whole, ms", "warm, ms", "cold / warm", "whole / warm"]
    head += ["cold agrees", "whole agrees", "cold kept", "warm kept"]
    print(f"| {' | '.join(head)} |\n|{'---:|' * len(head)}")
    for elements, inputs, number in SIZES:
        print(compare(elements, inputs, number, device), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
