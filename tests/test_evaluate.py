"""Figures against numbers by hand, and the laws they keep; what is evaluated in a run, and on which samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import r2_score
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.data.federation import Federation
from fedfac.data.pool import ArrayPool
from fedfac.errors import ConfigError, RunError
from fedfac.evaluate import (
    Score,
    headline,
    mae,
    mse,
    named_metrics,
    over_clients,
    r2,
    score,
    summary,
    table,
    worst_decile,
)

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 8, "lanes": 1, "lr": 0.01}
shares = st.lists(st.integers(0, 1000).map(lambda k: k / 1000), min_size=1, max_size=40)


# --- figures over clients ------------------------------------------------------------------------------------------


def test_a_summary_by_hand() -> None:
    scores = [Score(0, 4, 3, 1.0), Score(1, 16, 2, 0.5), Score(2, 0, 0, 0.0)]
    assert summary(scores, "personal") == {
        "model": "personal",
        "clients": 2,
        "samples": 20,
        "loss": 0.6,  # (4·1 + 16·½) / 20
        "accuracy": 0.25,  # 5 / 20, not (¾ + ⅛) / 2
        "mean": 0.4375,
        "std": 0.3125,
        "median": 0.4375,
        "worst_decile": 0.125,
        "jain": pytest.approx(0.875**2 / (2 * (0.75**2 + 0.125**2))),
    }


def test_metrics_are_weighted_by_samples() -> None:
    scores = [Score(0, 1, None, 2.0, {"mse": 2.0, "own": -1.0}), Score(1, 3, None, 4.0, {"mse": 4.0, "own": 1.0})]
    assert summary(scores, "global") == {
        "model": "global",
        "clients": 2,
        "samples": 4,
        "loss": 3.5,
        "mse": 3.5,
        "own": 0.5,
    }


@pytest.mark.parametrize("scores", [[], [Score(0, 0, 0, 0.0), Score(1, 0, None, 0.0)]])
def test_a_summary_of_nobody_has_no_figures(scores: list[Score]) -> None:
    assert summary(scores, "global") == {"model": "global", "clients": 0}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=20))
def test_accuracy_is_all_correct_answers_over_all_answers(counts: list[tuple[int, int]]) -> None:
    scores = [Score(i, n, min(right, n), 0.0) for i, (n, right) in enumerate(counts)]
    found = summary(scores, "global")
    correct, answers = sum(min(right, n) for n, right in counts), sum(n for n, _ in counts)
    assert found["accuracy"] == correct / answers
    each = [Fraction(min(right, n), n) for n, right in counts]
    assert found["mean"] == pytest.approx(float(sum(each) / len(each)))
    assert min(each) - Fraction(1, 10**9) <= found["accuracy"] <= max(each) + Fraction(1, 10**9)


@settings(deadline=None)
@given(shares)
def test_jain_s_index_lies_between_one_client_and_all(values: list[float]) -> None:
    jain = over_clients(values)["jain"]
    if any(values):
        assert 1 / len(values) - 1e-11 <= jain <= 1 + 1e-11
    else:
        assert jain == 0


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.floats(0.01, 1))
def test_jain_s_index_is_the_share_of_clients_when_the_others_have_nothing(some: int, none: int, value: float) -> None:
    assert over_clients([value] * some + [0.0] * none)["jain"] == pytest.approx(some / (some + none), abs=1e-9)
    assert over_clients([value] * some)["jain"] == pytest.approx(1, abs=1e-9)


@settings(deadline=None)
@given(shares, st.floats(0.1, 10))
def test_jain_s_index_has_no_unit(values: list[float], unit: float) -> None:
    assert over_clients([unit * v for v in values])["jain"] == pytest.approx(over_clients(values)["jain"], abs=1e-9)


@settings(deadline=None)
@given(shares, st.randoms())
def test_the_order_of_clients_does_not_matter(values: list[float], random: Any) -> None:
    other = list(values)
    random.shuffle(other)
    for name, value in over_clients(values).items():
        assert over_clients(other)[name] == pytest.approx(value, abs=1e-12), name


@settings(deadline=None)
@given(shares)
def test_spread_keeps_the_laws_of_mean_and_deviation(values: list[float]) -> None:
    found = over_clients(values)
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact)
    assert found["mean"] == pytest.approx(float(mean))
    assert found["std"] == pytest.approx(math.sqrt(variance), abs=1e-12)
    ranked = sorted(values)
    assert found["median"] == pytest.approx((ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2)
    assert min(values) - 1e-12 <= found["worst_decile"] <= found["mean"] + 1e-12


def test_the_worst_decile_by_hand() -> None:
    assert worst_decile([0.4]) == 0.4
    assert worst_decile([0.9, 0.2, 0.5]) == 0.2
    assert worst_decile([k / 10 for k in range(10)]) == 0.0
    assert worst_decile([k / 20 for k in reversed(range(20))]) == pytest.approx(0.025)
    assert worst_decile([1.0] * 27 + [0.3, 0.0, 0.6]) == pytest.approx(0.3)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_the_worst_tenth_of_up_to_ten_is_the_worst_one(values: list[float]) -> None:
    assert worst_decile(values) == min(values)


# --- the headline --------------------------------------------------------------------------------------------------


def every(step: int, values: Sequence[float]) -> list[tuple[int, float]]:
    """The curve of a run that is tested every so many rounds."""
    return [(step * (i + 1), value) for i, value in enumerate(values)]


def test_the_headline_by_hand() -> None:
    """Every round is tested. Ten in a row: the best start is the second value."""
    values = [0.0, *([1.0] * 10), 0.0, 0.0, 0.5]
    last = pytest.approx((7 + 0.5) / 10)
    assert headline(every(1, values)) == {"best": 1.0, "last": last, "evaluations": 10, "window": (5, 14)}
    assert headline([]) == {}
    assert headline([(7, 0.5)]) == {"best": 0.5, "last": 0.5, "evaluations": 1, "window": (7, 7)}


def test_the_last_ten_are_rounds_not_evaluations() -> None:
    """Phones in the docs: forty rounds, every fourth tested. Ten evaluations are the whole run, from round 4 on."""
    curve = every(4, [0.0] * 7 + [0.25, 0.5, 0.75])
    assert headline(curve) == {"best": 0.5, "last": 0.5, "evaluations": 3, "window": (32, 40)}


def test_fewer_than_three_evaluations_in_ten_rounds_are_filled_up_from_before() -> None:
    curve = every(5, [0.0, 0.25, 0.5, 0.75])
    assert headline(curve) == {"best": 0.5, "last": 0.5, "evaluations": 3, "window": (10, 20)}
    assert headline(curve[:2]) == {"best": 0.125, "last": 0.125, "evaluations": 2, "window": (5, 10)}


def test_the_best_ten_are_rounds_not_evaluations() -> None:
    """Every third round: four evaluations lie in ten rounds; a window that is not whole does not count."""
    curve = every(3, [1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0])
    found = headline(curve)
    assert found["best"] == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert found["last"] == pytest.approx((1 + 1 + 0 + 0) / 4)


def test_a_run_that_has_gone_on_untested_since_keeps_to_its_last_ten_rounds() -> None:
    curve = every(2, [0.0] * 5 + [1.0] * 5)
    assert headline(curve, 20)["window"] == (12, 20)
    assert headline(curve, 23)["window"] == (14, 20)
    assert headline(curve, 60) == {"best": 1.0, "last": 1.0, "evaluations": 3, "window": (16, 20)}


@settings(deadline=None)
@given(shares, st.integers(1, 12))
def test_the_best_is_not_below_the_last_and_both_are_means(values: list[float], step: int) -> None:
    found = headline(every(step, values))
    numbers = np.arange(1, len(values) + 1) * step
    inside = max(int(np.sum(numbers > numbers[-1] - 10)), min(3, len(values)))
    assert found["best"] >= found["last"]
    assert found["evaluations"] == inside
    assert found["window"] == (numbers[-inside], numbers[-1])
    assert found["last"] == pytest.approx(float(np.mean(values[-inside:])))
    if step == 1:
        w = min(10, len(values))
        assert found["best"] == pytest.approx(float(np.convolve(values, np.ones(w) / w, mode="valid").max()))


def test_a_result_s_headline_is_that_of_its_accuracies() -> None:
    result = fedfac.fit(
        small_model(), small_federation(), method=methods.fedavg(), **(SMALL | {"rounds": 12, "lr": 0.05})
    )
    accuracies = [record["test"]["accuracy"] for record in result.records]
    assert len(set(accuracies)) > 2
    assert result.accuracy == accuracies[-1]
    assert result.headline["last"] == pytest.approx(sum(accuracies[2:]) / 10)
    assert result.headline["best"] == pytest.approx(max(sum(accuracies[i : i + 10]) / 10 for i in range(3)))
    assert (result.headline["evaluations"], result.headline["window"]) == (10, (3, 12))


def test_by_default_three_of_the_last_ten_rounds_are_tested_however_dear_tests_are() -> None:
    """Six clients of 10 training and 1,000 test samples: every tenth round by the cost."""
    draws = np.random.default_rng(0)
    clients = [
        (draws.normal(size=(10, 3)), np.arange(10) % 2, draws.normal(size=(1000, 3)), np.arange(1000) % 2)
        for _ in range(6)
    ]
    how: dict[str, Any] = {"rounds": 21, "cohort": 1, "epochs": 1, "seed": 0}
    federation = Federation.from_arrays(clients)
    model = nn.Linear(3, 2)
    result = fedfac.fit(model, federation, method=methods.fedavg(), **how)
    assert [r["round"] for r in result.records if "test" in r] == [10, 13, 17, 20, 21]
    assert result.headline["window"] == (13, 21)
    once = fedfac.fit(model, federation, method=methods.fedavg(), **how, evaluate_every=10)
    assert [r["round"] for r in once.records if "test" in r] == [10, 20, 21]
    assert once.state(0)["weight"].equal(result.state(0)["weight"])


# --- score ---------------------------------------------------------------------------------------------------------


def pool_of(logits: Sequence[Sequence[float]], labels: Sequence[int]) -> ArrayPool:
    return ArrayPool(torch.tensor(logits), torch.tensor(labels))


def test_the_score_of_a_known_model() -> None:
    """Inputs are the model's outputs: right, wrong, right, and one sample that is not asked for."""
    pool = pool_of([[2.0, 0.0], [0.0, 1.0], [-1.0, 3.0], [9.0, 0.0]], [0, 0, 1, 1])
    found = score(nn.Identity(), 7, pool, torch.tensor([0, 1, 2]), F.cross_entropy, 2)
    loss = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1)) + math.log(1 + math.exp(-4))) / 3
    assert (found.client, found.samples, found.correct) == (7, 3, 2)
    assert found.loss == pytest.approx(loss)
    assert found.accuracy == 2 / 3
    assert found.metrics == {}


