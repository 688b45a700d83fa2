"""Factor analysis in a round of dynamic FedFac: the exact solver against the fast one, and how far their masks agree.

python benchmarks/factor.py [cpu|cuda]

Moments like those of real runs: a common random start, on top of it a few factors, a drift from round to round that
all clients share, and each client's own. (At d = 64 and 512 their spectrum asks for about as many factors as the
FEMNIST and ResNet-18 runs do, ¾ d at κ = .85.) Both solvers see the same rounds, in turn; times are medians over
rounds with their quartiles, ``ratio`` is exact over fast within a round. The first round, in which both do the same,
is left out. ``agree`` is the share of elements on the same side in both masks, ``kept`` the share that keeps its side
from one round to the next.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch

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


def compare(elements: int, inputs: int, number: int, device: torch.device) -> str:
    rules = {name: FactorRule({"l": TAU}, {"l": 0.85}, solver=name) for name in ("exact", "fast")}
    memory: dict[str, Memory] = {name: {} for name in rules}
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    masks: dict[str, list[Mask]] = {name: [] for name in rules}
    factors = 0
    for turn, total in enumerate(rounds(elements, inputs, number + 1, device)):
        for name in rules if turn % 2 else reversed(rules):  # neither is always first
            start = time.perf_counter()
            made = rules[name].score(Asked("l", elements, total, seed=0, round=turn, memory=memory[name]))
            seconds[name].append(time.perf_counter() - start)  # the scores are on the CPU: nothing is under way
            memory[name] = made.memory
            masks[name].append(TAU.cut(made.values)[0])
            factors = made.notes["factors"]
    exact, fast = (seconds[name][1:] for name in ("exact", "fast"))
    same = [a == b for one, two in zip(*masks.values(), strict=True) for a, b in zip(one, two, strict=True)]
    return (
        f"| {elements} | {factors} | {quartiles([1e3 * s for s in exact])} | {quartiles([1e3 * s for s in fast])} "
        f"| {quartiles([a / b for a, b in zip(exact, fast, strict=True)])} | {sum(same) / len(same):.2f} "
        f"| {kept(masks['exact']):.2f} | {kept(masks['fast']):.2f} |"
    )


def main(where: str = "cpu") -> None:
    device = torch.device(where)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in a run
    print("| elements | factors | exact, ms | fast, ms | ratio | agree | kept, exact | kept, fast |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for elements, inputs, number in SIZES:
        print(compare(elements, inputs, number, device), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
