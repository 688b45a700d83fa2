"""Every method against what it is said to be: limits bit by bit, frozen parts, gradients by hand, bad options."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import bits, bitwise, message
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError, LayerError
from fedfac.method import Begin, Method, Phase, Plan, Step
from fedfac.methods.twin import Mixed, Twin
from fedfac.seeds import stream
from fedfac.state import State, load_state, references, state_of
from fedfac.switches import Refresh, ServerRate
from fedfac.switches.proximal import proximal
from fedfac.training import Local, batches, noise_of, train_client

CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"lr": 0.01}
HARD: dict[str, Any] = {"lr": 0.05, "optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}
LOCALS = {"Adam": ADAM, "SGD": HARD}
HEAD = {"7.weight", "7.bias"}
NAMES = set(references(small_model()))


def fit(method: Method, model: nn.Module | None = None, **settings: Any) -> fedfac.Result:
    given: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 2, "batch_size": 8, "seed": 3, "lanes": 1}
    return fedfac.fit(model or small_model(), small_federation(), method=method, **(given | ADAM | settings))


def plan_of(method: Method, model: nn.Module) -> Plan:
    return method.plan(Anatomy.of(model))


def states(result: fedfac.Result) -> list[State]:
    return [result.state(client) for client in range(len(result.names))]


def part(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if bits(before[name]) != bits(after[name])}


def with_module(index: int, module: nn.Module) -> nn.Sequential:
    model = small_model()
    assert isinstance(model, nn.Sequential)
    model[index] = module
    return model


def without_norm() -> nn.Module:
    return with_module(1, nn.Identity())


def without_dropout() -> nn.Module:
    return with_module(6, nn.Identity())


def loaded(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    load_state(model, state)
    return model.eval()


def held_out(client: int, result: fedfac.Result) -> tuple[Tensor, Tensor]:
    assert result.federation is not None
    data = result.federation.client(client)
    return data.pool.batch(data.test)


# --- limits --------------------------------------------------------------------------------------------------------

GLOBAL_STREAMS: dict[str, tuple[Method, str, Callable[[], nn.Module]]] = {
    "FedProx with mu = 0": (methods.fedprox(mu=0), "", small_model),
    "FedAvg+": (methods.fedavg_plus(), "", small_model),
    "FedProx+ with mu = 0": (methods.fedprox_plus(mu=0), "", small_model),
    "FedPer without a layer": (methods.fedper(personal_layers=0), "", small_model),
    "LG-FedAvg without a layer": (methods.lg_fedavg(local_layers=0), "", small_model),
    "FedBN without normalisation": (methods.fedbn(), "", without_norm),
    "FedEM of one component": (methods.fedem(components=1), "components.0.", small_model),
    "Ditto": (methods.ditto(), "shared.", small_model),
    "Ditto with other settings": (methods.ditto(lam=3, personal_epochs=1), "shared.", small_model),
    "APFL": (methods.apfl(), "shared.", small_model),
    "APFL with other settings": (methods.apfl(mix=0.9, personal_epochs=3), "shared.", small_model),
}


@cache
def server_of_fedavg(model: Callable[[], nn.Module], local: str) -> State:
    server = fit(methods.fedavg(), model(), **LOCALS[local]).server
    assert moved(references(model()), server) == set(server)
    return server


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("case", GLOBAL_STREAMS)
def test_the_global_model_is_that_of_fedavg(case: str, local: str) -> None:
    method, prefix, model = GLOBAL_STREAMS[case]
    fedavg = server_of_fedavg(model, local)
    other = fit(method, model(), **LOCALS[local])
    assert bitwise(part(other.server, prefix), fedavg)
    for own in states(other):
        assert bitwise(part(own, prefix), fedavg)


@pytest.mark.parametrize("case", ["FedProx with mu = 0", "FedEM of one component", "Ditto"])
def test_the_global_model_is_that_of_fedavg_at_any_rate_of_the_server(case: str) -> None:
    method, prefix, model = GLOBAL_STREAMS[case]
    fedavg = fit(methods.fedavg() | ServerRate(0.6), model())
    assert not bitwise(fedavg.server, fit(methods.fedavg(), model()).server)
    assert bitwise(part(fit(method | ServerRate(0.6), model()).server, prefix), fedavg.server)


def test_fedem_of_one_component_has_all_of_it() -> None:
    result = fit(methods.fedem(components=1))
    assert all(state["pi"].tolist() == [1.0] for state in states(result))


@pytest.mark.parametrize("local", [ADAM, HARD], ids=["Adam", "SGD"])
@pytest.mark.parametrize("method", [methods.fedper(personal_layers=3), methods.lg_fedavg(local_layers=3)], ids=str)
def test_with_every_layer_personal_it_is_local_training(method: Method, local: dict[str, Any]) -> None:
    alone = fit(methods.local(), **local)
    other = fit(method, **local)
    assert bitwise(other.server, references(small_model()))
    for own, theirs in zip(states(other), states(alone), strict=True):
        assert bitwise(own, theirs)
    trained = {client for record in alone.records for client in record["cohort"]}
    assert {c for c, state in enumerate(states(alone)) if moved(alone.server, state)} == trained


def test_fedfac_with_a_personal_head_and_no_layer_to_split_is_fedper() -> None:
    fedper, other = fit(methods.fedper()), fit(methods.fedfac(head="personal", layers=[]))
    assert bitwise(other.server, fedper.server)
    assert all(bitwise(a, b) for a, b in zip(states(other), states(fedper), strict=True))
    assert not bitwise(fedper.server, fit(methods.fedavg()).server)


PERSONAL_PARTS: dict[str, tuple[Method, set[str]]] = {
    "FedPer": (methods.fedper(), HEAD),
    "FedPer with two layers": (methods.fedper(personal_layers=2), HEAD | {"4.weight", "4.bias"}),
    "FedRep with two layers": (methods.fedrep(personal_layers=2), HEAD | {"4.weight", "4.bias"}),
    "LG-FedAvg with one layer": (methods.lg_fedavg(local_layers=1), NAMES - HEAD - {"4.weight", "4.bias"}),
    "LG-FedAvg": (methods.lg_fedavg(), NAMES - HEAD),
    "FedBN": (methods.fedbn(), {n for n in NAMES if n.startswith("1.")}),
    "local": (methods.local(), NAMES),
    "FedAvg": (methods.fedavg(), set()),
    "FedBABU": (methods.fedbabu(), set()),
}


@pytest.mark.parametrize("case", PERSONAL_PARTS)
def test_what_is_personal_stays_with_the_client(case: str) -> None:
    """The server's values of it never move; two trained clients share all the rest and none of it."""
    method, personal = PERSONAL_PARTS[case]
    result = fit(method, **HARD)
    fixed = HEAD if method.name == "fedbabu" else set()
    assert moved(references(small_model()), result.server) == NAMES - personal - fixed
    one, two = result.records[-1]["cohort"][:2]
    assert personal - {"1.num_batches_tracked"} <= moved(result.state(one), result.state(two)) <= personal


