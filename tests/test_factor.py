"""Factor analysis against definitions written here with numpy, and against models whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import message
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedfac.errors import ConfigError
from fedfac.factor import Factors, factor_analysis

Matrix = npt.NDArray[np.float64]
LAWS = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
KAPPAS = st.sampled_from([0.3, 0.5, 0.75, 0.85, 0.95, 0.99])


@dataclass
class Expected:
    communality: Matrix
    n_factors: int
    iterations: int = 0
    converged: bool = True


def eigen(matrix: Matrix) -> tuple[Matrix, Matrix]:
    values, vectors = np.linalg.eigh(matrix)
    order = np.argsort(values)[::-1]
    return values[order], vectors[:, order]


def number_of_factors(corr: Matrix, kappa: float) -> int:
    """The smallest m whose leading eigenvalues make up a share of at least kappa."""
    values, _ = eigen(corr)
    total = 0.0
    for m, value in enumerate(values, start=1):
        total += max(value, 0.0)
        if total / sum(v for v in values if v > 0) >= kappa:
            return m
    raise ValueError(kappa)


def loadings(matrix: Matrix, m: int) -> Matrix:
    """sqrt(eigenvalue) times eigenvector of the m largest."""
    values, vectors = eigen(matrix)
    return np.column_stack([math.sqrt(max(values[k], 0.0)) * vectors[:, k] for k in range(m)])


def principal_axis(corr: Matrix, kappa: float) -> Expected:
    """R = AA' + Psi with a diagonal Psi: begin with A of R, then A of R - Psi, until nu stands still."""
    m = number_of_factors(corr, kappa)
    nu = (loadings(corr, m) ** 2).sum(1)
    for iteration in range(1, 51):
        Psi = np.diag(np.clip(np.diag(corr) - nu, 0, 1))
        before, nu = nu, (loadings(corr - Psi, m) ** 2).sum(1)
        if np.abs(nu - before).max() < 1e-4:
            return Expected(nu, m, iteration, True)
    return Expected(nu, m, 50, False)


def principal_component(corr: Matrix, kappa: float) -> Expected:
    """A of R, and no more."""
    m = number_of_factors(corr, kappa)
    return Expected((loadings(corr, m) ** 2).sum(1), m)


def leverage(corr: Matrix, kappa: float) -> Expected:
    """Unit eigenvectors, and one factor fewer."""
    m = max(1, number_of_factors(corr, kappa) - 1)
    return Expected((eigen(corr)[1][:, :m] ** 2).sum(1), m)


DEFINITIONS = {"principal-axis": principal_axis, "principal-component": principal_component, "leverage": leverage}


def well_posed(corr: Matrix, kappa: float, estimator: str) -> Expected:
    """What the definition gives, unless it hangs on rounding: a breath of noise must not change the answer."""
    noise = 1e-13 * np.random.default_rng(0).normal(size=corr.shape)
    np.fill_diagonal(noise, 0)
    here, near = (DEFINITIONS[estimator](M, kappa) for M in (corr, corr + (noise + noise.T) / 2))
    assume(np.abs(here.communality - near.communality).max() < 1e-9 if here.n_factors == near.n_factors else False)
    assume((here.iterations, here.converged) == (near.iterations, near.converged))
    return here


def random_correlation(seed: int, d: int, rows: int) -> Matrix:
    """Of a few strong factors of different strength and noise, so that eigenvalues are apart."""
    draws = np.random.default_rng(seed)
    factors = max(1, d // 3)
    strength = 2.0 ** -np.arange(factors)
    Z = draws.normal(size=(rows, factors)) * strength @ draws.normal(size=(factors, d))
    Z += draws.normal(size=(rows, d)) * draws.uniform(0.2, 1.5, size=d)
    return np.atleast_2d(np.corrcoef(Z, rowvar=False))


def analyse(corr: Matrix, kappa: float, estimator: str = "principal-axis") -> Factors:
    return factor_analysis(torch.from_numpy(corr), kappa=kappa, estimator=estimator)


def loadings_of(found: Factors) -> torch.Tensor:
    assert found.loadings is not None
    return found.loadings


@pytest.mark.parametrize("estimator", DEFINITIONS)
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, d=st.integers(3, 14), rows=st.integers(3, 60), kappa=KAPPAS)
def test_an_estimator_is_its_definition(estimator: str, seed: int, d: int, rows: int, kappa: float) -> None:
    R = random_correlation(seed, d, rows)
    expected = well_posed(R, kappa, estimator)
    found = analyse(R, kappa, estimator)
    assert found.n_factors == expected.n_factors
    assert found.iterations == expected.iterations
    assert found.converged == expected.converged
    assert np.abs(found.communality.numpy() - expected.communality).max() < 1e-8


