"""Every bad input fails before any training, says what came and what to do, and leaves no half-written run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError, DataError, LayerError, ModelError, TrainingError
from fedfac.method import Method
from fedfac.methods import fedfac as make_fedfac
from fedfac.switches import Refresh


def fit(tmp_path: Path, *, model: nn.Module | None = None, federation: Any = None, **settings: Any) -> fedfac.Result:
    arguments: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 8, "out": tmp_path / "run"} | settings
    return fedfac.fit(model or small_model(), federation or small_federation(), **arguments)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: make_fedfac(layers=[9]), LayerError, "no layer 9: its layers are 1 0, 2 4, 3 7"),
        (lambda: make_fedfac(layers=["5"]), LayerError, "'5' is a ReLU and has no hidden elements"),
        (lambda: make_fedfac(layers=["conv"]), LayerError, "no layer 'conv'. Known: 0, 4, 7."),
        (lambda: methods.build("fedfac", {"layers": 2}), ConfigError, "layers is 2; give a list"),
        (lambda: make_fedfac(tau="150%"), ConfigError, "tau is '150%'; allowed: a quantile from '0%' to '100%'"),
        (lambda: make_fedfac(tau=-1), ConfigError, "tau is -1"),
        (lambda: make_fedfac(tau="half"), ConfigError, "tau is 'half'"),
        (lambda: make_fedfac(kappa=0), ConfigError, "kappa is 0; it is a share of variance"),
        (lambda: make_fedfac(kappa=1.5), ConfigError, "kappa is 1.5"),
        (lambda: make_fedfac(tau={1: "50%"}, layers=[1, 2]), ConfigError, "tau is given for the layers ['0']"),
        (lambda: make_fedfac(schedule="dinamic"), ConfigError, "Did you mean 'dynamic'?"),
        (lambda: make_fedfac(estimator="principal"), ConfigError, "estimator is 'principal'. Did you mean"),
        (lambda: make_fedfac(on="gradients"), ConfigError, "on is 'gradients'; factor analysis is on weights"),
        (lambda: make_fedfac(norm="own"), ConfigError, "norm is 'own'"),
        (lambda: methods.build("fedfac", {"server_rate": 0}), ConfigError, "server_rate is 0"),
        (lambda: methods.build("fedfak"), ConfigError, "no method 'fedfak'. Did you mean 'fedfac'"),
        (lambda: methods.build("fedavg", {"tau": 1}), ConfigError, "method 'fedavg' has no option 'tau'"),
    ],
)
def test_methods(tmp_path: Path, make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        fit(tmp_path, method=make())
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 0}, "rounds is 0; it is a whole number from 1 up"),
        ({"rounds": 1.5}, "rounds is 1.5"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"rate": 0.0}, "rate is 0.0; it is the share of clients in a round"),
        ({"rate": 1.1}, "rate is 1.1"),
        ({"cohort": 6}, "a cohort of 6 clients was asked for; the federation has 5"),
        ({"cohort": 2, "rate": 0.5}, "both rate=0.5 and cohort=2"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"optimizer": "adamw"}, "optimizer is 'adamw'. Did you mean 'adam'?"),
        ({"momentum": 0.9}, "momentum goes with optimizer 'sgd'"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"lanes": 0}, "lanes is 0"),
        ({"device": "gpu"}, "device is 'gpu'"),
    ],
)
def test_settings(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, **settings)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(72, 2)), "gave (2, 2), but 3 classes need (2, 3) or more columns"),
        (nn.Sequential(nn.Flatten(), nn.Linear(10, 3)), "inputs of shape (2, 2, 6, 6)"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(144, 3)), "does not fit the classes"),
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.Sequential(nn.Flatten(), nn.LSTM(72, 3)), "the model's output is a tuple; with classes it is one tensor"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "lazy modules"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models(tmp_path: Path, model: nn.Module, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        fit(tmp_path, model=model, method=methods.fedavg())
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


class Spare(nn.Module):
    """Its last layer is not used: to a method that keeps the head personal, that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(72, 3), nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(inputs.flatten(1))
        return found


@pytest.mark.parametrize("method", [methods.fedrep(), methods.fedper() | Refresh(1)])
def test_training_what_the_output_does_not_depend_on(tmp_path: Path, method: Method) -> None:
    with pytest.raises(ModelError, match=r"does not depend on what is to be trained now \(spare.bias, spare.weight\)"):
        fit(tmp_path, model=Spare(), method=method)