# --- FedProx -------------------------------------------------------------------------------------------------------


def test_the_proximal_term_holds_the_clients_near_what_they_received() -> None:
    start = references(small_model())
    ways = []
    for mu in (0.0, 0.01, 0.1, 1.0, 10.0):
        server = fit(methods.fedprox(mu=mu), rounds=1, cohort=5, optimizer="sgd", lr=0.05).server
        ways.append(sum(float((server[n] - start[n]).square().sum()) for n in start if not n.startswith("1.")))
    assert ways == sorted(ways, reverse=True)
    assert len(set(ways)) == 5
    assert ways[-1] < ways[0] / 2


def test_fedprox_differs_from_fedavg() -> None:
    assert not bitwise(fit(methods.fedprox(mu=0.1)).server, fit(methods.fedavg()).server)


def double_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def double_batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(7, 4, generator=draws, dtype=torch.float64), torch.randint(3, (7,), generator=draws)


def plain_gradients(model: nn.Module) -> State:
    """The gradients of the mean cross-entropy, by themselves."""
    x, y = double_batch()
    model = copy.deepcopy(model)
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), gradients, strict=True))


def gradients_of(model: nn.Module, objective: Callable[[Step], Tensor], received: State) -> dict[str, Tensor | None]:
    x, y = double_batch()
    model.zero_grad()
    objective(Step(model, x, y, F.cross_entropy, received, torch.arange(7))).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters()}


