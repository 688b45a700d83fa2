"""FedEM against expectation-maximisation written out in NumPy, on mixtures whose truth is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from helpers import bits, bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.data.pool import ArrayPool, ClientData
from fedfac.errors import FedfacError
from fedfac.method import Begin, Loss, Step, per_sample
from fedfac.methods.fedem import Mixture, expectation, settle_shares, weighted_loss
from fedfac.state import references, state_of

Floats = npt.NDArray[np.float64]
NOTHING = torch.empty(0, dtype=torch.int64)


class Table(nn.Module):
    """The same log-probabilities whatever the input: its exact M step is a weighted count."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def tables(probabilities: npt.ArrayLike, pi: Sequence[float] | None = None) -> Mixture:
    """A mixture of tables, one row each."""
    rows = np.asarray(probabilities, dtype=float).tolist()
    mixture = Mixture(nn.Linear(1, 1), len(rows), 0)
    mixture.components = nn.ModuleList(Table(row) for row in rows)
    if pi is not None:
        mixture.pi.copy_(torch.tensor(pi))
    return mixture


def rows_of(mixture: Mixture) -> Tensor:
    """The logits of a mixture of tables."""
    return torch.stack([p.detach() for p in mixture.components.parameters()])


def labelled(labels: npt.ArrayLike) -> ClientData:
    """A client of whom only the labels matter."""
    y = torch.tensor(np.asarray(labels))
    return ClientData(ArrayPool(torch.zeros(len(y), 1), y), torch.arange(len(y)), NOTHING, NOTHING)


def log_softmax(logits: Tensor) -> Floats:
    values: Floats = logits.detach().double().numpy()
    shifted = values - values.max(1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def responsibilities(log_likelihoods: Floats, pi: Floats) -> Floats:
    joint = pi * np.exp(log_likelihoods)
    result: Floats = joint / joint.sum(1, keepdims=True)
    return result


def log_likelihood(labels: npt.NDArray[np.int64], probabilities: Floats, pi: Floats) -> float:
    return float(np.log(pi @ probabilities[:, labels]).sum())


# --- the E step ----------------------------------------------------------------------------------------------------


def image_client(n: int, seed: int = 0) -> ClientData:
    """n training samples in another order than that of the pool, among samples of others."""
    draws = torch.Generator().manual_seed(seed)
    pool = ArrayPool(torch.randn(n + 9, 2, 6, 6, generator=draws), torch.randint(3, (n + 9,), generator=draws))
    return ClientData(pool, torch.randperm(n + 9, generator=draws)[:n], NOTHING, NOTHING)


@pytest.mark.parametrize("n", [1, 30, 700])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_the_e_step_is_bayes_rule_on_every_sample(n: int, loss: Loss) -> None:
    """Components in eval mode, rows in the order of the client's samples, shares as they were before."""
    mixture, data = Mixture(small_model(), 3, 0), image_client(n)
    pi = np.array([0.2, 0.7, 0.1])
    mixture.pi.copy_(torch.tensor(pi))
    mixture.train()
    before = state_of(mixture)
    q = expectation(Begin(mixture, data, loss))
    assert mixture.training
    assert all(module.training for module in mixture.modules())
    mixture.eval()
    x, y = data.pool.batch(data.train)
    logs = np.stack([log_softmax(c(x))[np.arange(n), y.numpy()] for c in mixture.components], axis=1)
    wanted = responsibilities(logs, pi)
    assert q.shape == (n, 3)
    np.testing.assert_allclose(q.numpy(), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mixture.pi.numpy(), wanted.mean(0), rtol=1e-5, atol=1e-6)
    assert wanted.std(0).min() > 1e-3 or n == 1
    after = state_of(mixture)
    assert bitwise({k: v for k, v in after.items() if k != "pi"}, {k: v for k, v in before.items() if k != "pi"})


def test_the_e_step_by_hand() -> None:
    """π = (.5, .5), y = 0 and 1, p₁ = (.8, .2), p₂ = (.2, .8): q = (.8, .2) and (.2, .8), then (.8, .2) thrice."""
    mixture = tables([[0.8, 0.2], [0.2, 0.8]])
    q = expectation(Begin(mixture, labelled([0, 1, 0, 0]), F.cross_entropy))
    np.testing.assert_allclose(q.numpy(), [[0.8, 0.2], [0.2, 0.8], [0.8, 0.2], [0.8, 0.2]], atol=1e-12)
    np.testing.assert_allclose(mixture.pi.numpy(), [0.65, 0.35], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40))
