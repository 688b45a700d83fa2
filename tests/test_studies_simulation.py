"""The simulation study: the generator against the paper's formulas, and the quick form against what it must show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import bitwise, check_readable, curve, message
from scipy.stats import kstest

from fedfac import check_method, fit, methods, models
from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.factor import factor_analysis
from fedfac.studies import frame, simulation, simulation_page
from fedfac.studies.frame import Ask, Finding
from fedfac.studies.simulated import SETTINGS, World, autoregressive, communality

WORLD = World(p=0.25, alpha=0.4, seed=1, clients=6, inputs=20, hidden=16, train=40, test=30)


# The generator, paper 4.3.1.


def test_sizes_and_the_true_mask() -> None:
    assert (WORLD.shared_inputs, WORLD.shared_hidden) == (8, 4)
    assert WORLD.mask == (False,) * 12 + (True,) * 4
    assert len(WORLD.federation()) == 6
    assert WORLD.federation().client(0).size == 40


def test_the_filter_gives_exactly_sigma() -> None:
    factor = autoregressive(np.eye(30))
    distance = np.abs(np.subtract.outer(np.arange(30), np.arange(30)))
    np.testing.assert_allclose(factor.T @ factor, 0.5**distance, atol=1e-12)


def test_weights_have_the_papers_distributions() -> None:
    world = replace(WORLD, inputs=100, hidden=400)
    personal, d1 = 300, 60
    for client in (0, 1):
        weights, mu = world.weights(client), world.centre(client)
        assert kstest((weights[:personal, :d1] - mu).ravel()[::7], "norm").pvalue > 1e-3
        assert kstest(weights[:personal, d1:].ravel() * 5 + 0.5, "uniform").pvalue > 1e-3  # U(-0.1, 0.1)
        assert kstest(weights[personal:, :d1].ravel() * 5 + 0.5, "uniform").pvalue > 1e-3
        assert kstest(weights[personal:, d1:].ravel() / 2 + 0.5, "uniform").pvalue > 1e-3  # U(-1, 1)
    assert (world.weights(0)[personal:] == world.weights(1)[personal:]).all()
    assert not (world.weights(0)[:personal] == world.weights(1)[:personal]).any()


def test_inputs_have_the_papers_distributions() -> None:
    x, _ = WORLD.samples(3, 20_000, "check")
    mu = WORLD.centre(3)
    np.testing.assert_allclose(x[:, :12].mean(0), mu, atol=0.04)
    np.testing.assert_allclose(x[:, 12:].mean(0), 0, atol=0.04)
    covariance = np.cov(x.T)
    np.testing.assert_allclose(covariance[0, :4], [1, 0.5, 0.25, 0.125], atol=0.04)
    np.testing.assert_allclose(covariance[12:, 12:], np.eye(8), atol=0.05)
    assert np.abs(covariance[:12, 12:]).max() < 0.05


def test_labels_follow_the_true_model_neuron_by_neuron() -> None:
    world = replace(WORLD, noise=0.0)
    x, y = world.samples(2, 50, "check")
    a, weights = world.output_weights, world.weights(2)
    for sample, label in zip(x, y, strict=True):
        response = sum(a[j] * max(0.0, float(weights[j] @ sample)) for j in range(world.hidden))
        assert label == (1 / (1 + np.exp(-response)) > 0.5)


def test_as_written_the_labels_are_nearly_constant_and_balanced_they_are_not() -> None:
    world = World(p=0.5, alpha=0.4, seed=0, clients=10)
    assert world.output_weights[:100].sum() == pytest.approx(0, abs=1e-9)
    written = replace(world, balanced=False)
    assert (written.output_weights[100:] == world.output_weights[100:]).all()
    drawn = [replace(written, seed=seed) for seed in range(12)]
    assert np.median([w.majority() for w in drawn]) > 0.95
    assert np.median([replace(w, balanced=True).majority() for w in drawn]) < 0.85
    # the reason: the sign of Σ a_q decides
    for w in drawn:
        if abs(total := w.output_weights[:100].sum()) > 8:
            assert np.mean(w.samples(0, 200, "check")[1]) == pytest.approx(float(total > 0), abs=0.02)


def test_samples_do_not_depend_on_what_else_is_drawn() -> None:
    one, other = WORLD.federation().client(5), replace(WORLD, clients=8).federation().client(5)
    for a, b in zip(one.pool.batch(one.train), other.pool.batch(other.train), strict=True):
        assert bool((a == b).all())


# Factor analysis of many clients, against the correlation of the stacked matrix.


def test_communality_is_that_of_the_stacked_weights() -> None:
    model = models.build("mlp", shape=(20,), classes=2, seed=0, hidden=16)
    layer = Anatomy.of(model).layer("fc1")
    weights = [WORLD.weights(client) for client in range(WORLD.clients)]
    nu = communality(layer, [{"fc1.weight": torch.from_numpy(w)} for w in weights], kappa=0.8)
    stacked = np.vstack([w.T for w in weights])  # rows: the inputs of all clients; columns: elements
    direct = factor_analysis(torch.from_numpy(np.corrcoef(stacked.T)), kappa=0.8)
    np.testing.assert_allclose(nu.numpy(), direct.communality.numpy(), atol=1e-6)


# A split that is given.


def test_a_given_split_keeps_the_laws() -> None:
    check_method(methods.given_split(masks={1: [True, False] * 3}))


def test_a_given_split_equals_the_random_one_with_that_mask() -> None:
    world, model = WORLD, models.build("mlp", shape=(20,), classes=2, seed=0, hidden=16)
    federation = world.federation()

    random = fit(model, federation, method=methods.random_split(layers=["fc1"]), rounds=2, cohort=3, epochs=1, lanes=1)
    given = fit(
        model, federation, method=methods.given_split(masks=random.split.masks), rounds=2, cohort=3, epochs=1, lanes=1
    )
    for client in range(len(federation)):
        assert bitwise(random.state(client), given.state(client))


def test_a_wrong_mask_says_what_is_wrong() -> None:
    model = models.build("mlp", shape=(20,), classes=2, seed=0, hidden=4)
    anatomy = Anatomy.of(model)
    said = message(ConfigError, lambda: methods.given_split(masks={"fc1": "01x1"}))
    assert said == "the mask of layer 'fc1' is '01x1'; write 1 for a shared element, 0 for a personal one"
    said = message(ConfigError, lambda: methods.given_split(masks={"fc1": "011"}).plan(anatomy))
    assert said == "a mask of 3 elements for layer 'fc1'; the split has {'fc1': 4}"
    said = message(ConfigError, lambda: methods.given_split(masks={"fc1": "0011", 1: "1100"}).plan(anatomy))
    assert said == "masks has two masks for one layer: {'fc1': '0011', 1: '1100'}"


# The study itself.


@pytest.fixture(scope="module")
def finding() -> Finding:
    return simulation.study(Ask(quick=True, lanes=2))


def test_every_method_is_measured_in_every_setting(finding: Finding) -> None:
    curves = finding.tables["curves"]
    scale = simulation.QUICK
    rounds = {t for t in range(1, scale.rounds + 1) if t % scale.evaluate_every == 0}
    for p, alpha in SETTINGS:
        for name in simulation.METHODS:
            own = [r for r in curves if (r["p"], r["alpha"], r["method"], r["balanced"]) == (p, alpha, name, True)]
            assert {r["round"] for r in own} == rounds
            assert all(0.3 < r["accuracy"] <= 1 for r in own)
    assert {r["method"] for r in curves if not r["balanced"]} == set(simulation.METHODS)


def test_what_it_shows(finding: Finding) -> None:
    found = finding.summary
    minus_true = found["minus_true"]
    assert minus_true["true"] == 0
    assert abs(minus_true["random"]) < 0.02  # a fixed random split of the right size is as good as the true one
    assert minus_true["random-redrawn"] < -0.01
    assert minus_true["fedavg"] < minus_true["random-redrawn"]
    assert found["auc"]["true parameters"] > 0.9
    assert abs(found["auc"]["before round 1 (static)"] - 0.5) < 0.1
    assert found["like_the_start"]["before round 1 (static)"] > 0.7
    assert found["kept"]["fedfac"] > 0.8
    assert abs(found["kept"]["random-redrawn"] - 0.54) < 0.1  # 0.58, 0.5 and 0.58 for p = 0.3, 0.5, 0.7


def test_the_figures_show_the_rows(finding: Finding) -> None:
    accuracy = finding.figures["accuracy"]()
    check_readable(accuracy)
    assert [axes.get_title() for axes in accuracy.axes] == [
        "p = 0.3 (α = 0.4)",
        "p = 0.5 (α = 0.4)",
        "p = 0.7 (α = 0.4)",
        "α = 0.2 (p = 0.5)",
        "α = 0.4 (p = 0.5)",
        "α = 0.8 (p = 0.5)",
    ]
    assert [text.get_text() for text in accuracy.legends[0].get_texts()] == list(simulation.METHODS)
    drawn = {str(line.get_label()): curve(line)[1] for line in accuracy.axes[2].lines}
    for name in simulation.METHODS:
        rows = [r for r in finding.tables["curves"] if (r["p"], r["alpha"], r["method"]) == (0.7, 0.4, name)]
        np.testing.assert_allclose(drawn[name], [r["accuracy"] for r in rows])  # one seed: no mean to take
    kept = finding.figures["kept"]()
    check_readable(kept)
    assert all(0 <= y <= 1 for axes in kept.axes for line in axes.lines for y in curve(line)[1])
    recovery = finding.figures["recovery"]()
    check_readable(recovery)
    left = {str(line.get_label()): curve(line) for line in recovery.axes[0].lines}
    kappas, means = left["principal-axis"]
    true = [r for r in finding.tables["recovery"] if r["weights"] == "true parameters" and r["balanced"]]
    for kappa, mean in zip(kappas, means, strict=True):
        own = [r["auc"] for r in true if (r["estimator"], r["kappa"]) == ("principal-axis", kappa)]
        assert len(own) == len(SETTINGS)
        assert mean == pytest.approx(np.mean(own))


def test_the_page_says_it(finding: Finding, tmp_path: Path) -> None:
    page = finding.page
    for name in finding.figures:
        assert f"({name}.png)" in page
    assert "**Recovery, measured**" in page
    assert f"{finding.summary['auc']['true parameters']:.2f}" in page
    curves = finding.tables["curves"]
    assert isinstance(curves, list)
    for name, sentence in (("random", "then fixed it is"), ("random-redrawn", "Redrawn every round it is\n ")):
        mean, error = simulation_page.paired(curves, name)
        words = simulation_page.verdict(mean, error)
        assert f"{sentence} {words} the true one ({mean:+.3f} ± {error:.3f})" in page
    frame.write("simulation", finding, Ask(quick=True), tmp_path / "simulation")
    assert len(list((tmp_path / "simulation").glob("*.parquet"))) == 4


def test_verdicts_follow_the_numbers() -> None:
    assert simulation_page.verdict(0.005, 0.001) == "no different from"  # within a point
    assert simulation_page.verdict(0.03, 0.02) == "no different from"  # within two standard errors
    assert simulation_page.verdict(0.03, 0.01) == "better than"
    assert simulation_page.verdict(-0.03, 0.01) == "worse than"
    rows = [
        {"p": 0.5, "alpha": 0.4, "seed": seed, "balanced": True, "method": name, "round": t, "accuracy": value + t}
        for seed in (0, 1)
        for name, value in (("true", 0.5), ("random", 0.5 + 0.1 * seed))
        for t in (1, 2)
    ]
    assert simulation_page.paired(rows, "random") == pytest.approx((0.05, 0.05))  # of 0 and 0.1, at the last round
