"""What docs/deviations.md says about the methods, measured; and that no competitor is left out of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.method import Method
from fedfac.state import State, references

PAGE = (Path(__file__).parent.parent / "docs" / "deviations.md").read_text()
OURS = {"random", "random-redrawn", "all-personal", "variance"}  # controls: there is no original


def fit(method: Method, **settings: Any) -> fedfac.Result:
    given: dict[str, Any] = {"rounds": 1, "cohort": 5, "epochs": 3, "batch_size": 8, "seed": 3, "lanes": 1}
    return fedfac.fit(small_model(), small_federation(), method=method, **(given | settings))


def part(state: State, prefix: str) -> Tensor:
    names = {name for name, _ in small_model().named_parameters()}
    return torch.cat([state[f"{prefix}.{name}"].flatten() for name in sorted(names)])


@pytest.mark.parametrize("name", sorted(n for n in methods.METHODS if n not in OURS and not n.startswith("fedfac")))
def test_every_competitor_has_a_row(name: str) -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 for row in rows)
    assert [row for row in rows if name in re.findall(r"`([\w+-]+)`", row[0])]


def distance_of_w(lam: float, **settings: Any) -> float:
    """How far one round takes pFedMe's global model from its start."""
    result = fit(methods.pfedme(lam=lam), **settings)
    start = torch.cat([tensor.detach().flatten() for _, tensor in sorted(small_model().named_parameters())])
    return float((part(result.server, "shared") - start).norm())


def test_under_adam_lambda_does_not_say_how_far_pfedme_s_global_model_goes() -> None:
    """A hundred times the λ: with SGD w goes many times as far, with Adam about as far."""
    ratios = {
        optimizer: distance_of_w(15, optimizer=optimizer) / distance_of_w(0.15, optimizer=optimizer)
        for optimizer in ("adam", "sgd")
    }
    assert 0.3 < ratios["adam"] < 3
    assert ratios["sgd"] > 20


def test_pfedme_s_own_model_goes_on_from_the_client_s_last_round() -> None:
    """The authors' code starts it from the global model in every round."""
    method = methods.pfedme()
    last = fit(method).state(0)
    assert not torch.allclose(part(last, "own"), part(last, "shared"), atol=1e-3)
    twin = method.wrapped(small_model())
    twin.load_state_dict(last)
    twin.begin()  # type: ignore[operator]  # what every round of the client begins with
    assert torch.equal(part(references(twin), "own"), part(last, "own"))


@pytest.mark.parametrize("rate", [1e-3, 1e-2])
def test_apfl_s_alpha_is_learned_on_every_batch_a_rate_at_a_time(rate: float) -> None:
    """Under Adam a step is at most (about) the learning rate; the authors' code steps α once a round."""
    result = fit(methods.apfl(), lr=rate)
    for client in range(5):
        steps = 3 * -(-result.federation.client(client).size // 8)  # type: ignore[union-attr]
        moved = abs(float(result.state(client)["alpha"]) - 0.5)
        assert rate < moved <= 1.3 * rate * steps


def test_the_ensemble_averages_probabilities_of_those_who_have_trained() -> None:
    result = fit(methods.lg_fedavg(), rounds=2, cohort=2)
    trained = sorted({client for record in result.records for client in record["cohort"]})
    assert len(trained) < 5
    x = torch.randn(7, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        members = torch.stack([result.model(client)(x) for client in trained])
        found = result.ensemble()(x).exp()
    torch.testing.assert_close(found, F.softmax(members, -1).mean(0))
    assert not torch.allclose(found, F.softmax(members.mean(0), -1), atol=1e-4)  # the code of its authors
