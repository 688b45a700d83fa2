"""The local loop against a loop written by hand; what is frozen does not move by a single bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import bits, bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfac.anatomy import Anatomy
from fedfac.data.pool import ArrayPool, ClientData
from fedfac.errors import ConfigError
from fedfac.method import PERSONAL, Begin, Phase, Step
from fedfac.noise import Routed, Seeded, silent, taking_turns
from fedfac.seeds import generator, stream
from fedfac.split import Split
from fedfac.state import State, references, state_of
from fedfac.training import Local, Outcome, batches, noise_of, train_client

CPU = torch.device("cpu")


def made_model(seed: int = 0) -> nn.Sequential:
    """Convolution, normalisation, dropout and two fully connected layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )


def made_data(n: int = 13, seed: int = 0) -> ClientData:
    """n training samples, kept in another order than that of the pool, among samples of others."""
    draws = torch.Generator().manual_seed(seed)
    pool = ArrayPool(torch.randn(n + 9, 2, 4, 4, generator=draws), torch.randint(3, (n + 9,), generator=draws))
    nothing = torch.empty(0, dtype=torch.int64)
    return ClientData(pool, torch.randperm(n + 9, generator=draws)[:n], nothing, nothing)


def train(
    model: nn.Module,
    data: ClientData,
    local: Local,
    phases: Sequence[Phase] = (Phase(),),
    *,
    seeded: Seeded = silent,
    received: State | None = None,
    split: Split | None = None,
    round: int = 2,
    client: int = 3,
    purpose: str = "train",
) -> Outcome:
    state = references(model)
    return train_client(
        model,
        state,
        data,
        phases,
        local,
        received=state_of(model) if received is None else received,
        split=split or Split.of(Anatomy.of(model)),
        seeded=seeded,
        seed=1,
        round=round,
        client=client,
        purpose=purpose,
    )


