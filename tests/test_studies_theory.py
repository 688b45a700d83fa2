"""The study of the theory: gradients by autograd, kernels by Monte Carlo, one round by hand, and the quick form."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import check_readable, curve
from torch import Tensor

from fedfac.studies import theory, theory_page
from fedfac.studies.frame import Ask, Finding
from fedfac.studies.tangent import (
    NETWORKS,
    Part,
    Problem,
    Rates,
    Spectrum,
    complexity,
    fedavg,
    fedsplit,
    gradients,
    gram,
    kernel,
    outputs,
    own_blocks,
    step,
)

PROBLEM = Problem.draw(clients=3, samples=4, inputs=5, seed=1, test=10)


def network(personal: int = 6, shared: int = 7) -> list[Part]:
    return fedsplit(5, 3, personal=personal, shared=shared, seed=2)


def test_the_problem_is_as_assumption_1_wants_it() -> None:
    assert PROBLEM.x.norm(dim=2).sub(1).abs().max() < 1e-12
    assert PROBLEM.y.abs().max() <= 1
    cosine = (PROBLEM.x.reshape(-1, 5) @ PROBLEM.x.reshape(-1, 5).T).fill_diagonal_(0)
    assert cosine.abs().max() < 1 - 1e-6  # no two are parallel
    noisy = Problem.draw(clients=3, samples=4000, inputs=5, seed=1, noise=0.5)
    assert (noisy.y.abs() == 1).double().mean() == pytest.approx(0.5, abs=0.05)


def test_the_network_is_model_4() -> None:
    personal, shared = network()
    for c in range(3):
        for i in range(4):
            x = PROBLEM.x[c, i]
            own = sum(personal.signs[q] * max(0.0, float(personal.weights[c, q] @ x)) for q in range(6))
            common = sum(shared.signs[r] * max(0.0, float(shared.weights[r] @ x)) for r in range(7))
            want = float(own) / math.sqrt(6) + float(common) / math.sqrt(7)
            assert float(outputs([personal, shared], PROBLEM.x)[c, i]) == pytest.approx(want, abs=1e-12)


def test_written_gradients_are_autograds() -> None:
    parts = [part.local(3) for part in network()]
    free = [replace(part, weights=part.weights.clone().requires_grad_()) for part in parts]
    # l_c of every client has the factor 1/2n; their sum separates, since every client has its own copy
    loss = (outputs(free, PROBLEM.x) - PROBLEM.y).square().sum() / (2 * PROBLEM.samples)
    wanted = torch.autograd.grad(loss, [part.weights for part in free])
    for mine, theirs in zip(gradients(parts, PROBLEM.x, PROBLEM.y), wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-10


def test_a_round_is_the_papers_update() -> None:
    """Δw of both kinds, summed over local steps by the paper's formulas, with loops and autograd."""
    personal, shared = network()
    eta, steps, eta_g = 0.03, 3, 0.5
    after = step([personal, shared], PROBLEM.x, PROBLEM.y, eta_l=eta, local_steps=steps, eta_g=eta_g)
    total = torch.zeros_like(shared.weights)
    for c in range(3):
        mine, common = personal.weights[c].clone(), shared.weights.clone()
        x, y = PROBLEM.x[c], PROBLEM.y[c]
        for _ in range(steps):
            h = torch.relu(x @ mine.T) @ personal.signs / math.sqrt(6)
            h = h + torch.relu(x @ common.T) @ shared.signs / math.sqrt(7)
            new_mine, new_common = mine.clone(), common.clone()
            for i in range(4):
                for q in range(6):
                    if mine[q] @ x[i] >= 0:
                        new_mine[q] += personal.signs[q] * eta / math.sqrt(6) * (y[i] - h[i]) * x[i]
                for r in range(7):
                    if common[r] @ x[i] >= 0:
                        new_common[r] += shared.signs[r] * eta / math.sqrt(7) * (y[i] - h[i]) * x[i]
            mine, common = new_mine, new_common
        total += common - shared.weights
        assert (after[0].weights[c] - mine).abs().max() < 1e-12
    assert (after[1].weights - (shared.weights + eta_g * total / 3)).abs().max() < 1e-12


