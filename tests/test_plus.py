"""FedFac+: what its switches do, and that each of them is off when it is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import message

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.method import PERSONAL, Method, Phase, Plan, Training, check_method
from fedfac.moments import Moments
from fedfac.noise import silent
from fedfac.options import value_of
from fedfac.rules import Asked, FactorRule, Threshold, decide
from fedfac.split import Split
from fedfac.state import references, same, state_of
from fedfac.switches import Proximal, Refresh, ServerMomentum, Warmup
from fedfac.training import Local, train_client

HALF = Threshold.parse("50%")
OFF: dict[str, Any] = {
    "head": "shared",
    "joint": False,
    "warmup": 0,
    "decay": 0.0,
    "hysteresis": 0.0,
    "refresh": 0,
    "proximal": 0,
    "prior": 0,
    "average": 0,
    "statistics": 0,
    "server_momentum": 0,
}


def fedfac_with(**options: Any) -> Method:
    return methods.build("fedfac", options)


def plus(**options: Any) -> Method:
    return methods.build("fedfac-plus", options)


def trained(method: Method, **settings: Any) -> fedfac.Result:
    arguments: dict[str, Any] = {"rounds": 4, "rate": 0.6, "epochs": 1, "batch_size": 8, "seed": 3, "lanes": 1}
    return fedfac.fit(small_model(), small_federation(), method=method, **(arguments | settings))


def plan_of(method: Method, model: torch.nn.Module | None = None) -> Plan:
    return method.plan(Anatomy.of(method.wrapped(model or small_model())))


def training(method: Method, model: torch.nn.Module | None = None) -> Training:
    return plan_of(method, model).training


def equal(one: fedfac.Result, other: fedfac.Result) -> bool:
    models = [[references(r.model(client)) for client in range(len(r.names))] for r in (one, other)]
    return same(one.server, other.server) and all(same(a, b) for a, b in zip(*models, strict=True))


# --- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["dynamic", "static"])
def test_with_every_switch_off_it_is_fedfac(schedule: str) -> None:
    plain = trained(methods.fedfac(layers=[1, 2], schedule=schedule))
    off = trained(plus(layers=[1, 2], schedule=schedule, **OFF))
    assert equal(off, plain)
    assert off.records == plain.records
    assert plus(**OFF).switches == ()


@pytest.mark.parametrize(
    "switch",
    ["warmup", "decay", "hysteresis", "refresh", "proximal", "prior", "average", "statistics", "server_momentum"],
)
def test_no_switch_at_zero_does_anything_and_each_of_them_does_something(switch: str) -> None:
    on: dict[str, Any] = {
        "warmup": 2,
        "decay": 0.9,
        "hysteresis": 0.3,
        "refresh": 1,
        "proximal": 0.5,
        "prior": 1.0,
        "average": 0.5,
        "statistics": 0.5,
        "server_momentum": 0.5,
    }
    rest: dict[str, Any] = {"layers": [1, 2], "on": "updates"}  # with which elements change sides in a short run
    plain = trained(methods.fedfac(**rest))
    assert equal(trained(plus(**rest, **OFF)), plain)
    assert not equal(trained(fedfac_with(**rest, **{switch: on[switch]})), plain)


@pytest.mark.parametrize("head", ["shared", "personal"])
def test_a_warm_up_that_never_ends_is_fedavg(head: str) -> None:
    """With momentum it is FedAvg with momentum."""
    fedavg, slow = (trained(methods.fedavg() | ServerMomentum(momentum)) for momentum in (0.0, 0.5))
    assert not equal(fedavg, slow)
    everything: dict[str, Any] = {
        "head": head,
        "decay": 0.9,
        "hysteresis": 0.1,
        "refresh": 2,
        "proximal": 0,
        "prior": 0,
        "average": 0,
        "statistics": 0,
    }
    for rounds, momentum, wanted in ((4, 0, fedavg), (9, 0, fedavg), (9, 0.5, slow)):
        warm = trained(plus(layers=[1], warmup=rounds, server_momentum=momentum, **everything))
        assert equal(warm, wanted)
        assert [r["test"] for r in warm.records] == [r["test"] for r in wanted.records]
        assert warm.splits == fedavg.splits


@pytest.mark.parametrize(
    "method",
    [
        methods.fedper() | Warmup(9),
        methods.all_personal(layers=[1]) | Warmup(9),
        methods.random_split(layers=[1]) | Warmup(9),
        methods.variance_split(layers=[1]) | Warmup(9),
    ],
    ids=lambda m: m.name,
)
def test_other_methods_warm_up_the_same_way(method: Method) -> None:
    assert equal(trained(method), trained(methods.fedavg()))


# --- warm-up -------------------------------------------------------------------------------------------------------


def test_after_the_warm_up_the_split_begins_from_the_common_model() -> None:
    method = methods.fedper() | Warmup(2)
    fedavg = trained(methods.fedavg(), rounds=2)
    watched = trained(method, rounds=3)
    head = Anatomy.of(small_model()).head.tensors
    for name in head:  # nobody shares a head any more, so the server's is that of the warm-up
        assert torch.equal(watched.server[name], fedavg.server[name])
        assert not torch.equal(watched.server[name], references(small_model())[name])
    cohort = watched.records[2]["cohort"]
    for client in range(5):
        own = references(watched.model(client))
        assert all(torch.equal(own[name], fedavg.server[name]) == (client not in cohort) for name in head)


def test_the_first_decision_comes_after_the_warm_up() -> None:
    dynamic = trained(methods.fedfac(layers=[1]) | Warmup(2), rounds=5)
    assert [sorted(r["split"].get("0", {})) != [] for r in dynamic.records] == [False, False, True, True, True]
    assert ["tau" in r["split"].get("0", {}) for r in dynamic.records] == [False, False, True, True, True]
    assert [r["shared_share"] for r in dynamic.records] == [1, 1, 0.5, 0.5, 0.5]
    static = trained(methods.fedfac(layers=[1], schedule="static") | Warmup(2), rounds=5)
    assert ["tau" in r["split"].get("0", {}) for r in static.records] == [False, False, True, False, False]
    assert static.masks[3] == static.masks[4] == static.masks[5] == dynamic.masks[3]
    assert dynamic.splits[2].kept == frozenset()


@pytest.mark.parametrize("stopped", [1, 2, 3, 4])
def test_a_run_resumes_exactly_before_in_and_after_the_warm_up(tmp_path: Path, stopped: int) -> None:
    method = methods.fedfac_plus(layers=[1]) | Warmup(2)
    straight = trained(method, rounds=6, out=tmp_path / "straight")
    trained(method, rounds=stopped, out=tmp_path / "stopped")
    part = fedfac.load(tmp_path / "stopped", small_model(), method=method, federation=small_federation())
    assert equal(part, trained(method, rounds=stopped))
    resumed = trained(method, rounds=6, out=tmp_path / "stopped", resume=True)
    assert equal(resumed, straight)
    texts = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "stopped")]
    assert texts[0] == texts[1]


# --- moments and masks that change slowly -------------------------------------------------------------------------


def block(seed: int) -> Moments:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(9, 6)))
    return Moments(9, rows.sum(0), rows.T @ rows)


def test_decaying_moments_are_the_weighted_sums_of_all_rounds() -> None:
    rule = FactorRule({"l": HALF}, {"l": 0.75}, decay=0.5, solver="cold")
    memory = dict(rule.score(Asked("l", 6, block(0), seed=0, round=1)).memory)
    memory = dict(rule.score(Asked("l", 6, block(1), seed=0, round=2, memory=memory)).memory)
    last = rule.score(Asked("l", 6, block(2), seed=0, round=3, memory=memory))
    wanted = block(0) * 0.25 + block(1) * 0.5 + block(2)
    assert float(last.memory["n"]) == wanted.n == 9 * 1.75
    assert torch.allclose(last.memory["products"], wanted.products, atol=1e-12)
    plain = FactorRule({"l": HALF}, {"l": 0.75}, solver="cold")
    assert torch.allclose(last.values, plain.score(Asked("l", 6, wanted, seed=0, round=3)).values, atol=1e-8)
    assert not torch.allclose(last.values, plain.score(Asked("l", 6, block(2), seed=0, round=3)).values, atol=1e-3)


def test_an_element_changes_sides_only_past_the_margin() -> None:
    scores = torch.arange(1, 11, dtype=torch.float64)  # the median is 5.5
    shared = [False, True, True, True, False, True, False, False, True, False]
    plain, value = HALF.cut(scores, shared)
    assert plain == tuple(s >= 5.5 for s in scores.tolist())
    assert value == 5.5
    #   margin .2: what is shared stays above the 30 % quantile (3.7), what is personal joins above the 70 % one (7.3)
    held, value = Threshold.parse("50%", 0.2).cut(scores, shared)
    assert held == (False, False, False, True, False, True, False, True, True, True)
    assert value == 5.5
    assert Threshold.parse("50%", 0.2).cut(scores) == (plain, 5.5)
    assert Threshold.parse("50%", 1.0).cut(scores, shared)[0] == (
        *shared[:9],
        True,
    )  # the highest ties with the highest
    absolute = Threshold.parse(5, 2.0).cut(scores, shared)
    assert absolute == ((False, False, True, True, False, True, True, True, True, True), 5.0)


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_the_extremes_have_no_margin(margin: float) -> None:
    scores = torch.tensor([0.0, 0.2, 0.9], dtype=torch.float64)
    for before in ([True] * 3, [False] * 3):
        assert Threshold.parse(0, margin).cut(scores, before)[0] == (True, True, True)
        assert Threshold.parse("inf", margin).cut(scores, before)[0] == (False, False, False)
    assert Threshold.parse("20%", margin).cut(scores, [True] * 3)[0][0] is False  # a dead element is personal


def test_the_first_decision_knows_no_margin_and_later_ones_do() -> None:
    anatomy = Anatomy.of(torch.nn.Sequential(torch.nn.Linear(9, 6), torch.nn.Linear(6, 2)))
    split = Split.of(anatomy, layers=[anatomy.layer(1)])
    plain, careful = (FactorRule({"0": Threshold.parse("50%", margin)}, {"0": 0.75}) for margin in (0.0, 0.5))
    first = decide(careful, split, {"0": block(0)}, seed=0, round=1)
    assert first.split == decide(plain, split, {"0": block(0)}, seed=0, round=1).split
    then = decide(careful, first.split, {"0": block(1)}, seed=0, round=2, memory=first.memory)
    free = decide(plain, first.split, {"0": block(1)}, seed=0, round=2, memory=first.memory)
    assert sum(a != b for a, b in zip(then.split.masks["0"], first.split.masks["0"], strict=True)) <= 1
    assert free.split != then.split


# --- refreshing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        plus(layers=[1], warmup=1, head="personal", statistics=0),  # statistics are the client's own without a refresh
        plus(layers=[1], warmup=1, head="personal", statistics=0, joint=False),
        methods.fedper(),
        methods.fedrep(),
    ],
    ids=["fedfac-plus", "fedfac-plus, its elements kept", "fedper", "fedrep"],
)
def test_refreshing_moves_the_personal_part_of_a_copy_and_nothing_else(method: Method) -> None:
    plain, fresh = (trained(method | Refresh(epochs)) for epochs in (0, 2))
    assert same(plain.server, fresh.server)
    assert fresh.records[-1]["test"]["model"] == "fine-tuned"
    moved = set()
    for client in range(5):
        assert same(plain.state(client), fresh.state(client))
        before, after = references(plain.model(client)), references(fresh.model(client))
        for name, tensor in before.items():
            shared = fresh.split.mask(name)
            assert torch.equal(tensor[shared], after[name][shared]), name
            moved |= set() if torch.equal(tensor, after[name]) else {name}
    assert moved
    assert moved <= fresh.split.own


# --- laws and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"warmup": 1}, {"warmup": 1, "schedule": "static"}, {"warmup": 0, "layers": [1, -1]}]
)
def test_fedfac_plus_keeps_the_laws(options: dict[str, Any]) -> None:
    check_method(plus(**{"layers": [1, 2], **options}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"warmup": -1}, "warmup is -1; it is a whole number from 0 (off) up"),
        ({"refresh": -2}, "refresh is -2; it is a whole number from 0 (off) up"),
        ({"decay": 1.0}, "decay is 1.0; the weight of the round before is a number from 0 (none) to below 1"),
        ({"hysteresis": -0.1}, "hysteresis is -0.1; the margin is a number from 0 (none) to 1, in ranks"),
        ({"solver": "quick"}, "solver is 'quick'. Known: warm, cold."),
    ],
)
def test_switches_have_their_ranges(options: dict[str, Any], text: str) -> None:
    assert message(ConfigError, lambda: plus(**options)) == text
    if "solver" not in options:
        assert message(ConfigError, lambda: methods.build("fedper", options)) == text


def test_a_switch_of_another_kind_than_its_own_is_refused_in_python_and_from_a_file() -> None:
    assert message(ConfigError, lambda: Warmup(1.5)) == (  # type: ignore[arg-type]
        "warmup is 1.5; it is a whole number from 0 (off) up"
    )
    said = message(ConfigError, lambda: methods.build("fedper", {"warmup": 1.5}))
    assert said == "warmup is 1.5; for the method 'fedper' it must be of type int"


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_look_at_all_clients_before_the_first_round_leaves_no_room_for_a_warm_up(joint: bool, schedule: str) -> None:
    method = fedfac_with(warmup=3, probe_all=True, joint=joint, schedule=schedule)
    words = "probe_all looks at all clients before the first round; with a warm-up there is no such look"
    assert message(ConfigError, lambda: plan_of(method)).endswith(words)


def test_without_a_split_it_does_not_matter_which_layers_are_not_split() -> None:
    """A normalisation of which nothing is personal is frozen in a refresh, whether or not its layer is in Λ."""
    rest: dict[str, Any] = {**OFF, "head": "personal", "tau": 0, "warmup": 1, "refresh": 2}
    runs = [trained(plus(layers=layers, **rest)) for layers in ([1], [2], [1, 2])]
    runs.append(trained(methods.fedper() | Warmup(1) | Refresh(2)))
    for run in runs:
        assert equal(run, runs[0])
        assert [r["test"] for r in run.records] == [r["test"] for r in runs[0].records]


def test_a_refresh_trains_what_is_personal_and_nothing_else_moves() -> None:
    """Of a layer that is split, not even the statistics: what is shared would see other inputs than it does later."""
    anatomy = Anatomy.of(small_model())
    split = Split.of(anatomy, layers=anatomy.select([1, 2]), personal=anatomy.last(1))
    first = anatomy.layer(1).name
    cases = {"none": [True] * 6, "some": [True, False] * 3, "all": [False] * 6}
    for case, mask in cases.items():
        now = split.with_masks({first: mask})
        model = small_model()
        state, before = references(model), state_of(model)
        train_client(
            model,
            state,
            small_federation().client(0),
            [Phase(trains=PERSONAL, epochs=2)],
            Local(batch_size=8),
            received=before,
            split=now,
            seeded=silent,
            seed=0,
            round=1,
            client=0,
        )
        moved = {name for name, tensor in state.items() if not torch.equal(tensor, before[name])}
        weights = {f"{first}.weight", f"{first}.bias", "1.weight", "1.bias"}
        statistics = {"1.running_mean", "1.running_var"}
        assert moved == anatomy.last(1) | {"none": set(), "some": weights, "all": weights | statistics}[case]
        for name in moved & now.owners.keys():
            shared = now.mask(name)
            assert torch.equal(state[name][shared], before[name][shared])
        assert now.own - now.mixed == anatomy.last(1) | (
            {name for name, (layer, _) in now.owners.items() if layer == first} if case == "all" else set()
        )


@pytest.mark.parametrize("tau", [0, "50%"])
def test_a_shared_head_can_be_refreshed_beside_what_is_personal(tau: Any) -> None:
    method = plus(**{**OFF, "layers": [1], "tau": tau})
    plain, fresh = (trained(method | Refresh(epochs, "head")) for epochs in (0, 2))
    head = Anatomy.of(small_model()).last(1)
    assert same(plain.server, fresh.server)  # in training it is as shared as it was
    assert not fresh.split.kept & head
    assert fresh.records[-1]["test"]["model"] == "fine-tuned"
    for client in range(5):
        before, after = references(plain.model(client)), references(fresh.model(client))
        moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        assert head <= moved <= head | fresh.split.kept
        assert tau == 0 or moved > head
        for name in moved - head:
            shared = fresh.split.mask(name)
            assert torch.equal(before[name][shared], after[name][shared])


def test_a_head_that_is_split_is_refreshed_as_a_whole() -> None:
    run = trained(plus(**{**OFF, "layers": [2, -1]}) | Refresh(2, "head"))
    head = Anatomy.of(small_model()).head.name
    assert len(set(run.split.masks[head])) == 2
    before, after = run.state(0), references(run.model(0))
    shared = run.split.mask(f"{head}.bias")
    assert (before[f"{head}.bias"] != after[f"{head}.bias"]).all()
    assert shared.any()


def test_what_is_evaluated_has_its_name_from_the_first_round_on() -> None:
    """While all is shared, a refresh of what is personal trains nothing, one of the head or of everything does."""
    for refresh, first in (("personal", "global"), ("head", "fine-tuned"), ("all", "fine-tuned")):
        method = plus(**{**OFF, "layers": [1], "warmup": 2}) | Refresh(1, refresh)
        run = trained(method, evaluate_every=1)
        assert [r["test"]["model"] for r in run.records] == [first] * 2 + ["fine-tuned"] * 2


def test_a_refresh_of_everything_without_anything_personal_is_fedavg_plus() -> None:
    """Newcomers included: they train everything for the run's epochs, however long the refresh is."""
    for momentum, average in ((0.0, 0.0), (0.0, 0.6), (0.5, 0.0), (0.5, 0.9)):
        options = {"refresh": 2, "refresh_trains": "all", "server_momentum": momentum, "average": average}
        whole = trained(plus(**{**OFF, "layers": [1], "tau": 0, **options}), newcomers=0.4)
        fedavg = trained(methods.build("fedavg+", options), newcomers=0.4)
        assert same(whole.server, fedavg.server)
        assert whole.records == fedavg.records
    words = message(ConfigError, lambda: fedfac_with(refresh_trains="everything"))
    assert words == "refresh_trains is 'everything'. Known: personal, head, all."