@pytest.mark.parametrize("n", [1, 511, 512, 513, 1300])
def test_a_score_does_not_depend_on_how_samples_are_batched(n: int) -> None:
    draws = torch.Generator().manual_seed(n)
    pool = ArrayPool(torch.randn(n, 4, generator=draws), torch.randint(4, (n,), generator=draws))
    found = score(nn.Identity(), 0, pool, torch.arange(n), F.cross_entropy, 4, {"own": mean_of_all})
    x, y = pool.inputs.double().numpy(), pool.targets.numpy()
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    assert found.loss == pytest.approx(-logs[np.arange(n), y].mean(), rel=1e-5)
    assert found.correct == int((x.argmax(1) == y).sum())
    assert found.metrics == {"own": pytest.approx(x.mean(), abs=1e-6)}


def mean_of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    assert len(outputs) == len(targets)
    return outputs.mean()


def test_every_place_of_a_sequence_is_an_answer() -> None:
    outputs = torch.tensor([[[5.0, 0.0, 5.0], [0.0, 5.0, 0.0]], [[5.0, 5.0, 0.0], [0.0, 0.0, 5.0]]])
    pool = ArrayPool(outputs, torch.tensor([[0, 1, 1], [0, 0, 1]]))
    found = score(nn.Identity(), 0, pool, torch.arange(2), F.cross_entropy, 2)
    assert (found.samples, found.correct) == (6, 5)
    assert found.loss == pytest.approx((5 * math.log(1 + math.exp(-5)) + math.log(1 + math.exp(5))) / 6)