def assert_near(found: Tensor | None, wanted: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_fedprox_is_that_of_the_loss_and_the_pull() -> None:
    model, received = double_net(0), state_of(double_net(1))
    found = gradients_of(model, proximal(0.3), received)
    for name, gradient in plain_gradients(model).items():
        assert_near(found[name], gradient + 0.3 * (references(model)[name] - received[name]))


# --- FedRep and FedBABU --------------------------------------------------------------------------------------------


def train(model: nn.Module, phases: Sequence[Phase], *, method: Method, client: int = 4, **settings: Any) -> None:
    local = Local(**({"epochs": 3, "batch_size": 8} | HARD | settings))
    data = small_federation().client(client)
    train_client(
        model,
        references(model),
        data,
        phases,
        local,
        received=state_of(model),
        split=plan_of(method, model).split,
        seeded=noise_of(model, phases, local, data, CPU),
        seed=0,
        round=1,
        client=client,
    )


@pytest.mark.parametrize("local", [ADAM | {"optimizer": "adam", "momentum": 0.0, "weight_decay": 0.1}, HARD])
def test_fedrep_fits_the_head_with_the_body_frozen_and_then_the_body_with_the_head_frozen(
    local: dict[str, Any],
) -> None:
    method = methods.fedrep()
    model = small_model()
    first, second = plan_of(method, model).training.phases
    start = state_of(model)
    train(model, [first], method=method, **local)
    fitted = state_of(model)
    assert moved(start, fitted) == HEAD
    train(model, [second], method=method, **local)
    assert moved(fitted, references(model)) == NAMES - HEAD


def test_fedrep_fits_the_head_to_the_fixed_features_of_the_body() -> None:
    """A linear classifier on features that are computed once, in eval mode: in plain PyTorch."""
    model = without_dropout()
    assert isinstance(model, nn.Sequential)
    method = methods.fedrep()
    data = small_federation().client(4)
    x, y = data.pool.batch(data.train)
    with torch.no_grad():
        model(3 * x)  # the running statistics are not those of any batch
        features = copy.deepcopy(model[:7]).eval()(x)
    head = copy.deepcopy(model[7])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for epoch in range(3):
        order = stream(0, "batches", "train", 1, 4, 0, epoch).permutation(data.size)
        for index in batches(order, 8):
            optimizer.zero_grad()
            F.cross_entropy(head(features[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    train(model, plan_of(method, model).training.phases[:1], method=method)
    for name, tensor in references(head).items():
        torch.testing.assert_close(references(model)[f"7.{name}"], tensor, rtol=1e-4, atol=1e-6)


def test_fedrep_s_epochs_are_the_head_s_and_the_body_s() -> None:
    phases = plan_of(methods.fedrep(head_epochs=10, body_epochs=2), small_model()).training.phases
    assert [phase.epochs for phase in phases] == [10, 2]
    assert [phase.epochs for phase in plan_of(methods.fedrep(), small_model()).training.phases] == [None, 1]


@pytest.mark.parametrize("local", [ADAM, HARD], ids=["Adam", "SGD"])
@pytest.mark.parametrize("trains", ["all", "head"])
def test_fedbabu_leaves_the_head_at_its_start_and_fine_tunes_to_predict(trains: str, local: dict[str, Any]) -> None:
    start = references(small_model())
    result = fit(methods.fedbabu() | Refresh(None, trains), **local)
    assert moved(start, result.server) == NAMES - HEAD
    for client in range(5):
        assert bitwise(result.state(client), result.server)
        tuned = references(result.model(client))
        assert moved(result.server, tuned) == (NAMES if trains == "all" else HEAD)


# --- which model is evaluated --------------------------------------------------------------------------------------

EVALUATED = {
    "fedavg": "global",
    "fedprox": "global",
    "fedavg+": "fine-tuned",
    "fedprox+": "fine-tuned",
    "fedbabu": "fine-tuned",
    "local": "personal",
    "fedper": "personal",
    "fedrep": "personal",
    "lg-fedavg": "personal",
    "fedem": "personal",
    "fedbn": "personal",
    "ditto": "personal",
    "apfl": "personal",
    "pfedme": "personal",
    "fedfac": "personal",
    "fedfac-static": "personal",
    "fedfac-plus": "fine-tuned",
    "random": "personal",
    "random-redrawn": "personal",
    "all-personal": "personal",
    "variance": "personal",
}


def test_the_table_above_has_every_method() -> None:
    assert EVALUATED.keys() == methods.METHODS.keys()


@pytest.mark.parametrize("name", EVALUATED)
def test_a_client_s_model_predicts_what_was_evaluated(name: str) -> None:
    """Accuracy and loss of every client, by hand; and the record says which kind of model it was."""
    result = fit(methods.build(name), without_dropout(), cohort=2, rounds=2, epochs=3)
    assert [r["test"]["model"] for r in result.records if r["round"] > 0] == [EVALUATED[name]] * 2
    for client, row in enumerate(result.clients):
        x, y = held_out(client, result)
        output = result.model(client)(x).detach()
        right = sum(int(max(range(3), key=lambda k: o[k]) == int(t)) for o, t in zip(output.tolist(), y, strict=True))
        assert row["client"] == str(client)
        assert row["samples"] == len(y)
        assert row["accuracy"] == right / len(y)
        assert row["loss"] == float(F.cross_entropy(output, y))


@pytest.mark.parametrize("name", ["fedavg+", "fedprox+", "fedbabu", "fedem", "ditto", "fedper"])
def test_evaluation_leaves_no_trace(name: str) -> None:
    often, once = fit(methods.build(name), evaluate_every=1), fit(methods.build(name), evaluate_every=3)
    assert [("test" in a, "test" in b) for a, b in zip(often.records, once.records, strict=True)] == [
        (True, False),
        (True, False),
        (True, True),
    ]
    assert often.records[-1] == once.records[-1]
    assert bitwise(often.server, once.server)
    assert all(bitwise(a, b) for a, b in zip(states(often), states(once), strict=True))


@pytest.mark.parametrize("name", ["fedavg+", "fedper"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_can_be_asked_for_where_no_gradients_are_taken(name: str, mode: Callable[[], Any]) -> None:
    result = fit(methods.build(name), rounds=1)
    wanted = references(result.model(1))
    with mode():
        found = references(result.model(1))
    assert bitwise(found, wanted)


def test_a_fine_tuned_model_does_not_depend_on_the_number_of_threads() -> None:
    """It is the one that was evaluated, where every client trains in one thread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 3))
    draws = torch.Generator().manual_seed(0)
    federation = fedfac.Federation.from_arrays(
        [(torch.randn(40, 3, 16, 16, generator=draws), torch.arange(40) % 3) for _ in range(2)]
    )
    result = fedfac.fit(model, federation, method=methods.fedavg_plus(), rounds=1, epochs=1, batch_size=16)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            found.append(references(result.model(0)))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    assert bitwise(*found)


def finetuned_by_hand(server: State, data: Any, *, round: int, client: int, mu: float) -> nn.Module:
    """Two epochs of SGD from the global model, in plain PyTorch."""
    model = without_dropout()
    load_state(model, server)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        order = stream(3, "batches", "refresh", round, client, 0, epoch).permutation(data.size)
        for index in batches(order, 8):
            x, y = data.pool.batch(data.train[index])
            loss = F.cross_entropy(model(x), y)
            for name, p in model.named_parameters():
                loss = loss + mu / 2 * (p - server[name]).square().sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


@pytest.mark.parametrize(
    ("method", "mu"),
    [(methods.fedavg_plus() | Refresh(2, "all"), 0.0), (methods.fedprox_plus(mu=0.5) | Refresh(2, "all"), 0.5)],
    ids=str,
)
def test_fine_tuning_is_training_from_the_global_model_by_the_method_s_own_loss(method: Method, mu: float) -> None:
    result = fit(method, without_dropout(), optimizer="sgd", lr=0.05, epochs=1)
    assert result.federation is not None
    for client in range(5):
        by_hand = finetuned_by_hand(result.server, result.federation.client(client), round=3, client=client, mu=mu)
        found = references(result.model(client))
        assert "0.weight" in moved(result.server, found)
        for name, tensor in references(by_hand).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


# --- FedBN ---------------------------------------------------------------------------------------------------------


def misleading() -> nn.Module:
    """Names that say the opposite of what the modules are."""
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            bn1=nn.Conv2d(2, 4, 3),
            conv=nn.BatchNorm2d(4),
            norm=nn.Conv2d(4, 4, 3),
            downsample=nn.GroupNorm(2, 4),
            layer=nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            flatten=nn.Flatten(),
            batchnorm=nn.Linear(16, 6),
            linear=nn.LayerNorm(6),
            fc=nn.RMSNorm(6),
            running_mean=nn.Linear(6, 3),
        )
    )


def test_fedbn_knows_normalisation_by_its_type_and_not_by_its_name() -> None:
    model = misleading()
    personal = {
        name for name in references(model) if name.split(".")[0] in {"conv", "downsample", "layer", "linear", "fc"}
    }
    assert len(personal) == 5 + 2 + 5 + 2 + 1
    assert plan_of(methods.fedbn(), model).split.kept == personal
    result = fit(methods.fedbn(), model)
    assert moved(references(model), result.server) == set(references(model)) - personal
    one, two = result.records[-1]["cohort"][:2]
    assert moved(result.state(one), result.state(two)) >= {n for n in personal if "num_batches" not in n}


# --- Ditto, APFL, pFedMe -------------------------------------------------------------------------------------------

TWINS = ["ditto", "apfl", "pfedme"]


@pytest.mark.parametrize("name", TWINS)
def test_a_client_that_never_trained_predicts_with_the_global_model(name: str) -> None:
    result = fit(methods.build(name), rounds=2, cohort=2, newcomers=0.2)
    trained = {client for record in result.records for client in record["cohort"]}
    idle = set(range(5)) - trained
    assert idle
    everyone = loaded(small_model(), part(result.server, "shared."))
    x, _ = held_out(4, result)
    wanted = everyone(x)
    for client in idle:
        assert bits(result.model(client)(x)) == bits(wanted)
    for client in trained:
        assert not torch.allclose(result.model(client)(x), wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["ditto", "pfedme"])
def test_a_client_that_trained_predicts_with_its_own_model(name: str) -> None:
    result = fit(methods.build(name))
    for client in result.records[-1]["cohort"]:
        x, _ = held_out(client, result)
        alone = loaded(small_model(), part(result.state(client), "own."))
        assert bits(result.model(client)(x)) == bits(alone(x))


def test_apfl_predicts_with_the_mixture_of_the_parameters() -> None:
    result = fit(methods.apfl(mix=0.3))
    for client in result.records[-1]["cohort"]:
        state = result.state(client)
        own, shared, alpha = part(state, "own."), part(state, "shared."), float(state["alpha"])
        assert 0 < alpha < 1
        assert alpha != pytest.approx(0.3, abs=1e-4)
        parameters = {name for name, _ in small_model().named_parameters()}
        mixed = {n: alpha * own[n] + (1 - alpha) * shared[n] if n in parameters else own[n] for n in own}
        x, _ = held_out(client, result)
        wanted = loaded(small_model(), mixed)(x)
        torch.testing.assert_close(result.model(client)(x), wanted, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(wanted, loaded(small_model(), own)(x), atol=1e-4)


@pytest.mark.parametrize("name", TWINS)
def test_an_own_model_starts_once_from_the_global_one_that_the_client_received(name: str) -> None:
    method = methods.build(name)
    model = method.wrapped(small_model(0))
    assert isinstance(model, Twin)
    before = plan_of(method, model).training.phases[0].before
    assert before is not None
    first, later = references(small_model(1)), references(small_model(2))
    data = small_federation().client(0)
    for received in (first, later):
        load_state(model.shared, received)
        before(Begin(model, data, F.cross_entropy))
        assert bitwise(references(model.own), first)
        assert bitwise(references(model.shared), received)


@pytest.mark.parametrize("name", TWINS)
def test_a_client_begins_in_the_round_in_which_it_first_trains(name: str) -> None:
    result = fit(methods.build(name), rounds=2, cohort=1)
    first, later = (record["cohort"][0] for record in result.records)
    assert first != later
    assert [int(state["begun"]) for state in states(result)] == [int(c in (first, later)) for c in range(5)]
    alone = fit(methods.build(name), rounds=1, cohort=1)
    assert bitwise(part(result.state(first), "own."), part(alone.state(first), "own."))


@pytest.mark.parametrize("name", TWINS)
def test_the_global_normalisation_has_the_statistics_of_data(name: str) -> None:
    """Statistics are averaged when they are shared, for every method alike: the start's are those of no data."""
    result = fit(methods.build(name))
    assert moved(references(small_model()), part(result.server, "shared.")) == NAMES


def twin(kind: Callable[[nn.Module], Twin]) -> Twin:
    """Two different models in one, which have begun."""
    made = kind(double_net(0))
    load_state(made.own, references(double_net(1)))
    made.begun.fill_(1)
    return made


@pytest.mark.parametrize("lam", [0.0, 0.7, 15.0])
def test_the_gradients_of_pfedme(lam: float) -> None:
    """∇f(θ) + λ(θ − w) for the own model, λ(w − θ) for the global one."""
    model = twin(Twin)
    found = gradients_of(model, plan_of(methods.pfedme(lam=lam), model).training.phases[0].objective, state_of(model))
    theta, w = references(model.own), references(model.shared)
    for name, gradient in plain_gradients(model.own).items():
        assert_near(found[f"own.{name}"], gradient + lam * (theta[name] - w[name]))
        assert_near(found[f"shared.{name}"], lam * (w[name] - theta[name]))


@pytest.mark.parametrize("lam", [0.0, 0.7, 15.0])
def test_the_gradients_of_ditto(lam: float) -> None:
    """∇f(v) + λ(v − wᵗ) with wᵗ as received, wherever the global stream has gone since; nothing moves the latter."""
    model = twin(Twin)
    received = state_of(model)
    load_state(model.shared, references(double_net(2)))
    shared, own = plan_of(methods.ditto(lam=lam), model).training.phases
    found = gradients_of(model, own.objective, received)
    for name, gradient in plain_gradients(model.own).items():
        assert_near(found[f"own.{name}"], gradient + lam * (references(model.own)[name] - received[f"shared.{name}"]))
        assert found[f"shared.{name}"] is None
    found = gradients_of(model, shared.objective, received)
    for name, gradient in plain_gradients(model.shared).items():
        assert_near(found[f"shared.{name}"], gradient)
        assert found[f"own.{name}"] is None


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_the_gradients_of_apfl(alpha: float) -> None:
    """α·∇f(v̄) for v, ⟨∇f(v̄), v − w⟩ for α, and nothing for w."""
    model = twin(lambda m: Mixed(m, alpha).double())
    v, w = references(model.own), references(model.shared)
    bar = loaded(double_net(), {name: alpha * v[name] + (1 - alpha) * w[name] for name in v})
    x, _ = double_batch()
    torch.testing.assert_close(model(x), bar(x))
    found = gradients_of(model, plan_of(methods.apfl(), model).training.phases[1].objective, state_of(model))
    slope = torch.zeros((), dtype=torch.float64)
    for name, gradient in plain_gradients(bar).items():
        assert_near(found[f"own.{name}"], alpha * gradient)
        assert found[f"shared.{name}"] is None
        slope = slope + (gradient * (v[name] - w[name])).sum()
    assert_near(found["alpha"], slope)


@pytest.mark.parametrize("mix", [0.02, 0.5, 0.98])
def test_alpha_stays_a_share(mix: float) -> None:
    result = fit(methods.apfl(mix=mix), lr=0.3, rounds=2, cohort=5)
    found = [float(state["alpha"]) for state in states(result)]
    assert result.federation is not None
    found += [float(references(result.adapt(result.federation.client(c)))["alpha"]) for c in range(5)]
    assert len(set(found)) > 2
    assert all(0 <= share <= 1 for share in found), found


@pytest.mark.parametrize(("name", "phase"), [("ditto", 0), ("ditto", 1), ("apfl", 0), ("apfl", 1)])
def test_each_phase_moves_one_of_the_two_models(name: str, phase: int) -> None:
    method = methods.build(name)
    model = method.wrapped(small_model())
    phases = plan_of(method, model).training.phases
    train(model, [Phase(trains=phases[phase].trains, epochs=0, before=phases[phase].before)], method=method)
    start = state_of(model)
    train(model, [phases[phase]], method=method)
    mine = {n for n in start if n.startswith("shared." if phase == 0 else "own.")}
    assert moved(start, references(model)) == mine | ({"alpha"} if name == "apfl" and phase == 1 else set())


def test_ditto_is_nearer_to_the_global_model_the_larger_lambda() -> None:
    ways = []
    for lam in (0.0, 0.1, 1.0, 10.0):
        state = fit(methods.ditto(lam=lam), rounds=1, cohort=5, optimizer="sgd", lr=0.05).state(0)
        start = references(small_model())
        ways.append(sum(float((state[f"own.{n}"] - start[n]).square().sum()) for n in start if n[0] != "1"))
    assert ways == sorted(ways, reverse=True)
    assert len(set(ways)) == 4


# --- FedFac's head -------------------------------------------------------------------------------------------------


def test_a_head_may_be_one_of_the_layers_to_split() -> None:
    model = small_model()
    choices: list[list[int | str]] = [[1, 3], [1, -1], [1, "7"]]
    for layers in choices:
        split = plan_of(methods.fedfac(layers=layers), model).split
        assert split.masks.keys() == {"0", "7"}
        assert {split.place(name) for name in HEAD} == {"by element"}
    result = fit(methods.fedfac(layers=[1, -1], tau="34%"))
    assert {layer: len(mask) for layer, mask in result.split.masks.items()} == {"0": 6, "7": 3}
    assert 0 < sum(result.split.masks["7"]) < 3


def test_a_personal_head_stands_beside_the_split() -> None:
    split = plan_of(methods.fedfac(layers=[2], head="personal"), small_model()).split
    assert split.personal_tensors == HEAD
    assert split.masks.keys() == {"4"}
    shared = plan_of(methods.fedfac(layers=[2]), small_model()).split
    assert {shared.place(name) for name in HEAD} == {"shared"}


@pytest.mark.parametrize("key", [-1, 3, "7"])
def test_a_head_is_not_both_personal_and_split(key: int | str) -> None:
    text = message(ConfigError, lambda: fit(methods.fedfac(layers=[2, key], head="personal")))
    assert text == "the head '7' cannot be both personal and one of the layers to split"


def test_an_unknown_kind_of_head_is_answered_with_the_nearest() -> None:
    text = message(ConfigError, lambda: methods.fedfac(head="personel"))
    assert text == "head is 'personel'. Did you mean 'personal'?"


# --- bad options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedprox", "mu", -1.0),
        ("fedprox", "mu", math.nan),
        ("fedprox", "mu", math.inf),
        ("fedprox+", "mu", -0.5),
        ("fedprox+", "refresh", -1),
        ("fedavg+", "refresh", -2),
        ("fedavg+", "refresh", 1.5),
        ("fedbabu", "refresh", -1),
        ("fedrep", "body_epochs", 0),
        ("fedrep", "body_epochs", 0.5),
        ("fedrep", "body_epochs", 1.5),
        ("fedrep", "head_epochs", 0),
        ("fedrep", "head_epochs", -1),
        ("fedem", "components", 0),
        ("fedem", "components", -1),
        ("fedem", "components", 2.5),
        ("fedper", "personal_layers", 1.5),
        ("ditto", "lam", -0.1),
        ("ditto", "lam", math.nan),
        ("ditto", "lam", math.inf),
        ("ditto", "personal_epochs", 0),
        ("apfl", "mix", 2.0),
        ("apfl", "mix", -0.1),
        ("apfl", "mix", math.nan),
        ("apfl", "personal_epochs", -1),
        ("pfedme", "lam", -15.0),
        ("pfedme", "lam", math.inf),
    ],
)
def test_an_option_out_of_range_is_refused_by_its_value(name: str, option: str, value: float) -> None:
    text = message(ConfigError, lambda: methods.build(name, {option: value}))
    assert re.search(rf"\b{option}( of method '{re.escape(name)}')? (is )?{re.escape(str(value))}\b", text), text


def test_an_unknown_kind_of_fine_tuning_is_refused() -> None:
    text = message(ConfigError, lambda: methods.build("fedbabu", {"refresh_trains": "body"}))
    assert text == "refresh_trains is 'body'. Known: personal, head, all."


@pytest.mark.parametrize("name", ["fedavg+", "fedprox+", "fedbabu"])
def test_without_its_refresh_a_method_predicts_with_what_was_trained(name: str) -> None:
    result = fit(methods.build(name, {"refresh": 0}), rounds=1)
    assert result.records[-1]["test"]["model"] == "global"
    assert all(bitwise(references(result.model(client)), result.server) for client in range(5))


@pytest.mark.parametrize("name", sorted(methods.METHODS))
@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_server_s_rate_that_is_not_positive_is_refused(name: str, rate: float) -> None:
    assert f"server_rate is {rate}" in message(ConfigError, lambda: methods.build(name, {"server_rate": rate}))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (methods.fedper(personal_layers=4), "4 layers were asked for; the model has 3"),
        (methods.fedper(personal_layers=-1), "-1 layers were asked for; the model has 3"),
        (methods.fedrep(personal_layers=9), "9 layers were asked for; the model has 3"),
        (methods.lg_fedavg(local_layers=5), "5 layers were asked for; the model has 3"),
        (methods.lg_fedavg(local_layers=-2), "-2 layers were asked for; the model has 3"),
    ],
    ids=str,
)
def test_layers_that_the_model_does_not_have_are_refused_before_training(method: Method, words: str) -> None:
    records: list[object] = []
    assert words in message(LayerError, lambda: fit(method, on_round=records.append))
    assert not records


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("fedper", "personal_layer", "method 'fedper' has no option 'personal_layer'. Did you mean 'personal_layers'?"),
        ("fedem", "component", "Did you mean 'components' or 'component_seed'?"),
        ("pfedme", "personal_epochs", "method 'pfedme' has no option 'personal_epochs'. Known: "),
        ("pfedme", "serverrate", "Did you mean 'server_rate'?"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(name: str, option: str, words: str) -> None:
    assert words in message(ConfigError, lambda: methods.build(name, {option: 1}))


def test_an_unknown_method_is_answered_with_the_nearest() -> None:
    assert message(ConfigError, lambda: methods.build("fedpre")).startswith("there is no method 'fedpre'. Did you mean")


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (Refresh, "Refresh has no values yet; write fedper | Refresh()"),
        ("refresh", "'refresh' is not a switch, such as those of fedfac.switches: Joint, "),
        (methods.fedavg(), " is not a switch, such as those of fedfac.switches"),
    ],
    ids=["a class", "a name", "a method"],
)
def test_what_is_not_a_switch_is_refused_where_it_is_added(added: Any, words: str) -> None:
    assert words in message(ConfigError, lambda: methods.fedper() | added)


# --- stages --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(4, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm1d(6)
        self.conv2 = nn.Conv1d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm1d(6)
        self.shortcut = nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x)))) + self.shortcut(x)
        return made