@pytest.mark.parametrize(
    ("sizes", "batch_size", "words"),
    [
        ((9, 1), 8, "these clients have one training sample each: 1; the"),
        ((9, 9), 1, "batch_size is 1; the model's normalis"),
    ],
)
def test_batches_of_one_sample_that_a_normalisation_cannot_train_on(
    tmp_path: Path, sizes: tuple[int, int], batch_size: int, words: str
) -> None:
    drawn = [(torch.randn(n, 4), torch.arange(n) % 2) for n in sizes]
    clients = [(x, y, x, y) for x, y in drawn]
    federation = fedfac.Federation.from_arrays(clients, classes=2)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    how: dict[str, Any] = {"federation": federation, "method": methods.fedavg(), "batch_size": batch_size}
    with pytest.raises(ModelError) as caught:
        fit(tmp_path, model=model, **how)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()
    fine = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    assert fit(tmp_path, model=fine, **how).finished


def test_a_client_without_samples() -> None:
    empty = (torch.empty(0, 4), torch.empty(0, dtype=torch.long))
    with pytest.raises(DataError, match="client '1' has no training samples: leave it out"):
        fedfac.Federation.from_arrays([(torch.randn(9, 4), torch.arange(9) % 2), empty])


def test_labels_out_of_range() -> None:
    with pytest.raises(DataError, match=r"labels from 0 to 5; allowed: 0\.\.2"):
        fedfac.Federation.from_arrays([(torch.randn(6, 4), torch.arange(6))], classes=3)
    with pytest.raises(DataError, match="labels from -1 to 4"):
        fedfac.Federation.from_arrays([(torch.randn(6, 4), torch.arange(6) - 1)])


def test_a_batch_larger_than_the_data_is_one_smaller_batch(tmp_path: Path) -> None:
    big = fit(tmp_path, batch_size=10_000, rounds=1)
    assert big.records[-1]["train_loss"] > 0


def with_a_poisoned_client(*poisoned: int) -> fedfac.Federation:
    """Clients whose inputs are finite but so large that the first step overflows."""
    draws = torch.Generator()
    clients = []
    for client in range(4):
        x = torch.randn(12, 3, generator=draws) * (1e38 if client in poisoned else 1.0)
        clients.append((x, torch.arange(12) % 2))
    return fedfac.Federation.from_arrays(clients)


def test_a_client_that_does_not_stay_finite_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    how: dict[str, Any] = {"method": methods.fedavg(), "cohort": 4, "optimizer": "sgd", "lr": 0.1}
    poisoned = fit(tmp_path, model=model, federation=with_a_poisoned_client(2), **how)
    for record in poisoned.records:
        assert record["left_out"].keys() == {"2"}
        assert "loss is" in record["left_out"]["2"] or "not finite" in record["left_out"]["2"]
    assert all(bool(torch.isfinite(t).all()) for t in poisoned.server.values())
    healthy = with_a_poisoned_client()
    three = fedfac.Federation.lazy(4, lambda i: _arrays(healthy, i), classes=2)
    assert len(three) == 4  # the same clients, none poisoned: the average differs
    other = fedfac.fit(model, three, rounds=2, epochs=1, batch_size=8, **how)
    assert not torch.equal(other.server["0.weight"], poisoned.server["0.weight"])


def _arrays(federation: fedfac.Federation, client: int) -> Any:
    data = federation.client(client)
    return *data.pool.batch(data.train), *data.pool.batch(data.test)


def test_when_no_client_stays_finite_the_last_good_round_is_saved(tmp_path: Path) -> None:
    """A learning rate that explodes later than round one: the run stops, and what was whole can be loaded."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    rounds: list[int] = []

    def poison(record: dict[str, Any]) -> None:
        rounds.append(record["round"])
        if record["round"] == 2:
            with torch.no_grad():
                broken.fill_(float("inf"))

    broken = torch.ones(1)
    clients = [(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(4)]
    federation = fedfac.Federation.from_arrays(clients, prepare=lambda x: x * broken)
    with pytest.raises(TrainingError, match="round 3: no client of the cohort trained to finite numbers"):
        fit(tmp_path, model=model, federation=federation, method=methods.fedavg(), rounds=5, on_round=poison)
    assert rounds == [1, 2]
    saved = fedfac.load(tmp_path / "run", model)
    assert [r["round"] for r in saved.records] == [1, 2]
    assert all(bool(torch.isfinite(t).all()) for t in saved.server.values())
    broken.fill_(1.0)
    resumed = fit(tmp_path, model=model, federation=federation, method=methods.fedavg(), rounds=5, resume=True)
    assert [r["round"] for r in resumed.records] == [1, 2, 3, 4, 5]