def test_the_random_correlations_cover_the_hard_cases() -> None:
    made = [principal_axis(random_correlation(seed, 3 + seed % 10, 3 + seed % 50), 0.85) for seed in range(60)]
    assert any(not e.converged for e in made)
    assert any(e.converged and e.n_factors > 1 for e in made)
    assert any(e.communality.max() > 1 for e in made)  # Heywood


@LAWS
@given(SEEDS, st.integers(2, 10), KAPPAS, st.sampled_from(sorted(DEFINITIONS)))
def test_communalities_are_the_squared_loadings_summed(seed: int, d: int, kappa: float, estimator: str) -> None:
    found = analyse(random_correlation(seed, d, 40), kappa, estimator)
    assert loadings_of(found).shape == (d, found.n_factors)
    assert np.allclose((loadings_of(found).numpy() ** 2).sum(1), found.communality.numpy(), atol=1e-12)
    assert found.estimator == estimator


@LAWS
@given(SEEDS, st.integers(3, 10), KAPPAS)
def test_communalities_go_with_their_elements(seed: int, d: int, kappa: float) -> None:
    R = random_correlation(seed, d, 40)
    well_posed(R, kappa, "principal-axis")
    order = np.random.default_rng(seed).permutation(d)
    nu, permuted = analyse(R, kappa).communality, analyse(R[np.ix_(order, order)], kappa).communality
    assert np.abs(permuted.numpy() - nu.numpy()[order]).max() < 1e-8


# --- known answers -------------------------------------------------------------------------------------------------

TWO = np.array([[1.0, 0.6], [0.6, 1.0]])  # eigenvalues 1.6 and 0.4, eigenvectors (1, 1) and (1, -1) over sqrt 2


def test_two_elements_by_hand() -> None:
    assert analyse(TWO, 0.8, "principal-component").communality.tolist() == pytest.approx([0.8, 0.8])
    assert analyse(TWO, 0.8, "leverage").communality.tolist() == pytest.approx([0.5, 0.5])
    axis = analyse(TWO, 0.8)
    # nu begins at .8 and goes half of its way to .6 each time: the step is below 1e-4 first at the 11th
    assert axis.iterations == 11
    assert axis.converged
    assert axis.communality.tolist() == pytest.approx([0.6 + 0.2 * 2**-11] * 2, abs=1e-12)


@pytest.mark.parametrize(("kappa", "factors"), [(0.1, 1), (0.79, 1), (0.8, 1), (0.81, 2), (1.0, 2)])
def test_factors_are_counted_until_their_share_reaches_kappa(kappa: float, factors: int) -> None:
    assert analyse(TWO, kappa).n_factors == factors
    assert analyse(TWO, kappa, "principal-component").n_factors == factors
    assert analyse(TWO, kappa, "leverage").n_factors == 1


def test_leverage_has_one_factor_fewer_but_never_none() -> None:
    R = np.eye(4)
    assert [analyse(R, kappa, "leverage").n_factors for kappa in (0.2, 0.4, 0.6, 1.0)] == [1, 1, 2, 3]


def test_all_factors_explain_everything() -> None:
    R = random_correlation(0, 6, 40)
    found = analyse(R, 1.0, "principal-component")
    assert found.n_factors == 6
    assert np.allclose((loadings_of(found) @ loadings_of(found).T).numpy(), R)


def test_one_element_is_its_own_factor() -> None:
    found = analyse(np.ones((1, 1)), 0.85)
    assert found.communality.tolist() == [1]
    assert found.n_factors == 1


def test_a_planted_factor_is_recovered() -> None:
    a = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.1])
    R = np.outer(a, a)
    np.fill_diagonal(R, 1)
    assert number_of_factors(R, 0.4) == 1
    found = factor_analysis(torch.from_numpy(R), kappa=0.4, tolerance=1e-13, max_iterations=1000)
    assert found.converged
    assert found.communality.numpy() == pytest.approx(a**2, abs=1e-9)
    assert np.abs(loadings_of(found).numpy()[:, 0]) == pytest.approx(a, abs=1e-9)
    assert analyse(R, 0.4).communality.numpy() == pytest.approx(a**2, abs=1e-3)


def test_a_planted_factor_is_recovered_from_samples_and_its_elements_rank_first() -> None:
    draws = np.random.default_rng(3)
    a = np.array([0.9, 0.1, 0.85, 0.05, 0.8, 0.15, 0.75, 0.0])
    Z = np.outer(draws.normal(size=20_000), a) + draws.normal(size=(20_000, 8)) * np.sqrt(1 - a**2)
    nu = analyse(np.atleast_2d(np.corrcoef(Z, rowvar=False)), 0.35).communality.numpy()
    assert np.abs(nu - a**2).max() < 0.03
    assert set(np.argsort(nu)[4:]) == {0, 2, 4, 6}