def test_the_closed_form_is_the_expectation() -> None:
    draws = torch.Generator().manual_seed(0)
    rows = PROBLEM.x.reshape(-1, 5) * torch.linspace(0.3, 1.0, 12, dtype=torch.float64)[:, None]  # norms below 1 too
    active = (torch.randn(400_000, 5, generator=draws, dtype=torch.float64) @ rows.T >= 0).double()
    sampled = (rows @ rows.T) * (active.T @ active) / len(active)
    assert (kernel(rows[None]) - sampled).abs().max() < 0.004
    assert torch.allclose(kernel(rows[None]).diagonal(), rows.square().sum(1) / 2)


def test_kernels_of_wide_networks_come_near_the_closed_form() -> None:
    limit = kernel(PROBLEM.x)
    far, near = (
        [(gram(part, PROBLEM.x) - want).abs().max() for part, want in zip(parts, limits, strict=True)]
        for parts in (network(50, 50), network(20_000, 20_000))
        for limits in [(own_blocks(limit, 3), limit)]
    )
    assert max(near) < 0.02 < min(far)


def test_the_gram_matrix_is_that_of_the_tangent_features() -> None:
    """H_ij = ∇h(x_i) · ∇h(x_j) over the part's weights, by autograd."""
    personal, shared = network()

    def features(part: Part, c: int, i: int) -> Tensor:
        weights = part.weights.clone().requires_grad_()
        (slope,) = torch.autograd.grad(outputs([replace(part, weights=weights)], PROBLEM.x)[c, i], weights)
        return slope.reshape(-1)

    for part in (personal, shared):
        rows = torch.stack([features(part, c, i) for c in range(3) for i in range(4)])
        assert (rows @ rows.T - gram(part, PROBLEM.x)).abs().max() < 1e-12


def test_personal_blocks_and_their_eigenvalues() -> None:
    shared = kernel(PROBLEM.x)
    personal = own_blocks(shared, 3)
    assert (personal[:4, :4] == shared[:4, :4]).all()
    assert (personal[:4, 4:] == 0).all()
    s, p = Spectrum.of(shared), Spectrum.of(personal)
    assert 0 < s.smallest <= p.smallest <= p.largest <= s.largest  # interlacing: a block is a principal submatrix
    values = np.linalg.eigvals(shared.numpy()).real
    assert (s.smallest, s.largest) == pytest.approx((values.min(), values.max()))
    assert s.condition == pytest.approx(values.max() / values.min())


def test_small_steps_follow_the_kernels() -> None:
    """h(1) − h(0) = −(ρ₁H^s + ρ₂H^p)(h − y) to first order in the step: the theorem's ρ₁ and ρ₂ are the right ones."""
    parts = network(40, 30)
    residual = (outputs(parts, PROBLEM.x) - PROBLEM.y).reshape(-1)
    rates = Rates.of(1e-7, 4, 3, eta_g=2.0)
    after = step(parts, PROBLEM.x, PROBLEM.y, eta_l=1e-7, local_steps=4, eta_g=2.0)
    moved = (outputs(after, PROBLEM.x) - outputs(parts, PROBLEM.x)).reshape(-1)
    both = rates.personal * gram(parts[0], PROBLEM.x) + rates.shared * gram(parts[1], PROBLEM.x)
    np.testing.assert_allclose(moved.numpy(), -(both @ residual).numpy(), rtol=1e-4)
    assert rates.bound(0.2, 0.3) == pytest.approx(1 - 0.5 * (2e-7 * 4 / 3 * 0.2 + 4e-7 * 0.3))