def test_a_score_is_taken_in_eval_mode_without_gradients() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9)).train()
    seen: list[bool] = []

    def watch(outputs: Tensor, targets: Tensor) -> float:
        seen.append(outputs.requires_grad)
        return 0.0

    before = {name: t.clone() for name, t in model.state_dict().items()}
    pool = pool_of([[2.0, 0.0], [0.0, 1.0]], [0, 1])
    found = score(model, 0, pool, torch.arange(2), F.cross_entropy, 2, {"watch": watch})
    assert seen == [False]
    assert found.correct == 2
    assert bitwise(before, model.state_dict())


def test_real_targets_have_no_accuracy() -> None:
    pool = ArrayPool(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [3.0], [1.0]]))
    found = score(nn.Identity(), 0, pool, torch.arange(3), F.mse_loss, None, named_metrics(["mse", "mae", "r2"], None))
    assert (found.samples, found.correct, found.accuracy) == (3, None, None)
    assert found.loss == pytest.approx(10 / 3)
    assert found.metrics == {"mse": pytest.approx(10 / 3), "mae": pytest.approx(4 / 3), "r2": pytest.approx(-2.75)}


def test_no_samples_give_a_score_of_nothing() -> None:
    """Also for a model that cannot be run on an empty batch."""

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.size(0), -1)

    pool = pool_of([[2.0, 0.0]], [0])
    for metrics in (None, {"own": mean_of_all}):
        found = score(Flat(), 3, pool, torch.empty(0, dtype=torch.int64), F.cross_entropy, 2, metrics)
        assert (found.client, found.samples, found.correct, found.loss, found.accuracy) == (3, 0, 0, 0.0, None)
        assert found.metrics == {}


