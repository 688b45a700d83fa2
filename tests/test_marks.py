"""The marks of a table come at the stated rate: where methods are equal, at most one table in twenty has any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from torch import nn

import fedfac
from fedfac import comparison, marks, methods, tables
from fedfac.comparison import Comparison
from fedfac.tables import Block

EQUAL_METHODS = ["fedavg", "fedavg:server_rate=1", "fedavg:average=0", "fedavg:server_momentum=0", "fedprox:mu=0"]


# --- null experiments ------------------------------------------------------------------------------------------------


def tables_with_a_mark(scores: np.ndarray) -> float:
    """The share of the tables (first axis) of methods (second) and seeds (third) that have a mark."""
    return float(np.mean([bool(marks.worse_than_best(by_seed(table))) for table in scores]))


def by_seed(table: np.ndarray) -> dict[str, dict[int, float]]:
    return {f"method {m}": dict(enumerate(row)) for m, row in enumerate(table.tolist())}


def accuracies(
    draws: np.random.Generator, number: int, kinds: int, seeds: int, noise: Sequence[float] = (0.02,)
) -> np.ndarray:
    """Headlines of equal methods: what a seed and its 20 clients add is common, what the training adds is a run's."""
    common = draws.normal(0.9, 0.05, (number, 1, seeds)) + draws.normal(0, 0.1, (number, 1, seeds, 20)).mean(-1)
    own = draws.normal(0, 1, (number, kinds, seeds)) * np.resize(noise, kinds)[:, None]
    return np.asarray(common + own + draws.normal(0, 0.03, (number, kinds, seeds, 20)).mean(-1))


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("kinds", [2, 5])
def test_of_tables_of_equal_methods_at_most_one_in_twenty_has_a_mark(kinds: int, seeds: int) -> None:
    found = tables_with_a_mark(accuracies(np.random.default_rng(seeds), 1500, kinds, seeds))
    assert found <= 0.05 + 3 * (0.05 * 0.95 / 1500) ** 0.5
    assert found > 0.005  # it is a test, not a refusal


@pytest.mark.parametrize("noise", [(0.1, 0.01, 0.01, 0.01, 0.01), (0.01, 0.02, 0.04, 0.08, 0.16)])
def test_the_rate_holds_for_methods_that_differ_in_how_much_seeds_move_them(noise: Sequence[float]) -> None:
    found = tables_with_a_mark(accuracies(np.random.default_rng(1), 1500, 5, 3, noise))
    assert found <= 0.05 + 3 * (0.05 * 0.95 / 1500) ** 0.5


def test_the_rate_holds_for_a_few_test_samples() -> None:
    """Counts of 40 samples: differences are often the same in all seeds."""
    counts = np.random.default_rng(2).binomial(40, 0.9, (1500, 5, 3)) / 40
    assert tables_with_a_mark(counts) <= 0.05 + 3 * (0.05 * 0.95 / 1500) ** 0.5


def test_two_equal_methods_are_not_marked_because_of_a_third_that_is_far_behind() -> None:
    scores = accuracies(np.random.default_rng(3), 1500, 3, 5)
    scores[:, 2] -= 0.5
    named = [marks.worse_than_best(by_seed(table)) for table in scores]
    assert np.mean(["method 2" in own for own in named]) > 0.99
    assert np.mean([bool(own - {"method 2"}) for own in named]) <= 0.05 + 3 * (0.05 * 0.95 / 1500) ** 0.5


@pytest.mark.parametrize(("seeds", "least", "most"), [(3, 0.05, 0.3), (5, 0.75, 0.95), (10, 0.99, 1)])
def test_how_often_a_difference_of_three_standard_deviations_is_marked(seeds: int, least: float, most: float) -> None:
    """Power, of five methods: three standard deviations (over seeds) of a difference are too few for three seeds."""
    scores = np.random.default_rng(seeds).normal(0, 2**-0.5, (400, 5, seeds))
    scores[:, 4] -= 3
    named = np.mean(["method 4" in marks.worse_than_best(by_seed(table)) for table in scores])
    assert least <= named <= most
    assert (named > 0.5) == (marks.least_difference(5, seeds) < 3)


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[list[Path]]]:
    """Three seeds with their clients, and eight runs of FedAvg on each that differ in their random numbers only."""
    folder = tmp_path_factory.mktemp("equal")
    planned = comparison.plan(folder / "c", methods=EQUAL_METHODS, tables={}, seeds=[0, 1, 2])
    runs = []
    for seed in range(3):
        torch.manual_seed(seed)
        centres = torch.randn(4, 6)
        clients = []
        for _ in range(20):
            labels = torch.randint(0, 4, (30,))
            clients.append((centres[labels] + 1.5 * torch.randn(30, 6), labels))
        federation = fedfac.Federation.from_arrays(clients)
        pool = [folder / f"run-{seed}-{number}" for number in range(8)]
        for number, out in enumerate(pool):
            torch.manual_seed(1000 * seed + number)
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
            how = {"rounds": 4, "cohort": 5, "epochs": 1, "batch_size": 8, "lr": 0.02, "evaluate_every": 1}
            fedfac.fit(model, federation, method=methods.fedavg(), seed=1000 * seed + number, out=out, **how)  # type: ignore[arg-type]
        runs.append(pool)
    return planned, runs


