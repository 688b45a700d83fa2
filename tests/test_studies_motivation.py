"""The motivating example: entropy against distributions whose entropy is known, and the quick form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import check_readable, message
from matplotlib.patches import Rectangle
from torch import nn

from fedfac.data.digits import digits
from fedfac.errors import DataError
from fedfac.studies import motivation
from fedfac.studies.entropy import JITTER, entropy
from fedfac.studies.frame import Ask, Finding

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_entropy_of_known_distributions(k: int) -> None:
    n = 4000
    table = np.column_stack([RNG.standard_normal(n), RNG.uniform(0, 3, n), RNG.exponential(1, n), RNG.laplace(0, 2, n)])
    known = [0.5 * math.log(2 * math.pi * math.e), math.log(3), 1.0, 1 + math.log(4)]
    np.testing.assert_allclose(entropy(table, k=k), known, atol=0.07)


def test_entropy_by_the_definition() -> None:
    """Against every distance written out, on values so far apart that the jitter does not matter."""
    values = RNG.uniform(0, 1, 40)
    psi = {n: -0.5772156649015329 + sum(1 / i for i in range(1, n)) for n in (40, 3)}
    kth = [sorted(abs(v - w) for w in values)[3] for v in values]  # place 0 is the value itself
    by_hand = psi[40] - psi[3] + math.log(2) + np.mean(np.log(kth))
    assert entropy(values[:, None], k=3)[0] == pytest.approx(by_hand, abs=0.05)


def test_entropy_moves_with_scale_and_not_with_place() -> None:
    table = RNG.standard_normal((300, 1))
    assert entropy(7 * table)[0] == pytest.approx(entropy(table)[0] + math.log(7))
    assert entropy(table + 0.5)[0] == pytest.approx(entropy(table)[0], abs=0.01)


def test_equal_outputs_have_the_entropy_of_the_jitter() -> None:
    table = np.column_stack([np.zeros(500), RNG.standard_normal(500)])
    assert entropy(table)[0] == pytest.approx(math.log(2 * JITTER * np.abs(table).max()), abs=0.1)


def test_too_few_rows() -> None:
    said = message(DataError, lambda: entropy(np.zeros((3, 2)), k=3))
    assert said == "entropy of the k = 3 nearest of (3, 2): give a table with more than k rows"


def test_clients_of_one_digit_and_of_all() -> None:
    samples = digits()
    skewed = motivation.cut(samples, "non-IID", 10, seed=0)
    assert len(skewed) == 100
    assert skewed.names[37] == "3-7"
    numbers: list[int] = []
    for index in range(100):
        client = skewed.client(index)
        everything = torch.cat([client.train, client.test])
        assert set(client.pool.batch(everything)[1].tolist()) == {index // 10}
        numbers += everything.tolist()
    assert sorted(numbers) == list(range(1797))
    even = motivation.cut(samples, "IID", 10, seed=0)
    assert len(even) == 100
    seen = [len(set(even.client(i).pool.batch(even.client(i).train)[1].tolist())) for i in range(100)]
    assert min(seen) >= 4


def test_outputs_are_means_after_relu() -> None:
    linear = nn.Linear(4, 3)
    model = nn.Sequential(nn.Flatten(), linear, nn.ReLU(), nn.Linear(3, 2))
    images = torch.randn(5, 1, 2, 2)
    by_hand = (images.reshape(5, 4) @ linear.weight.T + linear.bias).clamp_min(0).mean(0)
    np.testing.assert_allclose(motivation.hidden_outputs(model, images), by_hand.detach().numpy(), rtol=1e-5)


def test_peaks_of_one_hump_and_of_two() -> None:
    one, two = RNG.normal(0, 1, 300), np.concatenate([RNG.normal(0, 0.5, 150), RNG.normal(5, 0.5, 150)])
    assert len(motivation.peaks(one)) == 1
    assert motivation.peaks(two) == pytest.approx([0, 5], abs=0.4)


# The study itself.


@pytest.fixture(scope="module")
def finding() -> Finding:
    return motivation.study(Ask(quick=True, lanes=2))


def test_what_it_shows(finding: Finding) -> None:
    found = {(row["case"], row["view"]): row for row in finding.summary["views"]}
    for view in motivation.VIEWS:  # clients with other digits have other outputs, by any view
        assert found["non-IID", view]["deviation"] > 1.3 * found["IID", view]["deviation"]
    assert finding.summary["accuracy"]["non-IID"] > 0.99
    outputs = finding.tables["outputs"]
    assert outputs.num_rows == 2 * 3 * 100 * 200  # type: ignore[union-attr]
    assert len(finding.tables["entropy"]) == 2 * 3 * 200


def test_the_figures_show_the_numbers(finding: Finding) -> None:
    heatmap = finding.figures["heatmap"]()
    check_readable(heatmap)
    panels = [axes for axes in heatmap.axes if axes.get_label() != "<colorbar>"]
    assert [axes.get_title() for axes in panels] == [
        "IID, own images",
        "non-IID, own images",
        "IID, same images",
        "non-IID, same images",
    ]
    for axes in panels:
        shown = np.asarray(axes.images[0].get_array())
        assert shown.shape == (200, 100)
        assert (np.diff(shown.mean(1)) <= 1e-12).all()  # the largest mean outputs are on top
    histograms = finding.figures["entropy"]()
    check_readable(histograms)
    for axes in histograms.axes:
        assert sum(bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)) == 200


def test_the_page_says_it(finding: Finding) -> None:
    for name in finding.figures:
        assert f"({name}.png)" in finding.page
    for share in finding.summary["higher_entropy_non_iid"].values():
        assert f"{share:.0%}" in finding.page
