"""From sums over clients to masks: thresholds, and the three kinds of scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import message
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import moments_of_a_run
from torch import nn

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, LayerError
from fedfac.factor import factor_analysis
from fedfac.moments import Additive, Moments, Spread
from fedfac.rules import Asked, FactorRule, RandomRule, Scores, Threshold, VarianceRule, decide, per_layer
from fedfac.split import Split

Matrix = npt.NDArray[np.float64]
LAWS = settings(max_examples=30, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
MODEL = nn.Sequential(nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 2))
ANATOMY = Anatomy.of(MODEL)
HALF = Threshold.parse("50%")


# --- thresholds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau", "quantile", "value"),
    [
        ("50%", 0.5, 0),
        ("5%", 0.05, 0),
        ("0%", 0, 0),
        ("100%", 1, 0),
        ("62.5%", 0.625, 0),
        (" 75% ", 0.75, 0),
        ("inf", None, math.inf),
        (math.inf, None, math.inf),
        (0, None, 0),
        ("0", None, 0),
        (0.3, None, 0.3),
        ("0.3", None, 0.3),
        (7, None, 7),
    ],
)
def test_a_threshold_is_read(tau: str | float, quantile: float | None, value: float) -> None:
    assert Threshold.parse(tau) == Threshold(quantile=quantile, value=value)


@pytest.mark.parametrize(
    "tau", ["-1%", "101%", "nan%", "inf%", "%", "", "half", "nan", "-0.1", -0.1, math.nan, -math.inf, True, None]
)
def test_a_bad_threshold_is_answered_with_all_that_is_allowed(tau: Any) -> None:
    assert message(ConfigError, lambda: Threshold.parse(tau)) == (
        f"tau is {tau!r}; allowed: a quantile from '0%' to '100%' (that share of the elements is personal), "
        "'inf' (all personal), or a number from 0 (all shared) up, which is compared with the scores themselves"
    )


def scores(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@LAWS
@given(SEEDS, st.integers(1, 40))
def test_half_makes_exactly_half_of_the_elements_personal(seed: int, half: int) -> None:
    values = np.random.default_rng(seed).permutation(2 * half) / 7
    mask, value = HALF.cut(torch.from_numpy(values))
    assert mask == tuple(v >= np.sort(values)[half] for v in values)
    assert sum(mask) == half
    assert value == pytest.approx(np.median(values))


@LAWS
@given(SEEDS, st.integers(1, 60), st.integers(0, 100))
def test_a_quantile_makes_that_share_personal_up_to_one_element_the_lowest_ones(seed: int, d: int, share: int) -> None:
    values = np.random.default_rng(seed).permutation(d).astype(float)
    mask, value = Threshold.parse(f"{share}%").cut(torch.from_numpy(values))
    personal = [v for v, shared in zip(values, mask, strict=True) if not shared]
    assert abs(len(personal) - share / 100 * d) <= 1
    assert sorted(personal) == list(range(len(personal)))
    assert value == pytest.approx(np.quantile(values, share / 100))


def test_ties_at_tau_are_shared() -> None:
    assert HALF.cut(scores(0.1, 0.5, 0.5, 0.5)) == ((False, True, True, True), 0.5)
    assert HALF.cut(scores(0.5, 0.5)) == ((True, True), 0.5)
    assert Threshold.parse(0.3).cut(scores(0.3, 0.29999, 0.31)) == ((True, False, True), 0.3)


def test_zero_shares_all_and_infinity_none() -> None:
    values = scores(0.0, 0.2, 1.4)
    for tau in (0, "0", "0%"):
        assert Threshold.parse(tau).cut(values)[0] == (True, True, True)
    assert Threshold.parse("inf").cut(values) == ((False, False, False), math.inf)


# --- factor analysis -----------------------------------------------------------------------------------------------


def weights(block: Matrix) -> dict[str, torch.Tensor]:
    """A client whose first layer has these input weights, an element in every column."""
    return {"0.weight": torch.from_numpy(block.T.copy())}


def total_of(rule: FactorRule | VarianceRule, blocks: list[Matrix], before: list[Matrix] | None = None) -> Additive:
    start = before or [np.zeros_like(block) for block in blocks]
    layer = ANATOMY.layer(1)
    measured = [rule.measure(layer, weights(b), weights(a)) for b, a in zip(start, blocks, strict=True)]
    return reduce(add, measured)


def factor_rule(**options: Any) -> FactorRule:
    return FactorRule(**{"tau": {"0": HALF}, "kappa": {"0": 0.75}, **options})


def blocks_of(seed: int, clients: int = 4) -> list[Matrix]:
    draws = np.random.default_rng(seed)
    common = draws.normal(size=(6, 6))
    return [draws.normal(size=(9, 2)) @ common[:2] + draws.normal(size=(9, 6)) for _ in range(clients)]


@LAWS
@given(
    SEEDS,
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from(["principal-axis", "principal-component", "leverage"]),
)
def test_the_score_is_the_communality_among_living_elements_and_0_for_dead_ones(
    seed: int, dead: set[int], estimator: str
) -> None:
    blocks = blocks_of(seed)
    for block in blocks:
        block[:, list(dead)] = 0.25
    alive = [j for j in range(6) if j not in dead]
    R = np.atleast_2d(np.corrcoef(np.concatenate(blocks)[:, alive], rowvar=False))
    expected = factor_analysis(torch.from_numpy(R), kappa=0.75, estimator=estimator)
    rule = factor_rule(estimator=estimator)
    made = rule.score(Asked("0", 6, total_of(rule, blocks), seed=0, round=0))
    assert torch.allclose(made.values[alive], expected.communality, atol=1e-7)
    assert made.values[list(dead)].tolist() == [0] * len(dead)
    assert made.notes["dead"] == len(dead)
    assert made.notes["factors"] == expected.n_factors


def test_the_record_says_how_factor_analysis_ended() -> None:
    made = factor_rule().score(Asked("0", 6, total_of(factor_rule(), blocks_of(0)), seed=0, round=0))
    assert made.notes["converged"] in (True, False)
    assert (made.notes["iterations"] < 50) or not made.notes["converged"]
    assert made.notes["iterations"] >= 1


def test_a_layer_of_dead_elements_is_survived() -> None:
    made = factor_rule().score(Asked("0", 6, total_of(factor_rule(), [np.zeros((9, 6))] * 2), seed=0, round=0))
    assert made.values.tolist() == [0] * 6
    assert made.notes == {"factors": 0, "iterations": 0, "converged": True, "stopped": "closed form", "dead": 6}


@pytest.mark.parametrize("dead", [[3], [1, 3], [0, 1, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_dead_elements_are_personal_however_many_they_are(dead: list[int]) -> None:
    blocks = blocks_of(1)
    for block in blocks:
        block[:, dead] = 0
    rule = factor_rule()
    split = Split.of(ANATOMY, layers=[ANATOMY.layer(1)])
    mask = decide(rule, split, {"0": total_of(rule, blocks)}, seed=0, round=0).split.masks["0"]
    assert [mask[j] for j in dead] == [False] * len(dead)
    assert sum(not shared for shared in mask) >= 3


def test_updates_are_measured_when_asked_for() -> None:
    after, before = blocks_of(1), blocks_of(2)
    on_updates = total_of(factor_rule(on="updates"), after, before)
    on_weights = total_of(factor_rule(), after, before)
    assert isinstance(on_updates, Moments)
    assert isinstance(on_weights, Moments)
    moved = np.concatenate(after) - np.concatenate(before)
    assert np.allclose(on_updates.correlation(), np.corrcoef(moved, rowvar=False), atol=1e-12)
    assert np.allclose(on_weights.correlation(), np.corrcoef(np.concatenate(after), rowvar=False), atol=1e-12)


def test_each_layer_has_its_own_kappa() -> None:
    rule = FactorRule({"a": HALF, "b": HALF}, {"a": 0.2, "b": 0.99})
    total = total_of(rule, blocks_of(0))
    few, many = (rule.score(Asked(name, 6, total, seed=0, round=0)).notes["factors"] for name in ("a", "b"))
    assert few == 1
    assert many > 3


def test_bad_settings_of_the_factor_rule_are_refused() -> None:
    assert message(ConfigError, lambda: factor_rule(kappa={"0": 2.0})).startswith("kappa is 2.0; it is a share")
    assert message(ConfigError, lambda: factor_rule(estimator="leverag")) == (
        "estimator is 'leverag'. Did you mean 'leverage'?"
    )
    assert message(ConfigError, lambda: factor_rule(solver="colt")) == "solver is 'colt'. Did you mean 'cold'?"
    assert message(ConfigError, lambda: factor_rule(on="gradients")) == (
        "on is 'gradients'; factor analysis is on weights or on updates"
    )


def test_a_rule_says_which_sums_it_needs() -> None:
    assert message(ConfigError, lambda: factor_rule().score(Asked("fc", 6, None, seed=0, round=0))) == (
        "factor analysis needs the moments of layer 'fc'; it was given None"
    )
    assert message(ConfigError, lambda: VarianceRule({}).score(Asked("fc", 6, None, seed=0, round=0))) == (
        "the variance rule needs the spread of layer 'fc'; it was given None"
    )


# --- the warm solver, and its memory ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> list[Moments]:
    return moments_of_a_run("cnn")


def decisions(recorded: list[Moments], solver: str, kappa: float = 0.85) -> list[Scores]:
    rule = FactorRule({"fc1": HALF}, {"fc1": kappa}, solver=solver)
    made = [rule.score(Asked("fc1", 64, recorded[0], seed=0, round=1))]
    for number, total in enumerate(recorded[1:], start=2):
        made.append(rule.score(Asked("fc1", 64, total, seed=0, round=number, memory=made[-1].memory)))
    return made


def step(corr: Matrix, nu: Matrix, factors: int) -> Matrix:
    """One principal-axis iteration, by definition."""
    values, vectors = np.linalg.eigh(corr - np.diag(np.clip(1 - nu, 0, 1)))
    leading = np.maximum(values[::-1][:factors], 0)
    result: Matrix = (vectors[:, ::-1][:, :factors] ** 2 * leading).sum(1)
    return result


def test_the_warm_solver_goes_on_where_the_last_round_ended(recorded: list[Moments]) -> None:
    warm, cold = decisions(recorded, "warm"), decisions(recorded, "cold")
    assert torch.equal(warm[0].values, cold[0].values)
    assert warm[0].notes == cold[0].notes
    nu = warm[0].values.numpy()
    for total, made in zip(recorded[1:], warm[1:], strict=True):
        assert 1 <= made.notes["iterations"] <= 5
        assert made.notes["stopped"] in ("settled", "iterations")
        for _ in range(made.notes["iterations"]):
            nu = step(total.correlation().numpy(), nu, made.notes["factors"])
        assert np.abs(made.values.numpy() - nu).max() < 1e-9


def test_the_cold_solver_is_factor_analysis_begun_anew(recorded: list[Moments]) -> None:
    for total, made in zip(recorded, decisions(recorded, "cold"), strict=True):
        assert torch.equal(made.values, factor_analysis(total.correlation(), kappa=0.85).communality)
        assert made.memory == {}


def test_with_the_warm_solver_fewer_elements_change_sides(recorded: list[Moments]) -> None:
    def kept(made: list[Scores]) -> float:
        masks = [HALF.cut(scores.values)[0] for scores in made]
        pairs = [a == b for one, next_ in itertools.pairwise(masks) for a, b in zip(one, next_, strict=True)]
        return sum(pairs) / len(pairs)

    assert kept(decisions(recorded, "warm")) > 0.9 > kept(decisions(recorded, "cold"))


def test_both_solvers_agree_on_recorded_moments_where_50_iterations_converge(recorded: list[Moments]) -> None:
    """At κ = .2 they do; at .85 they do not, and neither do the masks (module ``factor``)."""
    warm, cold = decisions(recorded, "warm", kappa=0.2), decisions(recorded, "cold", kappa=0.2)
    for one, other in zip(warm, cold, strict=True):
        assert other.notes["stopped"] == "tolerance"
        pairs = zip(HALF.cut(one.values)[0], HALF.cut(other.values)[0], strict=True)
        assert sum(a != b for a, b in pairs) <= 2  # of 64: one that joins, one that leaves


def test_both_solvers_agree_where_the_iteration_has_a_limit_that_50_iterations_reach() -> None:
    draws = np.random.default_rng(3)
    strength = np.array([0.9, 0.1, 0.85, 0.05, 0.8, 0.15])
    rounds = [
        [np.outer(draws.normal(size=900), strength) + draws.normal(size=(900, 6)) * np.sqrt(1 - strength**2)]
        for _ in range(6)
    ]
    warm, cold = (factor_rule(kappa={"0": 0.4}, solver=solver) for solver in ("warm", "cold"))
    memory: Mapping[str, torch.Tensor] = {}
    for number, blocks in enumerate(rounds):
        total = total_of(warm, blocks)
        made = warm.score(Asked("0", 6, total, seed=0, round=number, memory=memory))
        memory = made.memory
        wanted = cold.score(Asked("0", 6, total, seed=0, round=number))
        assert HALF.cut(made.values)[0] == HALF.cut(wanted.values)[0] == (True, False, True, False, True, False)


def test_an_element_that_comes_back_to_life_is_scored_again() -> None:
    rule = factor_rule()
    dead, alive = blocks_of(1), blocks_of(2)
    for block in dead:
        block[:, 4] = 0
    first = rule.score(Asked("0", 6, total_of(rule, dead), seed=0, round=1))
    assert first.memory["communality"][4] == 0
    then = rule.score(Asked("0", 6, total_of(rule, alive), seed=0, round=2, memory=first.memory))
    assert then.values[4] > 0.01


@pytest.mark.parametrize("options", [{"solver": "cold"}, {"estimator": "leverage"}])
def test_what_begins_anew_remembers_nothing(options: dict[str, Any]) -> None:
    rule = factor_rule(**options)
    assert rule.score(Asked("0", 6, total_of(rule, blocks_of(0)), seed=0, round=0)).memory == {}
    assert RandomRule({}).score(Asked("0", 6, None, seed=0, round=0)).memory == {}


def test_a_decision_remembers_by_layer() -> None:
    split = Split.of(ANATOMY, layers=[ANATOMY.layer(1)])
    rule = factor_rule()
    sums = {"0": total_of(rule, blocks_of(0))}
    first = decide(rule, split, sums, seed=0, round=1)
    assert first.memory.keys() == {"0/communality"}
    then = decide(rule, first.split, sums, seed=0, round=2, memory=first.memory)
    alone = rule.score(Asked("0", 6, sums["0"], seed=0, round=2, memory={"communality": first.memory["0/communality"]}))
    assert then.scores["0"] == alone.values.tolist() != first.scores["0"]


# --- random and variance -------------------------------------------------------------------------------------------


@LAWS
@given(SEEDS, st.integers(0, 1000), st.integers(0, 1000))
def test_a_fixed_random_split_does_not_depend_on_the_round_and_a_redrawn_one_does(
    seed: int, one: int, other: int
) -> None:
    fixed, redrawn = RandomRule({}), RandomRule({}, redraw=True)

    def drawn(rule: RandomRule, round: int) -> list[float]:
        return [float(x) for x in rule.score(Asked("0", 8, None, seed=seed, round=round)).values]

    assert drawn(fixed, one) == drawn(fixed, other)
    assert (drawn(redrawn, one) == drawn(redrawn, other)) == (one == other)


def test_random_scores_depend_on_the_seed_and_on_the_layer() -> None:
    rule = RandomRule({})
    made = [
        rule.score(Asked(layer, 50, None, seed=seed, round=0)).values.tolist()
        for layer, seed in [("a", 0), ("b", 0), ("a", 1)]
    ]
    assert made[0] != made[1]
    assert made[0] != made[2]
    assert all(0 <= x < 1 for values in made for x in values)


def test_random_scores_are_fair() -> None:
    shared = sum(
        sum(HALF.cut(RandomRule({}).score(Asked("l", 10, None, seed=seed, round=0)).values)[0][:1])
        for seed in range(400)
    )
    assert 150 < shared < 250  # the first element: half of the time, within five standard deviations


def test_a_random_split_measures_nothing() -> None:
    made = RandomRule({}).measure(ANATOMY.layer(1), {}, {})  # type: ignore[func-returns-value]
    assert made is None
    assert (RandomRule.measures, FactorRule.measures, VarianceRule.measures) == (False, True, True)


def test_elements_that_differ_most_between_clients_score_lowest() -> None:
    draws = np.random.default_rng(0)
    common = draws.normal(size=(9, 6))
    spread = np.array([0.1, 3.0, 0.0, 0.5, 1.0, 0.2])
    rule = VarianceRule({"0": HALF})
    total = total_of(rule, [common + draws.normal(size=(9, 6)) * spread for _ in range(30)])
    assert isinstance(total, Spread)
    made = rule.score(Asked("0", 6, total, seed=0, round=0)).values
    assert made.argsort(descending=True).tolist() == np.argsort(spread).tolist()
    assert made[2].item() == pytest.approx(1, abs=1e-12)
    assert rule.tau["0"].cut(made)[0] == (True, False, True, False, False, True)


# --- decisions -----------------------------------------------------------------------------------------------------


def test_a_decision_cuts_every_layer_by_its_own_threshold() -> None:
    split = Split.of(ANATOMY, layers=ANATOMY.select([1, 2]))
    rule = RandomRule({"0": HALF, "2": Threshold.parse("inf")})
    made = decide(rule, split, {}, seed=4, round=1)
    for layer, elements in (("0", 6), ("2", 4)):
        drawn = rule.score(Asked(layer, elements, None, seed=4, round=1)).values.tolist()
        assert made.scores[layer] == drawn
    assert made.split.masks["0"] == tuple(x >= np.median(made.scores["0"]) for x in made.scores["0"])
    assert made.split.masks["2"] == (False,) * 4
    assert made.notes["0"]["tau"] == pytest.approx(np.median(made.scores["0"]))
    assert made.notes["2"]["tau"] == "inf"
    assert split.masks["0"] == (True,) * 6


def test_a_value_for_all_layers_or_one_for_each() -> None:
    layers = ANATOMY.select([1, 2])
    assert per_layer("tau", "50%", ANATOMY, layers) == {"0": "50%", "2": "50%"}
    assert per_layer("tau", {1: "5%", -2: "9%"}, ANATOMY, layers) == {"0": "5%", "2": "9%"}
    assert per_layer("tau", {"1": "5%", "-2": "9%"}, ANATOMY, layers) == {"0": "5%", "2": "9%"}
    named = nn.ModuleDict({"conv": nn.Conv1d(1, 2, 3), "fc": nn.Linear(2, 2)})
    anatomy = Anatomy.of(named)
    assert per_layer("kappa", {"fc": 0.5, 1: 0.9}, anatomy, anatomy.layers) == {"conv": 0.9, "fc": 0.5}


def test_values_for_other_layers_than_those_to_split_are_refused() -> None:
    layers = ANATOMY.select([1, 2])
    for given_for, names in (({1: "5%"}, ["0"]), ({1: "5%", 2: "5%", 3: "5%"}, ["0", "2", "3"])):
        assert message(ConfigError, lambda value=given_for: per_layer("tau", value, ANATOMY, layers)) == (  # type: ignore[misc]
            f"tau is given for the layers {names}, but the layers to split are ['0', '2']"
        )
    assert message(LayerError, lambda: per_layer("tau", {9: "5%"}, ANATOMY, layers)) == (
        "the model has no layer 9: its layers are 1 0, 2 2, 3 3"
    )


def test_a_layer_is_given_one_value_only() -> None:
    with pytest.raises(ConfigError):
        per_layer("tau", {1: "5%", -3: "90%", 2: "50%"}, ANATOMY, ANATOMY.select([1, 2]))
