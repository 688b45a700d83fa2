"""Batches that are filled up with samples of weight 0: when they may be, and that those samples do not count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfac.data.pool import ArrayPool, ClientData
from fedfac.engine.graphs import fillable
from fedfac.method import Loss, Phase
from fedfac.noise import Routed, Seeded, silent
from fedfac.numerics import Numerics
from fedfac.seeds import generator, global_stream
from fedfac.state import references
from fedfac.training import Local, Work

SIZE = 8


def client(*, same: bool = False) -> ClientData:
    draws = generator(0, "filled")
    inputs = torch.randn(20, 3, 5, 5, generator=draws)
    if same:
        inputs = inputs[:1].repeat(20, 1, 1, 1)
    none = torch.arange(0)
    return ClientData(ArrayPool(inputs, torch.randint(4, (20,), generator=draws)), torch.arange(20), none, none)


def model(*extra: nn.Module) -> nn.Module:
    with global_stream(0, "model"):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), *extra, nn.Flatten(), nn.Linear(36, 4))


class Centred(nn.Module):
    """Looks at the whole batch without being a normalisation layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) ** 2


@pytest.mark.parametrize(
    ("extra", "seeded", "answer"),
    [
        ([], silent, True),
        ([nn.Dropout(0.5)], Routed, True),
        ([nn.GroupNorm(2, 4)], silent, True),
        ([nn.BatchNorm2d(4)], silent, False),
        ([Centred()], silent, False),
    ],
)
def test_a_batch_may_be_filled_if_no_sample_sees_another(extra: list[nn.Module], seeded: Seeded, answer: bool) -> None:
    tried = model(*extra)
    before = {name: tensor.clone() for name, tensor in references(tried).items()}
    assert fillable(tried, client(), Local(batch_size=SIZE), seeded, Numerics()) is answer
    assert all(torch.equal(before[name], tensor) for name, tensor in references(tried).items())


def test_what_cannot_be_told_is_not_filled() -> None:
    assert not fillable(model(), client(same=True), Local(batch_size=SIZE), silent, Numerics())
    assert not fillable(model(), client(), Local(batch_size=SIZE, loss=own_loss), silent, Numerics())


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_samples_of_weight_0_do_not_count(loss: Loss) -> None:
    """A step on 5 samples is the step on 9, the last 4 of which have no weight."""
    plain, data, local = model(), client(), Local(batch_size=SIZE, loss=loss)
    if loss is F.mse_loss:
        data = ClientData(
            ArrayPool(data.pool.batch(data.train)[0], torch.randn(20, 4)), data.train, data.test, data.validation
        )
    found = []
    for width, count in ((5, None), (9, torch.tensor(5))):
        trained = copy.deepcopy(plain)
        total = torch.zeros((), dtype=torch.float64)
        rest: dict[str, Any] = {"received": {}, "context": None, "held": [], "trains": None}
        work = Work(
            model=trained, data=data, phase=Phase(), local=local, trained=list(trained.parameters()),
            draws=torch.Generator(), seeded=silent, numerics=Numerics(), total=total, **rest,
        )  # fmt: skip
        work.step(torch.optim.SGD(trained.parameters(), lr=0.1), torch.arange(width), count)
        found.append((references(trained), float(total)))
    (exact, loss_of_5), (filled, loss_of_filled) = found
    assert loss_of_filled == pytest.approx(loss_of_5, rel=1e-6)
    for name, tensor in exact.items():
        torch.testing.assert_close(filled[name], tensor)
        assert not torch.equal(tensor, references(plain)[name])