def test_a_table_has_a_row_for_every_client() -> None:
    rows = table([Score(1, 4, 3, 0.5), Score(0, 2, None, 1.5, {"mse": 2.0})], ["ann", "bob"])
    assert rows == [
        {"client": "bob", "samples": 4, "loss": 0.5, "accuracy": 0.75},
        {"client": "ann", "samples": 2, "loss": 1.5, "accuracy": None, "mse": 2.0},
    ]


# --- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 3)])
def test_errors_of_real_predictions(shape: tuple[int, ...]) -> None:
    draws = np.random.default_rng(0)
    y = draws.normal(2, 3, shape)
    o = y + draws.normal(0.5, 1, shape)
    outputs, targets = torch.tensor(o), torch.tensor(y)
    assert float(mse(outputs, targets)) == pytest.approx(((o - y) ** 2).mean())
    assert float(mae(outputs, targets)) == pytest.approx(np.abs(o - y).mean())
    assert float(r2(outputs, targets)) == pytest.approx(r2_score(y.ravel(), o.ravel()))


def test_a_column_of_outputs_is_compared_with_a_row_of_targets() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])
    assert (float(mse(outputs, targets)), float(mae(outputs, targets))) == (2.0, 1.0)


def test_the_mean_explains_nothing_and_the_truth_everything() -> None:
    targets = torch.tensor([1.0, 2.0, 6.0])
    assert float(r2(torch.full((3,), 3.0), targets)) == pytest.approx(0, abs=1e-6)
    assert float(r2(targets.clone(), targets)) == 1