# --- held near what was received -----------------------------------------------------------------------------------


def test_held_near_the_server_it_trains_as_fedprox() -> None:
    held = plus(proximal=0.3, prior=0, average=0)
    prox, free = (methods.fedprox(mu=mu) | ServerMomentum(0.5) for mu in (0.3, 0.1))
    assert training(held) == training(prox) != training(free)
    assert same(trained(held).server, trained(prox).server)
    assert not same(trained(prox).server, trained(free).server)
    near = methods.fedper(personal_layers=0) | Proximal(0.3)
    assert training(near) == training(methods.fedprox(mu=0.3))
    assert same(trained(near).server, trained(methods.fedprox(mu=0.3)).server)
    assert training(methods.fedper() | Proximal(0.3)) != training(methods.fedper())


@pytest.mark.parametrize("smoothing", ["fixed", "learned"])
def test_a_strong_term_holds_everything_and_a_weak_one_nothing(smoothing: str) -> None:
    """With class frequencies in the loss as well, and with those that are learned."""
    plain, weak, strong = (
        trained(plus(prior_smoothing=smoothing, proximal=mu), optimizer="sgd", lr=1e-3, epochs=8).server
        for mu in (0.0, 1e-6, 900.0)
    )
    start = state_of(small_model())
    moved = {name: float((plain[name] - start[name]).abs().max()) for name, _ in small_model().named_parameters()}
    assert max(moved.values()) > 1e-3
    for name, distance in moved.items():
        assert float((weak[name] - plain[name]).abs().max()) <= 1e-4 * max(moved.values())
        assert float((strong[name] - start[name]).abs().max()) < 0.5 * distance or distance < 1e-6