def test_fedavg_is_fedsplit_without_a_personal_part_and_averages_all() -> None:
    parts = fedavg(5, widths=[8], seed=0)
    assert not parts[0].personal
    one = step(parts, PROBLEM.x, PROBLEM.y, eta_l=0.1, local_steps=1)
    # one local step: the mean of the clients' gradients of Σ(h − y)²/2
    (slope,) = gradients([part.local(3) for part in parts], PROBLEM.x, PROBLEM.y)
    assert torch.allclose(one[0].weights, parts[0].weights - 0.1 * 4 * slope.mean(0))


def test_the_complexity_of_a_known_matrix() -> None:
    y = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0, 0.5], dtype=torch.float64))
    assert complexity(y, matrix, 2) == pytest.approx(2 * math.sqrt(2 / 2 * (1 + 2 + 0 + 2)))


# The study itself.


@pytest.fixture(scope="module")
def finding() -> Finding:
    return theory.study(Ask(quick=True))


def test_what_it_shows(finding: Finding) -> None:
    found = finding.summary
    assert found["rounds_above_the_bound"] == dict.fromkeys(NETWORKS, 0)
    fast, slow = (found["rounds_to_a_thousandth"][name] for name in ("FedSplit", "FedAvg, two networks"))
    assert fast < slow
    assert found["lambda_p_at_least_lambda_s"] is True
    assert found["rounds_to_halve_by_the_theorem"] > 1000
    for name in NETWORKS:
        rows = [row for row in finding.tables["convergence"] if row["network"] == name]
        assert all(b["error"] < a["error"] for a, b in pairwise(rows))
        assert all(0.2 < row["error"] / row["prediction"] < 5 for row in rows[: len(rows) // 3])
    widths = [row for row in finding.tables["effects"] if row["varied"] == "width"]
    assert widths[0]["start_shared"] > widths[-1]["start_shared"]


def test_random_responses_are_harder(finding: Finding) -> None:
    rows = finding.tables["generalisation"]
    for noise, other in zip([r for r in rows if r["noise"] == 0], [r for r in rows if r["noise"] == 0.5], strict=True):
        assert (noise["clients"], noise["samples"], noise["seed"]) == (
            other["clients"],
            other["samples"],
            other["seed"],
        )
        assert noise["complexity"] < other["complexity"]
    assert all(row["complexity"] == pytest.approx(row["without_c"] * row["clients"]) for row in rows)


def test_the_figures_show_the_rows(finding: Finding) -> None:
    drawn = {name: draw() for name, draw in finding.figures.items()}
    for figure in drawn.values():
        check_readable(figure)
    left = drawn["convergence"].axes[0]
    assert left.get_yscale() == "log"
    assert left.get_legend_handles_labels()[1] == list(NETWORKS)
    split = [row for row in finding.tables["convergence"] if row["network"] == "FedSplit"]
    np.testing.assert_allclose(curve(left.lines[0])[1], [row["error"] for row in split])
    np.testing.assert_allclose(curve(left.lines[2])[1], [row["bound"] for row in split])
    eigenvalues = drawn["effects"].axes[0]
    rows = [row for row in finding.tables["effects"] if row["varied"] == "clients"]
    for line, column in zip(eigenvalues.lines, ("lambda_s", "lambda_p"), strict=True):
        for clients, value in zip(*curve(line), strict=True):
            assert value == pytest.approx(np.mean([row[column] for row in rows if row["clients"] == clients]))
    points = drawn["generalisation"].axes[2].collections[0].get_offsets()
    assert len(np.asarray(points)) == len(finding.tables["generalisation"])


def test_the_page_says_it(finding: Finding) -> None:
    for name in finding.figures:
        assert f"({name}.png)" in finding.page
    assert "FedSplit's error is above its bound in 0 of 60 rounds" in finding.page
    assert f"{finding.summary['smallest_complexity']:.2f} in all" in finding.page


def test_a_broken_bound_would_be_counted() -> None:
    rows = [{"round": t, "error": 0.5**t, "bound": 0.4**t} for t in range(4)]
    assert theory_page.broken(rows) == 3
    assert theory_page.rounds_to(rows, 0.25) == 2
    assert theory_page.rounds_to(rows, 0.01) is None