HEYWOOD = np.array([[1.0, 0.8, 0.8], [0.8, 1.0, 0.3], [0.8, 0.3, 1.0]])  # nu_1 = .8 * .8 / .3 = 2.1


def test_a_heywood_case_is_survived() -> None:
    assert np.linalg.eigvalsh(HEYWOOD).min() > 0
    expected = principal_axis(HEYWOOD, 0.5)
    found = analyse(HEYWOOD, 0.5)
    assert expected.n_factors == found.n_factors == 1
    assert float(found.communality[0]) > 1
    assert torch.isfinite(loadings_of(found)).all()
    assert np.abs(found.communality.numpy() - expected.communality).max() < 1e-10


@LAWS
@given(SEEDS, st.integers(2, 6), KAPPAS, st.sampled_from(sorted(DEFINITIONS)))
def test_a_singular_correlation_is_no_obstacle(seed: int, rows: int, kappa: float, estimator: str) -> None:
    R = np.atleast_2d(np.corrcoef(np.random.default_rng(seed).normal(size=(rows, 12)), rowvar=False))
    assert np.linalg.matrix_rank(R) < 12
    found = analyse(R, kappa, estimator)
    assert torch.isfinite(found.communality).all()
    assert (found.communality >= 0).all()
    assert 1 <= found.n_factors <= rows


@pytest.mark.parametrize("estimator", DEFINITIONS)
def test_all_factors_of_a_singular_correlation_are_finite(estimator: str) -> None:
    for seed in range(20):
        R = np.atleast_2d(np.corrcoef(np.random.default_rng(seed).normal(size=(5, 12)), rowvar=False))
        found = analyse(R, 1.0, estimator)
        assert torch.isfinite(loadings_of(found)).all()
        if estimator != "leverage":
            assert found.communality.tolist() == pytest.approx([1] * 12)


@pytest.mark.parametrize("estimator", DEFINITIONS)
@pytest.mark.parametrize("kappa", [0.5, 0.66, 0.7, 0.9, 0.99])
def test_a_correlation_that_noise_made_indefinite_is_survived(kappa: float, estimator: str) -> None:
    R = np.array([[1.0, 0.9, 0.8, 0.1], [0.9, 1.0, 0.2, 0.7], [0.8, 0.2, 1.0, 0.3], [0.1, 0.7, 0.3, 1.0]])
    assert np.linalg.eigvalsh(R).min() < -0.1
    expected = DEFINITIONS[estimator](R, kappa)
    found = analyse(R, kappa, estimator)
    assert torch.isfinite(loadings_of(found)).all()
    assert (found.n_factors, found.iterations) == (expected.n_factors, expected.iterations)
    assert np.abs(found.communality.numpy() - expected.communality).max() < 1e-8


def test_elements_that_are_copies_of_each_other_are_fully_explained() -> None:
    found = analyse(np.ones((5, 5)), 0.85)
    assert found.n_factors == 1
    assert found.communality.tolist() == pytest.approx([1] * 5)


def test_the_record_says_whether_it_converged() -> None:
    R = torch.from_numpy(TWO)
    stopped = factor_analysis(R, kappa=0.8, max_iterations=10)
    assert (stopped.iterations, stopped.converged) == (10, False)
    assert stopped.communality.tolist() == pytest.approx([0.6 + 0.2 * 2**-10] * 2, abs=1e-12)
    loose = factor_analysis(R, kappa=0.8, tolerance=0.06)
    assert (loose.iterations, loose.converged) == (2, True)


def test_single_precision_is_analysed_in_double() -> None:
    R = random_correlation(1, 5, 40).astype(np.float32)
    exact = analyse(R.astype(np.float64), 0.75)
    found = factor_analysis(torch.from_numpy(R), kappa=0.75)
    assert found.communality.dtype == torch.float64
    assert torch.equal(found.communality, exact.communality)


def test_the_given_correlation_is_not_changed() -> None:
    R = torch.from_numpy(TWO.copy())
    factor_analysis(R, kappa=0.8)
    assert np.array_equal(R.numpy(), TWO)


# --- going on, and stopping early ----------------------------------------------------------------------------------


def test_going_on_from_an_iterate_is_the_iteration_that_never_stopped() -> None:
    for seed in range(10):
        R = torch.from_numpy(random_correlation(seed, 12, 15))
        whole = factor_analysis(R, kappa=0.85, tolerance=0, max_iterations=30)
        half = factor_analysis(R, kappa=0.85, tolerance=0, max_iterations=10)
        rest = factor_analysis(R, kappa=0.85, tolerance=0, max_iterations=20, start=half.communality)
        assert rest.n_factors == whole.n_factors
        assert torch.allclose(rest.communality, whole.communality, atol=1e-10)
        assert not torch.allclose(half.communality, whole.communality, atol=1e-6)