def test_how_near_it_is_held_is_left_to_the_network() -> None:
    """Without a normalisation .01, and 0 with one, whichever way it normalises; a number is a number anywhere."""

    def server(model: torch.nn.Module, **options: Any) -> dict[str, torch.Tensor]:
        method = plus(layers=[1], **options)
        return dict(fedfac.fit(model, small_federation(), method=method, rounds=2, rate=0.6, epochs=2, seed=3).server)

    def network(*between: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(72, 8), *between, torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )

    plain = network()
    assert same(server(plain), server(plain, proximal=0.01))
    assert not same(server(plain), server(plain, proximal=0))
    for norm in (torch.nn.BatchNorm1d(8), torch.nn.LayerNorm(8), torch.nn.GroupNorm(2, 8)):
        normal = network(norm)
        assert same(server(normal), server(normal, proximal=0))
        assert not same(server(normal), server(normal, proximal=0.01))
    assert methods.fedfac_plus().describe()["proximal"] is None
    assert "proximal" not in methods.fedfac().describe() | methods.fedper().describe()
    known = methods.options_of("fedfac-plus")
    assert value_of("fedfac-plus", "proximal", "0.1", known) == 0.1
    words = message(ConfigError, lambda: value_of("fedfac-plus", "proximal", "near", known))
    assert words == "proximal of 'fedfac-plus' is 'near'; it is a number"
    words = message(ConfigError, lambda: value_of("fedrep", "head_epochs", "few", methods.options_of("fedrep")))
    assert words == "head_epochs of 'fedrep' is 'few'; it is a whole number"


def test_two_that_leave_it_to_the_network_train_alike_where_the_network_says_the_same() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(72, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    left, none, near = (plus(proximal=mu) for mu in (None, 0, 0.01))
    assert training(left, plain) == training(near, plain) != training(none, plain)
    normal = small_model()
    assert training(left, normal) == training(none, normal) != training(near, normal)


def test_held_near_it_keeps_the_laws() -> None:
    check_method(plus(proximal=0.1, prior_smoothing="learned"))
    check_method(methods.fedfac(layers=[1]) | Proximal(0.1))
    words = message(ConfigError, lambda: plus(proximal=-1.0))
    assert words == (
        "proximal is -1.0; the weight of the proximal term is a number from 0 (off) up, or left out: by the network"
    )