def test_responsibilities_and_shares_are_distributions(seed: int, m: int, n: int) -> None:
    draws = np.random.default_rng(seed)
    mixture = tables(draws.dirichlet(np.ones(4), m), draws.dirichlet(np.ones(m)).tolist())
    q = expectation(Begin(mixture, labelled(draws.integers(4, size=n)), F.cross_entropy)).numpy()
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-12)
    assert q.min() >= 0
    np.testing.assert_allclose(mixture.pi.numpy(), q.mean(0), atol=1e-12)


def test_a_component_without_a_share_stays_without_one() -> None:
    mixture = tables([[0.8, 0.2], [0.2, 0.8], [0.5, 0.5]], [0.6, 0.4, 0.0])
    q = expectation(Begin(mixture, labelled([0, 1]), F.cross_entropy)).numpy()
    np.testing.assert_allclose(q, [[6 / 7, 1 / 7, 0], [3 / 11, 8 / 11, 0]], atol=1e-12)


# --- the M step ----------------------------------------------------------------------------------------------------


def test_the_m_step_s_loss_weighs_every_sample_by_its_responsibility() -> None:
    mixture, data = Mixture(small_model(), 3, 0).eval(), image_client(20)
    q = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(3), 20))
    index = torch.tensor([17, 3, 4, 11, 0])
    x, y = data.pool.batch(data.train[index])
    value = weighted_loss(Step(mixture, x, y, F.cross_entropy, {}, index, q))
    wanted = 0.0
    for m, component in enumerate(mixture.components):
        losses = -log_softmax(component(x))[np.arange(5), y.numpy()]
        wanted += sum(float(q[i, m]) * loss for i, loss in zip(index.tolist(), losses, strict=True)) / 5
    assert value.item() == pytest.approx(wanted, rel=1e-5)


def test_a_component_that_no_sample_belongs_to_has_no_gradient() -> None:
    mixture, data = Mixture(small_model(), 2, 0).eval(), image_client(6)
    q = torch.tensor([[1.0, 0.0]] * 6, dtype=torch.float64)
    x, y = data.pool.batch(data.train)
    weighted_loss(Step(mixture, x, y, F.cross_entropy, {}, torch.arange(6), q)).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in mixture.named_parameters()}
    assert all(g is not None for g in gradients.values())
    assert all(
        (float(g.abs().max()) > 0) == name.startswith("components.0.") for name, g in gradients.items() if g is not None
    )


# --- EM with exact M steps -----------------------------------------------------------------------------------------

TRUTH = np.array(
    [
        [0.60, 0.39, 0.003, 0.003, 0.002, 0.002],
        [0.002, 0.003, 0.45, 0.54, 0.003, 0.002],
        [0.003, 0.002, 0.002, 0.003, 0.3, 0.69],
    ]
)
SHARES = np.array(
    [[0.98, 0.01, 0.01], [0.01, 0.98, 0.01], [0.01, 0.01, 0.98], [0.2, 0.5, 0.3], [0.7, 0.1, 0.2], [0.1, 0.3, 0.6]]
)


def run_em(
    truth: Floats, shares: Floats, start: Floats, *, n: int, steps: int, seed: int = 0
) -> tuple[list[float], Floats, Floats]:
    """E steps of every client, then the exact M step of all; the total log-likelihood before every iteration."""
    draws = np.random.default_rng(seed)
    m, k = truth.shape
    data = []
    for pi in shares:
        hidden = draws.choice(m, size=n, p=pi)
        data.append(np.array([draws.choice(k, p=truth[h]) for h in hidden]))
    clients = [tables(start) for _ in shares]
    trace = []
    for _ in range(steps):
        now = np.exp(log_softmax(rows_of(clients[0])))
        trace.append(sum(log_likelihood(y, now, mix.pi.numpy()) for mix, y in zip(clients, data, strict=True)))
        counts = np.zeros((m, k))
        for mixture, y in zip(clients, data, strict=True):
            q = expectation(Begin(mixture, labelled(y), F.cross_entropy)).numpy()
            for label in range(k):
                counts[:, label] += q[y == label].sum(0)
        best = torch.tensor(np.log(np.maximum(counts, 1e-300) / counts.sum(1, keepdims=True)))
        for mixture in clients:
            for row, logits in zip(best, mixture.components.parameters(), strict=True):
                logits.data.copy_(row)
    return trace, np.exp(best.numpy()), np.stack([c.pi.numpy() for c in clients])