class Staged(nn.Module):
    """Something before layer 1, normalisations between, and a shortcut that is not counted."""

    fedfac_layers = ("stem", "block.conv1", "block.conv2", "head")

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(9, 4)
        self.norm0 = nn.LayerNorm(4)
        self.stem = nn.Linear(4, 4)
        self.norm1 = nn.LayerNorm(4)
        self.block = Block()
        self.norm2 = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(self.stem(self.norm0(self.embed(x)))) * self.scale
        made: Tensor = self.head(self.norm2(self.block(hidden.transpose(1, 2)).mean(2)))
        return made


def under(*prefixes: str) -> set[str]:
    return {name for name in references(Staged()) if name.startswith(prefixes)}


STAGES = {
    1: ("scale", "embed.", "norm0.", "stem.", "norm1."),
    2: ("block.conv1.", "block.bn1."),
    3: ("block.conv2.", "block.bn2.", "block.shortcut.", "norm2."),
    4: ("head.",),
}


def test_every_tensor_goes_with_one_of_the_counted_layers() -> None:
    stage = Anatomy.of(Staged()).stage
    assert dict(stage) == {name: number for number, prefixes in STAGES.items() for name in under(*prefixes)}
    assert stage.keys() == references(Staged()).keys()


@pytest.mark.parametrize("layers", range(5))
def test_the_first_layers_and_the_last_make_up_the_model(layers: int) -> None:
    anatomy = Anatomy.of(Staged())
    first = set().union(*(under(*STAGES[n]) for n in range(1, layers + 1)))
    assert anatomy.first(layers) == first
    assert anatomy.last(4 - layers) == references(Staged()).keys() - first