# --- batches -------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 99))
def test_batches_are_the_order_cut_into_pieces(n: int, size: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(n)
    made = list(batches(order, size))
    lengths = [len(b) for b in made]
    assert torch.cat(made).tolist() == order.tolist()
    assert max(lengths) <= size + 1
    assert all(length == size for length in lengths[:-1])
    assert len(made) == max(1, (n - 1) // size if size > 1 and n % size == 1 else math.ceil(n / size))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(2, 20))
def test_no_batch_has_one_sample_unless_the_client_has(n: int, size: int) -> None:
    lengths = [len(b) for b in batches(np.arange(n), size)]
    assert (min(lengths) == 1) == (n == 1)


def test_batches_of_one_sample_are_possible_when_asked_for() -> None:
    assert [len(b) for b in batches(np.arange(4), 1)] == [1, 1, 1, 1]


# --- one loop ------------------------------------------------------------------------------------------------------


def by_hand(
    model: nn.Module, data: ClientData, optimizer: torch.optim.Optimizer, *, size: int, phase: int, epochs: int
) -> list[float]:
    """The plain loop: every epoch in the order of its own stream."""
    losses = []
    for epoch in range(epochs):
        order = stream(1, "batches", "train", 2, 3, phase, epoch).permutation(len(data.train)).tolist()
        while order:
            take = size + 1 if len(order) == size + 1 else size
            chosen, order = data.train[order[:take]], order[take:]
            assert isinstance(data.pool, ArrayPool)
            loss = F.cross_entropy(model(data.pool.inputs[chosen]), data.pool.targets[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses += [loss.item()] * len(chosen)
    return losses


def test_one_epoch_of_sgd_is_the_plain_loop_bit_by_bit() -> None:
    data, model = made_data(), made_model()
    twin = copy.deepcopy(model)
    losses: list[float] = []
    order = stream(1, "batches", "train", 2, 3, 0, 0).permutation(13)
    for chosen in (order[:4], order[4:8], order[8:]):  # 13 = 4 + 4 + 5: no batch of one
        index = data.train[torch.from_numpy(chosen)]
        assert isinstance(data.pool, ArrayPool)
        loss = F.cross_entropy(twin(data.pool.inputs[index]), data.pool.targets[index])
        twin.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in twin.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad * 0.125)  # a power of two: the product is exact, fused or not
        losses += [loss.item()] * len(chosen)
    outcome = train(model, data, Local(epochs=1, batch_size=4, lr=0.125, optimizer="sgd"))
    assert bitwise(references(model), references(twin))
    assert outcome.samples == 13
    assert outcome.loss == pytest.approx(np.mean(losses), abs=1e-6)
    assert outcome.problem is None


@pytest.mark.parametrize(
    ("local", "make"),
    [
        (Local(epochs=3, batch_size=5, lr=0.01), lambda p: torch.optim.Adam(p, 0.01, (0.9, 0.999), fused=True)),
        (
            Local(epochs=3, batch_size=5, lr=0.01, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, fused=True),
        ),
        (
            Local(epochs=3, batch_size=5, lr=0.1, optimizer="sgd", momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
        ),
    ],
)
def test_optimisers_are_pytorch_s_and_new_in_every_phase(
    local: Local, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    data, model = made_data(), made_model()
    twin = copy.deepcopy(model)
    losses = by_hand(twin, data, make(twin.parameters()), size=5, phase=0, epochs=3)
    losses += by_hand(twin, data, make(twin.parameters()), size=5, phase=1, epochs=1)
    outcome = train(model, data, local, [Phase(), Phase(epochs=1)])
    assert bitwise(references(model), references(twin))
    assert outcome.loss == pytest.approx(np.mean(losses), abs=1e-6)


def test_training_is_a_function_of_seed_round_client_and_purpose() -> None:
    def trained(**place: Any) -> State:
        model = made_model()
        model.append(nn.Dropout(0.5))
        train(model, made_data(), Local(epochs=1, batch_size=4), seeded=Routed, **place)
        return references(model)

    assert bitwise(trained(), trained())
    assert not bitwise(trained(), trained(round=9))
    assert not bitwise(trained(), trained(client=9))
    assert not bitwise(trained(), trained(purpose="refresh"))


def test_noise_comes_from_the_client_s_stream_and_not_from_the_global_generator() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3), nn.Dropout(0.5))
    twin = copy.deepcopy(model)
    data = made_data(4)
    before = torch.default_generator.get_state()
    train(model, data, Local(epochs=1, batch_size=4, lr=0.125, optimizer="sgd"), seeded=Routed)
    assert torch.equal(torch.default_generator.get_state(), before)
    order = torch.from_numpy(stream(1, "batches", "train", 2, 3, 0, 0).permutation(4))
    inputs, targets = data.pool.batch(data.train[order])
    keep = torch.empty(4, 3).bernoulli_(0.5, generator=generator(1, "noise", "train", 2, 3))
    F.cross_entropy(twin[1](twin[0](inputs)) * keep * 2, targets).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad * 0.125)
    assert bitwise(references(model), references(twin))


def test_a_client_trains_on_its_own_samples_only() -> None:
    data = made_data(5)
    assert isinstance(data.pool, ArrayPool)
    seen: list[Tensor] = []

    def objective(step: Step) -> Tensor:
        seen.append(step.inputs)
        return step.loss(step.model(step.inputs), step.targets)

    train(made_model(), data, Local(epochs=2, batch_size=2), [Phase(objective=objective)])
    own = {bits(data.pool.inputs[i])[2] for i in data.train}
    assert [len(x) for x in seen] == [2, 3, 2, 3]
    for epoch in (seen[:2], seen[2:]):
        assert {bits(x)[2] for x in torch.cat(epoch)} == own


def test_an_objective_sees_what_the_client_received() -> None:
    model = made_model()
    received = state_of(model)
    distances: list[float] = []

    def objective(step: Step) -> Tensor:
        assert step.received is received
        moved = references(step.model)
        distances.append(sum(float((moved[n] - t).abs().sum()) for n, t in step.received.items()))
        return step.loss(step.model(step.inputs), step.targets)

    train(model, made_data(), Local(epochs=1, batch_size=5), [Phase(objective=objective)], received=received)
    assert distances[0] == 0
    assert distances[1] > 0


# --- frozen means frozen -------------------------------------------------------------------------------------------

NAMES = list(references(made_model()))
HARD = Local(epochs=2, batch_size=4, lr=0.1, optimizer="sgd", momentum=0.9, weight_decay=0.5)
BODY = frozenset(name for name in NAMES if name[0] in "01")
HEAD = frozenset({"6.weight", "6.bias"})


def with_gradient(names: frozenset[str]) -> set[str]:
    return {name for name in names if name.endswith(("weight", "bias"))}


@pytest.mark.parametrize("local", [HARD, Local(epochs=2, batch_size=4, lr=0.1, weight_decay=0.5)])
@settings(max_examples=12, deadline=None)
@given(trains=st.frozensets(st.sampled_from(sorted({name.partition(".")[0] for name in NAMES})), min_size=1))
def test_a_phase_moves_what_it_trains_and_nothing_else(local: Local, trains: frozenset[str]) -> None:
    model = made_model()
    before = state_of(model)
    chosen = frozenset(name for name in NAMES if name.partition(".")[0] in trains)
    train(model, made_data(), local, [Phase(trains=chosen)])
    moved = {name for name, t in references(model).items() if bits(t) != bits(before[name])}
    assert moved == chosen


def test_frozen_parameters_stay_although_an_earlier_phase_gave_them_momentum() -> None:
    model = made_model()
    train(model, made_data(), HARD, [Phase(trains=HEAD | BODY)])
    after_one = state_of(model)
    model = made_model()
    train(model, made_data(), HARD, [Phase(trains=HEAD | BODY), Phase(trains=HEAD)])
    moved = {name for name, t in references(model).items() if bits(t) != bits(after_one[name])}
    assert moved == HEAD


def test_a_normalisation_whose_statistics_are_frozen_uses_them() -> None:
    model = made_model()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    modes: list[tuple[bool, bool]] = []

    def objective(step: Step) -> Tensor:
        modes.append((norm.training, model[5].training))
        return step.loss(step.model(step.inputs), step.targets)

    trains = HEAD | {name for name in NAMES if name.startswith("5.")}
    train(model, made_data(), HARD, [Phase(trains=trains, objective=objective)])
    assert set(modes) == {(False, True)}


class Scaled(nn.Module):
    """A model with a constant of its own at the top, above layers that are trained."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        self.body = made_model()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.drop(self.body(x * self.scale))
        return made


def test_a_frozen_constant_does_not_freeze_the_layers_below_it() -> None:
    model = Scaled()
    before = state_of(model)
    trains = frozenset(name for name in before if name != "scale")
    train(model, made_data(), HARD, [Phase(trains=trains)])
    moved = {name for name, t in references(model).items() if bits(t) != bits(before[name])}
    assert moved == trains


# --- personal phases -----------------------------------------------------------------------------------------------


def random_split(seed: int, norm: str = "follow") -> Split:
    """All layers but the head by element, random masks, the head's bias personal."""
    draws = np.random.default_rng(seed)
    anatomy = Anatomy.of(made_model())
    split = Split.of(anatomy, layers=anatomy.select([1, 2]), personal=["6.bias"], norm=norm)
    return split.with_masks({name: (draws.random(len(mask)) < 0.5).tolist() for name, mask in split.masks.items()})


@pytest.mark.parametrize("norm", ["follow", "shared", "personal"])
@pytest.mark.parametrize("local", [HARD, Local(epochs=2, batch_size=4, weight_decay=0.5)])
def test_a_personal_phase_moves_no_shared_number(norm: str, local: Local) -> None:
    for seed in range(4):
        model, split = made_model(), random_split(seed, norm)
        before = state_of(model)
        train(model, made_data(), local, [Phase(trains=PERSONAL)], split=split)
        was, now = split.shared(before), split.shared(references(model))
        assert {name for name in was if bits(was[name]) != bits(now[name])} == set()


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_a_personal_phase_moves_every_personal_parameter_element(seed: int) -> None:
    model, split = made_model(), random_split(seed)
    before = split.personal(state_of(model))
    train(model, made_data(), HARD, [Phase(trains=PERSONAL)], split=split)
    after = split.personal(references(model))
    for name in before:
        if name in split.mixed and "running" in name:  # what is shared of the normalisation would not be frozen
            assert bitwise({name: after[name]}, {name: before[name]})
        else:
            assert bool((after[name] != before[name]).all()), name


def test_a_personal_phase_after_a_joint_one_keeps_what_the_joint_one_learned() -> None:
    split = random_split(3)
    after_joint = made_model()
    train(after_joint, made_data(), HARD, [Phase(epochs=1)], split=split)
    model = made_model()
    train(model, made_data(), HARD, [Phase(epochs=1), Phase(trains=PERSONAL, epochs=1)], split=split)
    assert not bitwise(references(model), references(after_joint))
    kept = {name: t for name, t in split.shared(references(model)).items() if "num_batches" not in name}
    assert bitwise(kept, {name: split.shared(references(after_joint))[name] for name in kept})


def test_a_personal_phase_without_anything_personal_changes_nothing() -> None:
    model = made_model()
    before = state_of(model)
    train(model, made_data(), HARD, [Phase(trains=PERSONAL)])
    assert bitwise(references(model), before)


def test_what_comes_before_a_phase_is_handed_to_its_objective() -> None:
    model, data = made_model(), made_data(7)
    begun: list[Begin] = []
    seen: list[tuple[str, list[int]]] = []

    def before(begin: Begin) -> str:
        begun.append(begin)
        return f"context {len(begun)}"

    def objective(step: Step) -> Tensor:
        seen.append((step.context, step.index.tolist()))
        assert torch.equal(step.inputs, data.pool.batch(data.train[step.index])[0])
        return step.loss(step.model(step.inputs), step.targets)

    phases = [Phase(before=before, objective=objective, epochs=1), Phase(before=before, epochs=0)]
    train(model, data, Local(batch_size=4), phases)
    assert [(b.model is model, b.data is data, b.loss is F.cross_entropy) for b in begun] == [(True, True, True)] * 2
    assert [context for context, _ in seen] == ["context 1"] * 2
    assert sorted(i for _, index in seen for i in index) == list(range(7))


def test_the_noise_of_phases_is_found_out_on_a_copy() -> None:
    data, local = made_data(), Local(batch_size=4)
    plain, dropping = made_model(), made_model().append(nn.Dropout(0.5))

    def alpha(step: Step) -> Tensor:
        return step.loss(F.alpha_dropout(step.model(step.inputs), 0.5, training=True), step.targets)

    before = state_of(dropping)
    randomness = torch.default_generator.get_state()
    assert noise_of(plain, [Phase()], local, data, CPU) is silent
    assert noise_of(dropping, [Phase()], local, data, CPU) is Routed
    assert noise_of(dropping, [Phase(), Phase(objective=alpha)], local, data, CPU) is taking_turns
    assert bitwise(references(dropping), before)
    assert torch.equal(torch.default_generator.get_state(), randomness)


# --- after training ------------------------------------------------------------------------------------------------


def test_after_training_every_parameter_can_be_trained_again() -> None:
    model = made_model()
    frozen = model[4].bias
    assert isinstance(frozen, nn.Parameter)
    frozen.requires_grad_(False)
    train(model, made_data(), HARD, [Phase(trains=HEAD)])
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"4.bias"}
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_parameter_that_the_model_froze_stays() -> None:
    model = made_model()
    frozen = model[4].bias
    assert isinstance(frozen, nn.Parameter)
    frozen.requires_grad_(False)
    before = bits(frozen)
    train(model, made_data(), HARD)
    assert bits(frozen) == before


def test_phases_that_train_nothing_change_nothing() -> None:
    model = made_model()
    before = state_of(model)
    outcome = train(model, made_data(), HARD, [Phase(trains=frozenset()), Phase(epochs=0)])
    assert bitwise(references(model), before)
    assert outcome == Outcome(13, 0.0, None)


def test_a_phase_s_epochs_replace_the_run_s() -> None:
    counted: list[int] = []

    def objective(step: Step) -> Tensor:
        counted.append(len(step.targets))
        return step.loss(step.model(step.inputs), step.targets)

    train(made_model(), made_data(), HARD, [Phase(epochs=3, objective=objective)])
    assert sum(counted) == 3 * 13


# --- problems ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "problem"), [(math.nan, "its loss is nan"), (math.inf, "its loss is inf")])
def test_a_loss_that_is_not_finite_is_reported(value: float, problem: str) -> None:
    def objective(step: Step) -> Tensor:
        return step.loss(step.model(step.inputs), step.targets) + value

    outcome = train(made_model(), made_data(), HARD, [Phase(objective=objective)])
    assert outcome.problem == problem


def test_one_bad_batch_of_many_is_reported() -> None:
    calls: list[int] = []

    def objective(step: Step) -> Tensor:
        calls.append(1)
        return step.loss(step.model(step.inputs), step.targets) * (math.nan if len(calls) == 2 else 1)

    outcome = train(made_model(), made_data(), Local(epochs=1, batch_size=4), [Phase(objective=objective)])
    assert len(calls) == 3
    assert outcome.problem == "its loss is nan"


def test_weights_that_are_not_finite_are_reported() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    outcome = train(model, made_data(4), Local(epochs=1, batch_size=4, lr=3e38, optimizer="sgd", weight_decay=1e3))
    assert math.isfinite(outcome.loss)
    assert outcome.problem == "its weights are not finite"


# --- settings ------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_paper_s() -> None:
    local = Local()
    assert (local.optimizer, local.lr, local.momentum, local.weight_decay) == ("adam", 1e-3, 0, 0)
    assert local.loss is F.cross_entropy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 0}, "epochs is 0 and batch_size 32; both are whole numbers from 1 up"),
        ({"epochs": 1.5}, "epochs is 1.5 and batch_size 32; both are whole numbers from 1 up"),
        ({"batch_size": -3}, "epochs is 5 and batch_size -3; both are whole numbers from 1 up"),
        ({"batch_size": 2.5}, "epochs is 5 and batch_size 2.5; both are whole numbers from 1 up"),
        ({"lr": 0.0}, "lr is 0.0; the learning rate is a positive number"),
        ({"lr": -1.0}, "lr is -1.0; the learning rate is a positive number"),
        ({"lr": math.nan}, "lr is nan; the learning rate is a positive number"),
        ({"lr": math.inf}, "lr is inf; the learning rate is a positive number"),
        (
            {"weight_decay": -0.1},
            "weight_decay is -0.1 and momentum 0.0; allowed: from 0 up, and from 0 to below 1",
        ),
        (
            {"optimizer": "sgd", "momentum": 1.0},
            "weight_decay is 0.0 and momentum 1.0; allowed: from 0 up, and from 0 to below 1",
        ),
        (
            {"optimizer": "sgd", "momentum": math.nan},
            "weight_decay is 0.0 and momentum nan; allowed: from 0 up, and from 0 to below 1",
        ),
        ({"optimizer": "adm"}, "optimizer is 'adm'. Did you mean 'adam'?"),
        ({"optimizer": "lbfgs"}, "optimizer is 'lbfgs'. Known: adam, sgd."),
        ({"momentum": 0.9}, "momentum goes with optimizer 'sgd'; Adam has its own"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], text: str) -> None:
    assert message(ConfigError, lambda: Local(**options)) == text