def test_the_likelihood_never_falls_and_the_truth_is_recovered() -> None:
    start = np.random.default_rng(1).dirichlet(np.ones(6) * 5, 3)
    trace, components, pi = run_em(TRUTH, SHARES, start, n=1500, steps=120)
    assert all(after >= before - 1e-9 * abs(before) for before, after in itertools.pairwise(trace))
    assert trace[-1] > trace[0] + 1000
    order = min(itertools.permutations(range(3)), key=lambda p: float(np.abs(components[list(p)] - TRUTH).sum()))
    assert np.abs(components[list(order)] - TRUTH).max() < 0.05
    assert np.abs(pi[:, list(order)] - SHARES).max() < 0.05


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(2, 5))
def test_the_likelihood_never_falls_whatever_the_truth(seed: int, m: int, k: int) -> None:
    draws = np.random.default_rng(seed)
    truth, shares = draws.dirichlet(np.ones(k), m), draws.dirichlet(np.ones(m), 3)
    trace, _, _ = run_em(truth, shares, draws.dirichlet(np.ones(k) * 2, m), n=40, steps=12, seed=seed)
    assert all(after >= before - 1e-9 * abs(before) for before, after in itertools.pairwise(trace))
    assert trace[-1] > trace[0]


# --- shares alone --------------------------------------------------------------------------------------------------


def settled(probabilities: Floats, labels: npt.NDArray[np.int64]) -> Floats:
    mixture = tables(probabilities)
    before = bits(rows_of(mixture))
    settle_shares(Begin(mixture, labelled(labels), F.cross_entropy))
    assert bits(rows_of(mixture)) == before
    result: Floats = mixture.pi.numpy()
    return result


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.85, 1.0])
def test_two_shares_settle_at_the_most_likely_ones(share: float) -> None:
    draws = np.random.default_rng(3)
    probabilities = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])
    labels = draws.choice(3, size=400, p=share * probabilities[0] + (1 - share) * probabilities[1])
    best = minimize_scalar(
        lambda p: -log_likelihood(labels, probabilities, np.array([p, 1 - p])),
        bounds=(0, 1),
        method="bounded",
        options={"xatol": 1e-9},
    )
    grid = np.linspace(0, 1, 10001)
    values = [log_likelihood(labels, probabilities, np.array([p, 1 - p])) for p in grid]
    assert best.x == pytest.approx(grid[int(np.argmax(values))], abs=2e-4)
    assert settled(probabilities, labels)[0] == pytest.approx(best.x, abs=2e-3)


def test_three_shares_settle_at_the_most_likely_ones() -> None:
    draws = np.random.default_rng(4)
    labels = draws.choice(6, size=600, p=np.array([0.2, 0.5, 0.3]) @ TRUTH)
    best = minimize(
        lambda p: -log_likelihood(labels, TRUTH, p) / 600,
        np.full(3, 1 / 3),
        method="SLSQP",
        bounds=[(1e-9, 1)] * 3,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-12},
    )
    np.testing.assert_allclose(settled(TRUTH, labels), best.x, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 60))
def test_no_other_shares_are_more_likely(seed: int, n: int) -> None:
    draws = np.random.default_rng(seed)
    probabilities, labels = draws.dirichlet(np.ones(4), 3), draws.integers(4, size=n)
    found = log_likelihood(labels, probabilities, settled(probabilities, labels))
    for pi in draws.dirichlet(np.ones(3) * 0.5, 300):
        assert found >= log_likelihood(labels, probabilities, pi) - 1e-3 * n