def test_a_start_at_the_fixed_point_ends_at_once() -> None:
    there = factor_analysis(torch.from_numpy(TWO), kappa=0.8, start=torch.tensor([0.6, 0.6]))
    assert (there.iterations, there.converged, there.stopped) == (1, True, "tolerance")
    assert there.communality.tolist() == pytest.approx([0.6, 0.6])


def masks_in_turn(*masks: list[bool]) -> Callable[[torch.Tensor], list[bool]]:
    """Whatever ν is: first this mask, then that one, and the last one for ever."""
    turn = iter(masks)
    last: list[bool] = []

    def sides(nu: torch.Tensor) -> list[bool]:
        nonlocal last
        last = next(turn, last)
        return last

    return sides


def test_it_stops_once_the_mask_has_stood_still_for_two_iterations() -> None:
    a, b = [True, False], [False, True]
    for sequence, iterations in (([a], 2), ([a, b], 3), ([a, a, b, b], 4), ([a, b, a, b, a], 6)):
        made = factor_analysis(torch.from_numpy(TWO), kappa=0.8, sides=masks_in_turn(*sequence))
        assert (made.iterations, made.converged, made.stopped) == (iterations, False, "settled"), sequence
    hopeless = factor_analysis(torch.from_numpy(TWO), kappa=0.8, max_iterations=4, sides=masks_in_turn(a, b, a, b, a))
    assert (hopeless.iterations, hopeless.stopped) == (4, "iterations")


@pytest.mark.parametrize(("flips", "iterations"), [(2, 2), (3, 3)])
def test_one_element_in_a_hundred_may_still_change_sides(flips: int, iterations: int) -> None:
    R = torch.from_numpy(random_correlation(0, 200, 400))
    first, then = [False] * 200, [True] * flips + [False] * (200 - flips)
    assert factor_analysis(R, kappa=0.5, sides=masks_in_turn(first, then)).iterations == iterations


def test_why_it_stopped() -> None:
    R = torch.from_numpy(TWO)
    assert factor_analysis(R, kappa=0.8).stopped == "tolerance"
    assert factor_analysis(R, kappa=0.8, max_iterations=3).stopped == "iterations"
    for estimator in ("principal-component", "leverage"):
        made = factor_analysis(
            R, kappa=0.8, estimator=estimator, start=torch.zeros(2), sides=lambda nu: [bool(x > 0) for x in nu]
        )
        assert (made.stopped, made.converged, made.iterations) == ("closed form", True, 0)


def test_a_start_has_one_number_an_element() -> None:
    assert message(ConfigError, lambda: factor_analysis(torch.eye(3), kappa=0.8, start=torch.zeros(2))) == (
        "start is of shape (2,); it is one ν for each of the 3 elements"
    )


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [0.0, -0.1, 1.01, 85, math.nan, math.inf])
def test_kappa_is_a_share(kappa: float) -> None:
    assert message(ConfigError, lambda: analyse(TWO, kappa)) == (
        f"kappa is {kappa}; it is a share of variance, above 0 and at most 1 (the paper: 0.5 to 0.95)"
    )


def test_an_unknown_estimator_is_answered_with_the_nearest() -> None:
    assert message(ConfigError, lambda: analyse(TWO, 0.8, "principle-axis")) == (
        "estimator is 'principle-axis'. Did you mean 'principal-axis'?"
    )
    assert message(ConfigError, lambda: analyse(TWO, 0.8, "ml")) == (
        "estimator is 'ml'. Known: principal-axis, principal-component, leverage."
    )


@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 2, 2), (0, 0), ()])
def test_a_correlation_is_square(shape: tuple[int, ...]) -> None:
    assert message(ConfigError, lambda: factor_analysis(torch.ones(shape), kappa=0.8)) == (
        f"a correlation matrix is square; this one is {shape}"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_correlation_is_finite(bad: float) -> None:
    R = np.array([[1, bad], [bad, 1]])
    assert message(ConfigError, lambda: analyse(R, 0.8)) == "the correlation matrix holds numbers that are not finite"


@pytest.mark.parametrize(
    "matrix",
    [
        [[1.0, 0.5], [0.4, 1.0]],
        [[1.0, 0.5], [0.5001, 1.0]],
        [[2.0, 0.5], [0.5, 1.0]],
        [[0.0, 0.0], [0.0, 0.0]],
    ],
)
def test_a_correlation_is_symmetric_with_ones_on_its_diagonal(matrix: list[list[float]]) -> None:
    assert message(ConfigError, lambda: analyse(np.array(matrix), 0.8)) == (
        "a correlation matrix is symmetric with ones on its diagonal; this one is not"
    )