@pytest.mark.parametrize("layers", [-1, 5])
def test_there_are_no_more_layers_than_are_counted(layers: int) -> None:
    anatomy = Anatomy.of(Staged())
    text = f"{layers} layers were asked for; the model has 4"
    assert message(LayerError, lambda: anatomy.first(layers)) == text
    assert message(LayerError, lambda: anatomy.last(layers)) == text


def test_methods_cut_a_model_at_its_counted_layers() -> None:
    model = Staged()
    assert plan_of(methods.fedper(), model).split.kept == under("head.")
    assert plan_of(methods.lg_fedavg(), model).split.kept == references(model).keys() - under("head.")
    assert plan_of(methods.lg_fedavg(local_layers=1), model).split.kept == under(*STAGES[1])


def test_layers_are_cut_in_the_declared_order_even_if_registered_in_another() -> None:
    model = nn.Sequential(OrderedDict(out=nn.Linear(5, 3), norm=nn.LayerNorm(4), inside=nn.Linear(4, 5)))
    model.fedfac_layers = ("inside", "out")  # type: ignore[assignment]
    anatomy = Anatomy.of(model)
    assert anatomy.first(1) >= {"inside.weight", "inside.bias"}
    assert anatomy.last(1) >= {"out.weight", "out.bias"}
    assert anatomy.head.name == "out"