# --- a loss, sample by sample --------------------------------------------------------------------------------------


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean loss that knows no other reduction."""
    return F.cross_entropy(outputs, targets)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "with a reduction": F.cross_entropy,
    "without one": plain,
    "a module": nn.CrossEntropyLoss(),
    "with label smoothing": partial(F.cross_entropy, label_smoothing=0.2),
    "a module with label smoothing": nn.CrossEntropyLoss(label_smoothing=0.2),
    "with an ignored label": partial(F.cross_entropy, ignore_index=0),
    "a module with an ignored label": nn.CrossEntropyLoss(ignore_index=0),
}


@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 5), (7, 4, 5, 2)], ids=["classes", "sequences", "maps"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_sample_is_the_loss_of_every_sample_by_itself(name: str, shape: tuple[int, ...]) -> None:
    draws = torch.Generator().manual_seed(0)
    outputs = torch.randn(shape, generator=draws)
    targets = torch.randint(4, (shape[0], *shape[2:]), generator=draws)
    if len(shape) == 2:
        targets = targets.clamp_min(1)  # of a sample whose only label is ignored there is no mean
    loss = LOSSES[name]
    wanted = [float(loss(outputs[i : i + 1], targets[i : i + 1])) for i in range(7)]
    found = per_sample(loss, outputs, targets)
    assert found.shape == (7,)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize("loss", [F.mse_loss, lambda o, t: (o - t).square().mean()], ids=["with", "without"])
def test_a_loss_by_sample_of_real_targets(loss: Loss) -> None:
    outputs, targets = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [2.0, 4.0]])
    assert per_sample(loss, outputs, targets).tolist() == [2.5, 10.0]


# --- prediction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pi", [[0.2, 0.5, 0.3], [1.0, 0.0, 0.0], [0.0, 0.4, 0.6]])
def test_a_prediction_is_the_mixture_of_probabilities(pi: list[float]) -> None:
    mixture = Mixture(small_model(), 3, 0).eval()
    mixture.pi.copy_(torch.tensor(pi))
    x = torch.randn(11, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    wanted = sum(p * np.exp(log_softmax(c(x))) for p, c in zip(pi, mixture.components, strict=True))
    found = np.exp(mixture(x).detach().double().numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


def test_probabilities_are_mixed_and_not_logits() -> None:
    """Logits (0, −100) and (0, 2) at equal shares: (1 + σ(−2))/2 for the first class, not σ(49)."""
    mixture = tables([[1.0, np.exp(-100)], [1.0, np.exp(2)]])
    first = mixture(torch.zeros(1, 1)).exp()[0, 0].item()
    assert first == pytest.approx((1 + 1 / (1 + np.exp(2))) / 2)


def test_a_sequence_s_prediction_is_mixed_at_every_place() -> None:
    mixture = Mixture(nn.Conv1d(2, 3, 1), 2, 0).eval()
    mixture.pi.copy_(torch.tensor([0.3, 0.7]))
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    found = mixture(x).exp()
    assert found.shape == (4, 3, 5)
    for place in range(5):
        parts = [np.exp(log_softmax(c(x)[:, :, place])) for c in mixture.components]
        np.testing.assert_allclose(found[:, :, place].detach().numpy(), 0.3 * parts[0] + 0.7 * parts[1], rtol=1e-5)


# --- the start -----------------------------------------------------------------------------------------------------


def weights(mixture: Mixture, number: int) -> list[tuple[Any, ...]]:
    return [bits(p) for p in mixture.components[number].parameters()]


def test_components_start_distinct_and_the_first_as_given() -> None:
    model = small_model()
    before, generator = state_of(model), torch.default_generator.get_state()
    mixture = Mixture(model, 4, 0)
    assert bitwise(references(mixture.components[0]), before)
    for one, two in itertools.combinations(range(4), 2):
        a, b = references(mixture.components[one]), references(mixture.components[two])
        for name in ("0.weight", "0.bias", "4.weight", "4.bias", "7.weight", "7.bias"):
            assert not torch.isclose(a[name], b[name], rtol=1e-3).all(), (one, two, name)
    assert mixture.pi.tolist() == [0.25] * 4
    assert bitwise(references(model), before)
    assert torch.equal(torch.default_generator.get_state(), generator)


def test_what_the_user_has_frozen_is_the_same_in_every_component_and_stays() -> None:
    def network() -> nn.Module:
        body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        references(body)["1.running_mean"].fill_(3.0)
        return nn.Sequential(body, nn.ReLU(), nn.Linear(6, 3))

    model = network()
    body = {name: tensor.clone() for name, tensor in references(model).items() if name.startswith("0.")}
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    federation = fedfac.Federation.from_arrays([(x, torch.arange(12) % 3)] * 2)
    result = fedfac.fit(model, federation, method=methods.fedem(), rounds=2, epochs=1, batch_size=8, device="cpu")
    frozen = {name: tensor for name, tensor in body.items() if "running" not in name and "num" not in name}
    assert len(frozen) == 4
    for number in range(3):
        start = references(Mixture(model, 3, 0).components[number])
        assert bitwise({name: start[name] for name in body}, body)
        trained = references(result.model(0).get_submodule(f"components.{number}"))
        assert bitwise({name: trained[name] for name in frozen}, frozen)
        assert number == 0 or not torch.equal(start["2.weight"], references(model)["2.weight"])


def test_the_start_of_the_components_is_a_function_of_their_seed() -> None:
    one, again, other = (Mixture(small_model(), 3, seed) for seed in (0, 0, 1))
    assert bitwise(references(one), references(again))
    assert weights(one, 0) == weights(other, 0)
    assert weights(one, 1) != weights(other, 1)
    assert bitwise(references(Mixture(small_model(), 2, 0).components[1]), references(one.components[1]))


def test_a_model_whose_components_could_not_start_distinct_is_refused() -> None:
    """They would stay equal for ever, and the mixture would be FedAvg at M times the price."""
    federation = fedfac.Federation.from_arrays([(torch.zeros(6, 1), torch.arange(6) % 2)] * 2)
    with pytest.raises(FedfacError, match="component"):
        fedfac.fit(Table([0.5, 0.5]), federation, method=methods.fedem(), rounds=1, epochs=1)


def test_a_regression_is_refused() -> None:
    """The softmax of one output is 1 whatever the input: such a mixture would predict nothing."""
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    federation = fedfac.Federation.from_arrays([(x, 2 * x[:, :1])] * 2)
    with pytest.raises(FedfacError):
        fedfac.fit(nn.Linear(2, 1), federation, method=methods.fedem(), rounds=1, epochs=1, loss=F.mse_loss)


# --- in a federation -----------------------------------------------------------------------------------------------


def test_shares_are_personal_and_components_are_not() -> None:
    result = fedfac.fit(
        small_model(), small_federation(), method=methods.fedem(), rounds=3, cohort=4, epochs=2, batch_size=8, lr=0.01
    )
    trained = {client for record in result.records for client in record["cohort"]}
    shares = [result.state(client)["pi"] for client in sorted(trained)]
    assert len({tuple(pi.tolist()) for pi in shares}) == len(trained) > 1
    assert all(float(pi.sum()) == pytest.approx(1) and float(pi.min()) >= 0 for pi in shares)
    assert result.server["pi"].tolist() == [1 / 3] * 3
    for client in range(5):
        state = result.state(client)
        assert bitwise(
            {k: v for k, v in state.items() if k != "pi"}, {k: v for k, v in result.server.items() if k != "pi"}
        )


def test_a_client_is_evaluated_with_shares_of_the_components_of_the_moment() -> None:
    """One E step on the aggregated components, from the shares that the client kept; these stay."""
    result = fedfac.fit(
        small_model(), small_federation(), method=methods.fedem(), rounds=2, cohort=5, epochs=2, batch_size=8, lr=0.02
    )
    for client in range(5):
        kept, model = result.state(client), result.model(client)
        assert isinstance(model, Mixture)
        data = small_federation().client(client)
        x, y = data.pool.batch(data.train)
        logs = np.stack([log_softmax(c(x))[np.arange(len(y)), y.numpy()] for c in model.components], axis=1)
        wanted = responsibilities(logs, kept["pi"].numpy()).mean(0)
        np.testing.assert_allclose(model.pi.numpy(), wanted, rtol=1e-4)
        assert bits(kept["pi"]) == bits(result.state(client)["pi"]) != bits(model.pi)
