"""Subspace iteration against ``eigh``: what the leading eigenvectors make up of a diagonal, and the masks from it."""

from __future__ import annotations

import helpers  # noqa: F401 (one thread)
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import moments_of_a_run

from fedfac.factor import factor_analysis
from fedfac.rules import Threshold
from fedfac.subspace import Leading

Matrix = npt.NDArray[np.float64]
HALF = Threshold.parse("50%")


def explained(matrix: Matrix, factors: int) -> Matrix:
    """By definition."""
    values, vectors = np.linalg.eigh(matrix)
    result: Matrix = (np.maximum(values[-factors:], 0) * vectors[:, -factors:] ** 2).sum(1)
    return result


def correlation(seed: int, d: int, rows: int, strength: float = 0.0) -> Matrix:
    """Of ``rows`` draws of d elements, with a few common factors of that strength."""
    draws = np.random.default_rng(seed)
    common = draws.normal(size=(rows, 5)) @ draws.normal(size=(5, d))
    return np.asarray(np.corrcoef((draws.normal(size=(rows, d)) + strength * common).T))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the matrices that were decomposed."""
    seen: list[int] = []
    real = torch.linalg.eigh

    def watched(matrix: torch.Tensor) -> object:
        seen.append(len(matrix))
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    return seen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(128, 170), st.sampled_from([0.1, 0.2, 0.75, 0.9]), st.floats(0, 1))
def test_what_is_followed_is_what_is_there(seed: int, d: int, share: float, strength: float) -> None:
    matrix, factors = correlation(seed, d, 3 * d, strength), round(share * d)
    leading = Leading(factors, d)
    assert leading.pays
    draws = np.random.default_rng(seed)
    special = draws.uniform(0.2, 0.5, size=d)
    before = explained(matrix - np.diag(special), factors)
    assert np.abs(leading.explained(torch.from_numpy(matrix - np.diag(special))).numpy() - before).max() < 1e-10
    for _ in range(3):
        special = np.clip(special + draws.uniform(-0.01, 0.01, size=d), 0, 1)
        found = leading.explained(torch.from_numpy(matrix - np.diag(special))).numpy()
        wanted = explained(matrix - np.diag(special), factors)
        assert np.abs(found - wanted).max() < 0.3 * np.abs(wanted - before).max()  # mostly .03
        before = wanted


@pytest.mark.parametrize("factors", [5, 139])
def test_with_a_gap_it_is_exact(factors: int, sizes: list[int]) -> None:
    """Five strong factors, or all but five elements that hardly vary: nothing is near the border."""
    d = 144
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0]
    spectrum = np.concatenate([np.linspace(0.1, 0.2, d - factors), np.linspace(3, 4, factors)])
    matrix = (basis * spectrum) @ basis.T
    leading = Leading(factors, d)
    for shift in (0.0, 0.001, 0.002, 0.002, 0.002):
        moved = matrix - np.diag(np.linspace(0, shift, d))
        found = leading.explained(torch.from_numpy(moved)).numpy()
    assert np.abs(found - explained(moved, factors)).max() < 1e-9
    assert sizes == [d] + 4 * [leading.width]


def test_leading_eigenvalues_below_zero_count_as_none(sizes: list[int]) -> None:
    """They cannot be told from the other end, so it is an eigh again."""
    matrix = correlation(2, 150, 300)
    special = np.full(150, 0.9)
    leading = Leading(120, 150)
    leading.explained(torch.from_numpy(matrix - np.diag(special)))
    special[:75] += 0.01
    found = leading.explained(torch.from_numpy(matrix - np.diag(special))).numpy()
    assert np.linalg.eigvalsh(matrix - np.diag(special))[30] < 0
    assert np.abs(found - explained(matrix - np.diag(special), 120)).max() < 1e-10
    assert sizes == [150, leading.width, 150]


@pytest.mark.parametrize("factors", [20, 120])
def test_a_diagonal_that_jumps_is_survived(factors: int) -> None:
    matrix = correlation(3, 140, 200, 0.5)
    leading = Leading(factors, 140)
    leading.explained(torch.from_numpy(matrix))
    jumped = matrix - np.diag(np.linspace(0, 1, 140))
    for _ in range(12):  # it comes back to what is there
        found = leading.explained(torch.from_numpy(jumped)).numpy()
    assert np.abs(found - explained(jumped, factors)).max() < 1e-3


@pytest.mark.parametrize(("factors", "d"), [(30, 127), (70, 140), (60, 140), (80, 140)])
def test_where_it_does_not_pay_it_is_an_eigh(factors: int, d: int, sizes: list[int]) -> None:
    matrix = torch.from_numpy(correlation(4, d, 300))
    leading = Leading(factors, d)
    for _ in range(3):
        assert np.abs(leading.explained(matrix).numpy() - explained(matrix.numpy(), factors)).max() < 1e-10
    assert sizes == [d, d, d]


@pytest.fixture(scope="module")
def recorded() -> list[torch.Tensor]:
    """Of a run with 200 hidden neurons, round by round."""
    return [total.correlation() for total in moments_of_a_run("mlp")]


@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.85, 0.95])
def test_masks_are_those_of_an_eigh_in_every_iteration_on_recorded_moments(
    kappa: float, recorded: list[torch.Tensor], sizes: list[int]
) -> None:
    """Without subspaces, as many iterations from the same start: round by round, ν and the mask."""
    assert len(recorded) == 12
    nu = factor_analysis(recorded[0], kappa=kappa).communality
    sizes.clear()
    followed = 0
    for corr in recorded[1:]:
        fast = factor_analysis(corr, kappa=kappa, start=nu, max_iterations=5, sides=lambda found: HALF.cut(found)[0])
        followed += sum(size < 200 for size in sizes)
        sizes.clear()
        exact = factor_analysis(corr, kappa=kappa, start=nu, max_iterations=fast.iterations, tolerance=0)
        assert (fast.n_factors, fast.iterations) == (exact.n_factors, exact.iterations)
        pairs = zip(HALF.cut(fast.communality)[0], HALF.cut(exact.communality)[0], strict=True)
        assert sum(a != b for a, b in pairs) <= 2  # of 200: one that joins, one that leaves
        assert float((fast.communality - exact.communality).abs().max()) < 0.005
        nu = fast.communality
        sizes.clear()
    assert followed >= 11  # one or more of every round's iterations