@pytest.mark.parametrize("targets", [[2.0], [2.0, 2.0, 2.0]])
def test_a_client_whose_targets_do_not_vary_does_not_drown_the_others(targets: list[float]) -> None:
    """There is nothing to explain: 1 for the truth and 0 for anything else, as in scikit-learn."""
    y = torch.tensor(targets)
    assert float(r2(y.clone(), y)) == 1
    assert float(r2(y + 3, y)) == 0


def test_metrics_come_by_name_or_as_functions() -> None:
    assert named_metrics(["r2", "mae"], 3) == {"r2": r2, "mae": mae}
    assert named_metrics({"own": mean_of_all}, None) == {"own": mean_of_all}
    assert named_metrics(None, 3) == {}
    assert named_metrics(None, None) == {"mse": mse, "r2": r2}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["mse", "msse"], "there is no metric 'msse'. Did you mean 'mse'?"),
        (["auc"], "there is no metric 'auc'. Known: mse, mae, r2."),
    ],
)
def test_an_unknown_metric_is_answered_with_the_nearest_before_training(names: list[str], text: str) -> None:
    records: list[object] = []
    assert text == message(
        ConfigError,
        lambda: fedfac.fit(small_model(), small_federation(), metrics=names, on_round=records.append, **SMALL),
    )
    assert not records


# --- in a run ------------------------------------------------------------------------------------------------------


def regression(clients: int = 3, *, noise: float = 0.1) -> Federation:
    """y = 2x₁ − x₂ + c on client c, of different sizes."""
    draws = torch.Generator().manual_seed(0)
    arrays = []
    for client in range(clients):
        x = torch.randn(20 + 10 * client, 2, generator=draws)
        y = 2 * x[:, :1] - x[:, 1:] + client + noise * torch.randn(len(x), 1, generator=draws)
        arrays.append((x, y))
    return Federation.from_arrays(arrays)