def test_equal_methods_on_real_runs_are_hardly_ever_marked(equal: tuple[Comparison, list[list[Path]]]) -> None:
    """Thirty tables of five methods, all of them FedAvg: the test over clients marked half of such tables."""
    planned, runs = equal
    draws = np.random.default_rng(0)
    marked = 0
    for _ in range(30):
        chosen = {seed: list(draws.permutation(8)[:5]) for seed in range(3)}
        marked += bool(marked_in(table_of(planned, runs, chosen)))
    assert marked <= 4


def table_of(planned: Comparison, runs: list[list[Path]], chosen: dict[int, list[int]]) -> Block:
    """The table of a comparison whose cells are these runs: number ``chosen[seed][i]`` is that of the i-th method."""
    places = {
        cell.folder: runs[cell.seed][chosen[cell.seed][EQUAL_METHODS.index(cell.method)]] for cell in planned.cells
    }
    for place, run in places.items():
        place.parent.mkdir(exist_ok=True)
        run.rename(place)
    try:
        (block,) = tables.blocks(planned)
    finally:
        for place, run in places.items():
            place.rename(run)
    return block


def marked_in(block: Block) -> set[str]:
    return {method for method, row in block.rows.items() for entry in row.values() if entry.worse}


# --- the test itself -------------------------------------------------------------------------------------------------


def test_the_p_value_is_that_of_the_paired_t_test() -> None:
    one, other = [0.9, 0.93, 0.85, 0.91], [0.88, 0.9, 0.86, 0.87]
    assert marks.p_value(one, other) == pytest.approx(ttest_rel(one, other).pvalue)
    assert marks.p_value(one, one) == 1.0
    assert marks.p_value(one, [value + 0.25 for value in one]) == 1.0  # no spread to test against


def test_pairs_are_tested_from_the_smallest_p_value_on_by_holm() -> None:
    """By hand: three pairs, of which two pass .05 / 3 and .05 / 2."""
    scores = {
        "best": {0: 0.90, 1: 0.92, 2: 0.94, 3: 0.96},
        "level": {0: 0.89, 1: 0.93, 2: 0.92, 3: 0.97},
        "behind": {0: 0.70, 1: 0.73, 2: 0.74, 3: 0.77},
    }
    values = {
        pair: marks.p_value(*(list(scores[m].values()) for m in pair))
        for pair in [("best", "behind"), ("level", "behind"), ("best", "level")]
    }
    assert values["best", "behind"] < 0.05 / 3
    assert values["best", "level"] > 0.05
    assert marks.worse_than_best(scores) == {"behind"}


@pytest.mark.parametrize("seeds", [1, 2])
def test_less_than_three_seeds_mark_nothing(seeds: int) -> None:
    apart = {"good": {s: 0.9 + s / 1000 for s in range(seeds)}, "bad": {s: 0.1 - s / 1000 for s in range(seeds)}}
    assert marks.worse_than_best(apart) == set()
    assert marks.worse_than_best({**apart, "worse": {s + 10: 0.1 for s in range(9)}}) == set()  # no common seeds
    assert marks.worse_than_best({}) == set()


def test_the_footer_says_what_a_mark_means_and_what_it_takes(equal: tuple[Comparison, list[list[Path]]]) -> None:
    block = table_of(*equal, {seed: [0, 1, 2, 3, 4] for seed in range(3)})
    words = tables.note([block])
    assert "the mean of 4 evaluations of rounds 1-4" in words
    assert "paired t-test over 3 seeds" in words
    assert "takes a difference of 8.1 times its standard deviation over seeds" in words
    assert "at most one in twenty" in words
    alone = comparison.plan(equal[0].out.parent / "alone", methods=EQUAL_METHODS, tables={}, seeds=[0])
    assert "no difference is marked" in tables.note([table_of(alone, equal[1], {0: [0, 1, 2, 3, 4]})])