def test_regression_from_end_to_end() -> None:
    federation = regression()
    torch.manual_seed(0)
    result = fedfac.fit(
        nn.Linear(2, 1), federation, method=methods.fedper(), **(SMALL | {"rounds": 30, "lr": 0.05}), loss=F.mse_loss
    )
    found = result.records[-1]["test"]
    assert "accuracy" not in found
    assert "jain" not in found
    errors, explained, sizes = [], [], []
    for client in range(3):
        data = federation.client(client)
        x, y = data.pool.batch(data.test)
        output = result.model(client)(x).detach()
        errors += (output - y).square().flatten().tolist()
        explained.append(r2_score(y.numpy(), output.numpy()))
        sizes.append(len(y))
        row = result.clients[client]
        assert row["accuracy"] is None
        assert row["mse"] == pytest.approx(float((output - y).square().mean()), rel=1e-5)
    assert found["samples"] == len(errors) == 4 + 6 + 8
    assert found["mse"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert found["r2"] == pytest.approx(np.average(explained, weights=sizes), rel=1e-5)
    assert found["r2"] > 0.9
    assert "no round of this run has been evaluated for accuracy" in message(RunError, lambda: result.accuracy)
    assert result.headline == {}


def test_a_client_with_one_test_sample_leaves_the_record_readable(tmp_path: Path) -> None:
    x, y = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)), torch.arange(12.0)[:, None]
    federation = Federation.from_arrays([(x, y, x[:1], y[:1] + 5), (x, y, x, y)])
    result = fedfac.fit(
        nn.Linear(2, 1), federation, method=methods.fedavg(), loss=F.mse_loss, out=tmp_path / "r", **SMALL
    )
    assert -1e6 < result.records[-1]["test"]["r2"] <= 1
    for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_metrics_asked_for_are_in_the_record_and_in_the_table() -> None:
    def confidence(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.softmax(1).max(1).values.mean()

    federation = small_federation()
    result = fedfac.fit(small_model(), federation, method=methods.fedper(), metrics={"confidence": confidence}, **SMALL)
    total = 0.0
    for client in range(5):
        data = federation.client(client)
        x, _ = data.pool.batch(data.test)
        own = float(result.model(client)(x).detach().softmax(1).max(1).values.mean())
        assert result.clients[client]["confidence"] == pytest.approx(own, rel=1e-5)
        total += own * len(x)
    found = result.records[-1]["test"]
    assert found["confidence"] == pytest.approx(total / found["samples"], rel=1e-5)
    assert found["accuracy"] == result.accuracy


def arrays_of(clients: int, *, flipped: bool = False, test: bool = True) -> list[Any]:
    draws = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for _ in range(clients):
        x, y = torch.randn(40, 2, 6, 6, generator=draws), torch.randint(3, (40,), generator=draws)
        held, labels = torch.randn(15, 2, 6, 6, generator=draws), torch.randint(3, (15,), generator=draws)
        made.append((x, y, 9 * held, (labels + 1) % 3) if flipped else (x, y, held, labels))
    return made


def test_validation_is_a_part_of_training_data_and_never_touches_the_test() -> None:
    runs = []
    for flipped in (False, True):
        federation = Federation.from_arrays(arrays_of(3, flipped=flipped), validation_share=0.25, classes=3)
        settings = SMALL | {"lr": 0.05, "evaluate_every": 1}
        runs.append(fedfac.fit(small_model(), federation, method=methods.fedper(), **settings))
        for client in range(3):
            data = federation.client(client)
            assert [len(data.train), len(data.validation), len(data.test)] == [30, 10, 15]
            assert len({*data.train.tolist(), *data.validation.tolist(), *data.test.tolist()}) == 55
    one, two = runs
    assert [r["validation"] for r in one.records] == [r["validation"] for r in two.records]
    assert bitwise(one.server, two.server)
    assert one.records[-1]["test"] != two.records[-1]["test"]
    federation = Federation.from_arrays(arrays_of(3), validation_share=0.25, classes=3)
    right = 0
    for client in range(3):
        data = federation.client(client)
        x, y = data.pool.batch(data.validation)
        right += int((one.model(client)(x).argmax(1) == y).sum())
    found = one.records[-1]["validation"]
    assert (found["accuracy"], found["samples"], found["clients"]) == (right / 30, 30, 3)
    assert found["model"] == "personal"


def test_validation_samples_are_not_trained_on() -> None:
    """Other labels of the validation samples change the validation figures and nothing else."""
    federation = Federation.from_arrays(arrays_of(2), validation_share=0.25, classes=3)
    data = [federation.client(c) for c in range(2)]
    other = []
    for (x, y, held, labels), own in zip(arrays_of(2), data, strict=True):
        changed = y.clone()
        where = own.validation - (0 if own is data[0] else 55)
        changed[where] = (changed[where] + 1) % 3
        other.append((x, changed, held, labels))
    spoilt = Federation.from_arrays(other, validation_share=0.25, classes=3)
    runs = [
        fedfac.fit(small_model(), f, method=methods.fedavg(), **(SMALL | {"lr": 0.05})) for f in (federation, spoilt)
    ]
    assert bitwise(runs[0].server, runs[1].server)
    assert runs[0].records[-1]["test"] == runs[1].records[-1]["test"]
    assert runs[0].records[-1]["validation"] != runs[1].records[-1]["validation"]


def test_without_a_validation_share_there_is_no_validation() -> None:
    result = fedfac.fit(small_model(), small_federation(), method=methods.fedavg(), **SMALL)
    assert all("validation" not in record for record in result.records)


class Viewed(nn.Module):
    """A model that flattens as most do, which fails on an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(x.view(x.size(0), -1))
        return made


@pytest.mark.parametrize("make", [small_model, Viewed])
def test_clients_without_test_samples_are_left_out(make: Any) -> None:
    arrays = arrays_of(4)
    x, y, held, labels = arrays[1]
    arrays[1] = (x, y, held[:0], labels[:0])
    torch.manual_seed(0)
    model = make()
    federation = Federation.from_arrays(arrays, classes=3)
    result = fedfac.fit(model, federation, method=methods.fedper(), **SMALL)
    found = result.records[-1]["test"]
    assert (found["clients"], found["samples"]) == (3, 45)
    right = {c: int((result.model(c)(arrays[c][2]).argmax(1) == arrays[c][3]).sum()) for c in (0, 2, 3)}
    assert found["accuracy"] == sum(right.values()) / 45
    assert found["mean"] == pytest.approx(sum(right.values()) / 45)
    assert found["worst_decile"] == min(right.values()) / 15


def test_a_federation_without_test_samples_trains_all_the_same() -> None:
    federation = Federation.from_arrays([(a[0], a[1]) for a in arrays_of(2)], test_share=0.0, classes=3)
    result = fedfac.fit(small_model(), federation, method=methods.fedavg(), **SMALL)
    assert result.records[-1]["test"] == {"model": "global", "clients": 0}
    assert "no round of this run has been evaluated" in message(RunError, lambda: result.accuracy)


def test_some_clients_can_be_evaluated_for_all() -> None:
    """The same ones every time, a function of the seed."""

    def tested(seed: int) -> list[str]:
        result = fedfac.fit(
            small_model(),
            small_federation(clients=8),
            method=methods.fedavg(),
            evaluate_clients=3,
            seed=seed,
            **SMALL,
        )
        assert [record["test"]["clients"] for record in result.records] == [3, 3]
        return [row["client"] for row in result.clients]

    assert tested(0) == tested(0)
    assert len({tuple(tested(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(("every", "wanted"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_every_so_many_rounds_are_evaluated_and_the_last_one(every: int, wanted: list[int]) -> None:
    result = fedfac.fit(
        small_model(), small_federation(), method=methods.fedavg(), evaluate_every=every, **(SMALL | {"rounds": 5})
    )
    assert [record["round"] for record in result.records if "test" in record] == wanted
    assert result.metrics.column("round").to_pylist() == wanted


@pytest.mark.parametrize(("start", "tested"), [(1, [2, 4, 5]), (3, [4, 5]), (9, [5])])
def test_the_first_round_that_is_tested(start: int, tested: list[int]) -> None:
    settings = SMALL | {"rounds": 5, "evaluate_every": 2, "evaluate_from": start}
    result = fedfac.fit(small_model(), small_federation(), method=methods.fedavg(), **settings)
    assert [r["round"] for r in result.records if "test" in r] == tested


def test_a_copy_that_does_not_stay_finite_while_it_is_tuned_is_not_evaluated() -> None:
    """The learning rate of the fine-tuning explodes on one client; it predicts with the global model then."""
    draws = torch.Generator()
    clients = [(torch.randn(12, 3, generator=draws), torch.arange(12) % 2) for _ in range(3)]
    clients[1] = (clients[1][0] * 1e38, clients[1][1])
    federation = fedfac.Federation.from_arrays(clients)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    how: dict[str, Any] = {"rounds": 1, "epochs": 3, "optimizer": "sgd", "lr": 0.1, "batch_size": 4}
    tuned = fedfac.fit(model, federation, method=methods.fedavg_plus(), **how)
    plain = fedfac.fit(model, federation, method=methods.fedavg(), **how)
    assert tuned.records[0]["left_out"].keys() == {"1"}
    rows = [{row["client"]: row for row in result.clients} for result in (tuned, plain)]
    assert rows[0]["1"]["accuracy"] == rows[1]["1"]["accuracy"]
    assert rows[0]["0"]["loss"] != rows[1]["0"]["loss"]


def test_one_metric_may_be_named_without_a_list() -> None:
    assert list(named_metrics("mae", None)) == ["mae"]
