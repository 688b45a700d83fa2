"""Clients that were never there: they stay out of training, and are served by each method's own rule."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import bits, bitwise, message
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedfac
from fedfac import evaluate, methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.data.federation import Federation
from fedfac.errors import ConfigError, DataError, RunError
from fedfac.method import Method
from fedfac.newcomers import serve
from fedfac.rounds import Session
from fedfac.run import RunDirectory
from fedfac.settings import Settings
from fedfac.state import State, load_state, references, state_of
from fedfac.switches import Refresh
from fedfac.training import Local

ADAM: dict[str, Any] = {"lr": 0.01}
HARD: dict[str, Any] = {"lr": 0.05, "optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}
SMALL: dict[str, Any] = {"rounds": 2, "cohort": 3, "epochs": 2, "batch_size": 8, "lanes": 1}
NAMES = set(references(small_model()))
HEAD = {"7.weight", "7.bias"}


def fit(method: Method, **settings: Any) -> fedfac.Result:
    return fedfac.fit(small_model(), small_federation(), method=method, **(SMALL | ADAM | settings))


def samples(n: int = 24, seed: int = 9) -> tuple[Tensor, Tensor]:
    """A newcomer's data, of whom no federation has heard."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=draws), torch.randint(3, (n,), generator=draws)


def moved(before: State, after: State) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if bits(before[name]) != bits(after[name])}


def softmax(logits: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.exp(logits.detach().double().numpy())
    made: np.ndarray[Any, np.dtype[np.float64]] = values / values.sum(1, keepdims=True)
    return made


def trained_clients(result: fedfac.Result) -> list[int]:
    return sorted({client for record in result.records if record["round"] > 0 for client in record["cohort"]})


# --- held out ------------------------------------------------------------------------------------------------------


def ten(spoilt: frozenset[int] = frozenset()) -> Federation:
    """Ten clients; the data of some can be replaced by noise."""
    draws = torch.Generator().manual_seed(0)
    arrays = []
    for client in range(10):
        x = torch.randn(20, 2, 6, 6, generator=draws)
        y = torch.randint(3, (20,), generator=draws)
        arrays.append((100 * torch.rand(20, 2, 6, 6) - 7, (y + 1) % 3) if client in spoilt else (x, y))
    return Federation.from_arrays(arrays, classes=3)


def run_ten(federation: Federation, method: Method, **settings: Any) -> fedfac.Result:
    given = SMALL | ADAM | {"newcomers": 0.4, "seed": 5, "rounds": 3, "cohort": 4}
    return fedfac.fit(small_model(), federation, method=method, **(given | settings))


@pytest.mark.parametrize(
    "method",
    [methods.fedavg(), methods.fedem(), methods.fedfac(schedule="static", probe_all=True, layers=[1])],
    ids=str,
)
def test_those_held_out_are_in_no_cohort_and_in_no_evaluation(method: Method) -> None:
    result = run_ten(ten(), method)
    late = set(result.newcomers)
    assert len(late) == 4
    for record in result.records:
        assert not late & set(record["cohort"])
    assert {row["client"] for row in result.clients} == {str(c) for c in range(10) if c not in late}
    assert result.records[-1]["test"]["clients"] == 6
    if method.name == "fedfac-static":
        assert result.records[0]["cohort"] == [c for c in range(10) if c not in late]


@pytest.mark.parametrize("name", ["fedavg", "fedfac", "fedem", "local", "fedavg+"])
def test_the_data_of_those_held_out_change_no_number(name: str) -> None:
    clean = run_ten(ten(), methods.build(name))
    spoilt = run_ten(ten(frozenset(clean.newcomers)), methods.build(name))
    assert spoilt.records[-1].pop("newcomers") != clean.records[-1].pop("newcomers")
    assert spoilt.records == clean.records
    assert bitwise(spoilt.server, clean.server)
    assert all(bitwise(spoilt.state(c), clean.state(c)) for c in range(10))
    someone = next(c for c in range(10) if c in trained_clients(clean))
    assert run_ten(ten(frozenset([someone])), methods.build(name)).records != clean.records


def test_who_is_held_out_depends_on_the_seed_and_not_on_the_method() -> None:
    settings: dict[str, Any] = {"rounds": 1, "epochs": 1}
    wanted = run_ten(ten(), methods.fedavg(), **settings)
    for name in methods.METHODS:
        other = run_ten(ten(), methods.build(name), **settings)
        assert list(other.newcomers) == list(wanted.newcomers), name
        assert other.records[-1]["cohort"] == wanted.records[-1]["cohort"], name
    by_seed = {tuple(run_ten(ten(), methods.fedavg(), seed=seed, **settings).newcomers) for seed in range(5)}
    assert len(by_seed) > 1


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.09, 0), (0.1, 1), (0.3, 3), (0.7, 7), (0.99, 9)])
def test_a_share_is_rounded_down_to_whole_clients(share: float, number: int) -> None:
    result = run_ten(ten(), methods.fedavg(), newcomers=share, cohort=1, rounds=1, epochs=1)
    assert len(set(result.newcomers)) == len(result.newcomers) == number
    assert result.records[-1]["test"]["clients"] == 10 - number


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_a_share_that_leaves_nobody_is_refused(share: float) -> None:
    text = message(ConfigError, lambda: run_ten(ten(), methods.fedavg(), newcomers=share))
    assert text.startswith(f"newcomers is {share}; ")


def test_a_cohort_is_drawn_from_those_who_train() -> None:
    text = message(ConfigError, lambda: run_ten(ten(), methods.fedavg(), cohort=7))
    assert text == "a cohort of 7 clients was asked for; the federation has 6 to train with"


# --- adapt ---------------------------------------------------------------------------------------------------------


def prefixed(prefix: str, names: set[str]) -> set[str]:
    return {prefix + name for name in names}


ADAPTED: dict[str, set[str]] = {
    "fedavg": set(),
    "fedprox": set(),
    "fedavg+": NAMES,
    "fedprox+": NAMES,
    "fedbabu": NAMES,
    "local": NAMES,
    "fedper": HEAD,
    "fedrep": HEAD,
    "lg-fedavg": NAMES - HEAD,
    "fedbn": {name for name in NAMES if name.startswith("1.")},
    "fedem": {"pi"},
    "ditto": prefixed("own.", NAMES) | {"begun"},
    "apfl": prefixed("own.", NAMES) | {"begun", "alpha"},
    "pfedme": prefixed("own.", NAMES) | {"begun"},
    "fedfac": {"4.weight", "4.bias"},
    "fedfac-static": {"4.weight", "4.bias"},
    "fedfac-plus": {"log_prior", "1.running_mean", "1.running_var", "4.weight", "4.bias"},
    "random": {"4.weight", "4.bias"},
    "random-redrawn": {"4.weight", "4.bias"},
    "variance": {"4.weight", "4.bias"},
    "all-personal": {"4.weight", "4.bias"},
}


def test_the_table_above_has_every_method() -> None:
    assert ADAPTED.keys() == methods.METHODS.keys()


@pytest.mark.parametrize("name", ADAPTED)
def test_a_newcomer_is_served_by_the_method_s_own_rule_first(name: str) -> None:
    """The paper gives FedFac two; LG-FedAvg's is the mean of all outputs; the others' is to adapt.

    FedFac+'s clients keep no weights, so that an ensemble of them would be the global model many times over.
    """
    by_element = {"fedfac", "fedfac-static", "random", "random-redrawn", "variance", "all-personal"}
    wanted = ("adapt", "ensemble") if name in by_element else ("adapt",)
    method = methods.build(name)
    plan = method.plan(Anatomy.of(method.wrapped(small_model())))
    assert plan.prediction.newcomer_rules == (("ensemble", "adapt") if name == "lg-fedavg" else wanted)


@pytest.mark.parametrize("local", [ADAM, HARD], ids=["Adam", "SGD"])
@pytest.mark.parametrize("name", ADAPTED)
def test_a_newcomer_moves_what_its_method_says_and_nothing_else(name: str, local: dict[str, Any]) -> None:
    result = fit(methods.build(name), **local)
    before, template = {n: t.clone() for n, t in result.server.items()}, state_of(result.template)
    model = result.adapt(samples())
    assert moved(result.server, references(model)) == ADAPTED[name]
    assert not any(module.training for module in model.modules())
    assert bitwise(result.server, before)
    assert bitwise(references(result.template), template)


@pytest.mark.parametrize("norm", ["follow", "shared", "personal"])
@pytest.mark.parametrize("head", ["shared", "personal"])
@pytest.mark.parametrize("local", [ADAM | {"weight_decay": 0.1}, HARD], ids=["Adam", "SGD"])
def test_fedfac_holds_every_shared_number_and_moves_every_personal_one(
    norm: str, head: str, local: dict[str, Any]
) -> None:
    result = fit(methods.fedfac(layers=[1, 2], tau="50%", norm=norm, head=head), **local)
    split = result.split
    assert all(0 < sum(split.masks[layer]) < len(split.masks[layer]) for layer in ("0", "4"))
    adapted = references(result.adapt(samples(), epochs=6))
    assert moved(split.shared(result.server), split.shared(adapted)) == set()
    was, now = split.personal(result.server), split.personal(adapted)
    assert was.keys() >= {"0.weight", "4.weight"}
    still = {name for name in split.mixed if "running" in name}  # statistics of which a part is shared
    assert bool(still) == (norm == "follow")
    for tensor in was:
        assert bool((was[tensor] == now[tensor] if tensor in still else was[tensor] != now[tensor]).all()), tensor


def test_a_newcomer_of_fedavg_gets_the_global_model() -> None:
    result = fit(methods.fedavg())
    x, _ = samples()
    assert bitwise(references(result.adapt(samples())), result.server)
    assert bits(result.adapt(samples())(x)) == bits(result.model(0)(x))


@pytest.mark.parametrize("name", ["fedfac", "fedper", "fedem", "local", "ditto", "fedavg+"])
def test_adapting_helps(name: str) -> None:
    """On its own training samples a newcomer's loss is lower than that of the server's model."""
    result = fit(methods.build(name), rounds=3, cohort=5)
    data = small_federation(clients=7).client(6)
    x, y = data.pool.batch(data.train)
    fresh = copy.deepcopy(result.template).eval()
    load_state(fresh, result.server)
    before = F.cross_entropy(fresh(x), y)
    after = F.cross_entropy(result.adapt((x, y), epochs=10)(x), y)
    assert after.item() < before.item()


class Pairs(Dataset[tuple[Tensor, int]]):
    """A newcomer's samples as a Dataset."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def test_samples_may_come_as_arrays_as_a_dataset_or_as_a_client() -> None:
    result = fit(methods.fedfac())
    x, y = samples()
    wanted = references(result.adapt((x, y)))
    client = Federation.from_arrays([(x, y)], test_share=0.0).client(0)
    for given in ((x.numpy(), y.numpy()), (x, y, x[:3], y[:3]), TensorDataset(x, y), Pairs(x, y), client):
        assert bitwise(references(result.adapt(given)), wanted)
    assert not bitwise(references(result.adapt(samples(seed=8))), wanted)


def test_adapting_is_a_function_of_the_run_and_the_samples() -> None:
    result = fit(methods.fedper())
    generator = torch.default_generator.get_state()
    one, again = (references(result.adapt(samples())) for _ in range(2))
    assert bitwise(one, again)
    assert torch.equal(torch.default_generator.get_state(), generator)
    assert bitwise(references(result.adapt(samples(), epochs=2)), one)
    assert not bitwise(references(result.adapt(samples(), epochs=3)), one)


@pytest.mark.parametrize("epochs", [0, -1])
def test_adapting_takes_at_least_one_epoch(epochs: int) -> None:
    result = fit(methods.fedper(), rounds=1)
    assert f"epochs is {epochs}" in message(ConfigError, lambda: result.adapt(samples(), epochs=epochs))


@pytest.mark.parametrize(
    "method",
    [methods.fedrep(head_epochs=1), methods.fedavg_plus() | Refresh(1, "all"), methods.ditto(personal_epochs=1)],
    ids=str,
)
def test_the_epochs_asked_for_are_the_epochs_of_adaptation(method: Method) -> None:
    result = fit(method, rounds=1)
    assert not bitwise(references(result.adapt(samples(), epochs=5)), references(result.adapt(samples())))


@pytest.mark.parametrize(
    "unlabelled",
    [samples()[0], (samples()[0],), samples()[0].numpy(), samples(2)[0].numpy()],
    ids=["tensor", "1-tuple", "array", "array of two"],
)
def test_samples_without_labels_are_answered_with_the_ensemble(unlabelled: Any) -> None:
    result = fit(methods.fedfac(), rounds=1)
    text = message(DataError, lambda: result.adapt(unlabelled))
    assert text == "these samples have no labels, so nothing can be trained on them: use result.ensemble()"


def test_labels_that_the_model_does_not_know_are_refused() -> None:
    result = fit(methods.fedper(), rounds=1)
    x, y = samples()
    assert "labels from 0 to 5" in message(DataError, lambda: result.adapt((x, y % 3 + torch.tensor([0, 3] * 12))))


def test_an_adaptation_that_does_not_stay_finite_is_not_handed_out() -> None:
    result = fit(methods.local(), rounds=1, **HARD)
    x, y = samples()
    with pytest.raises(fedfac.FedfacError, match="finite"):
        result.adapt((1e30 * x, y), epochs=5)


def test_a_model_can_be_adapted_where_no_gradients_are_taken() -> None:
    result = fit(methods.fedper(), rounds=1)
    wanted = references(result.adapt(samples()))
    with torch.no_grad():
        assert bitwise(references(result.adapt(samples())), wanted)


# --- ensemble ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedfac", "fedper", "lg-fedavg", "local", "fedbn", "ditto", "apfl"])
def test_the_ensemble_is_the_mean_of_the_trained_clients_probabilities(name: str) -> None:
    result = fit(methods.build(name), rounds=2, cohort=2, lr=0.05, newcomers=0.2)
    chosen = trained_clients(result)
    assert 2 <= len(chosen) < 5
    x, _ = samples()
    wanted = np.mean([softmax(result.model(client)(x)) for client in chosen], axis=0)
    output = result.ensemble()(x)
    np.testing.assert_allclose(np.exp(output.detach().double().numpy()), wanted, rtol=1e-5)
    spread = np.std([softmax(result.model(client)(x)) for client in chosen], axis=0)
    assert spread.max() > 0.01


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_the_ensemble_of_one_global_model_is_that_model(name: str) -> None:
    result = fit(methods.build(name))
    x, _ = samples()
    np.testing.assert_allclose(
        np.exp(result.ensemble()(x).detach().double().numpy()), softmax(result.model(0)(x)), rtol=1e-5
    )


def test_the_ensemble_of_regressors_is_the_mean_of_their_outputs() -> None:
    draws = torch.Generator().manual_seed(0)
    arrays = []
    for client in range(3):
        x = torch.randn(20, 2, generator=draws)
        arrays.append((x, 2 * x[:, :1] + client))
    torch.manual_seed(0)
    result = fedfac.fit(
        nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)),
        Federation.from_arrays(arrays),
        method=methods.lg_fedavg(),
        loss=F.mse_loss,
        **(SMALL | {"lr": 0.05}),
    )
    x = torch.randn(9, 2, generator=draws)
    wanted = torch.stack([result.model(client)(x) for client in trained_clients(result)]).mean(0)
    torch.testing.assert_close(result.ensemble()(x), wanted)


def test_an_ensemble_changes_no_client_and_needs_no_labels() -> None:
    result = fit(methods.fedfac(), cohort=5)
    before = [{n: t.clone() for n, t in result.state(c).items()} for c in range(5)]
    ensemble = result.ensemble()
    x, _ = samples()
    assert bits(ensemble(x)) == bits(ensemble(x))
    assert all(bitwise(result.state(c), before[c]) for c in range(5))


@pytest.mark.parametrize("name", ["fedper", "local", "fedfac", "fedavg"])
def test_a_federation_that_has_not_trained_has_no_ensemble(name: str) -> None:
    with Session(small_model(), small_federation(), methods.build(name), Local(), Settings()) as session:
        untrained = session.result()
    text = message(RunError, untrained.ensemble)
    assert text == "no client has trained yet, so there is nothing to make an ensemble of"


# --- all of them at once -------------------------------------------------------------------------------------------


def accuracy_by_hand(result: fedfac.Result, models: dict[int, nn.Module]) -> tuple[float, int]:
    assert result.federation is not None
    right = total = 0
    for client, model in models.items():
        data = result.federation.client(client)
        x, y = data.pool.batch(data.test)
        right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    return right / total, total


def test_an_ensemble_is_for_clients_that_keep_something() -> None:
    anatomy = Anatomy.of(small_model())
    for options, rules in (
        ({"joint": False}, ("adapt", "ensemble")),
        ({"head": "personal"}, ("adapt", "ensemble")),
        ({"norm": "personal"}, ("adapt", "ensemble")),
        ({"refresh_trains": "head"}, ("adapt",)),
        ({"joint": False, "tau": 0}, ("adapt",)),
    ):
        method = methods.build("fedfac-plus", {"layers": [1], "prior": 0, **options})
        assert method.plan(anatomy).prediction.newcomer_rules == rules


def test_newcomers_can_be_served_by_one_rule() -> None:
    result = run_ten(ten(), methods.fedfac(), lr=0.05)
    both = serve(result)
    assert {rule: serve(result, rule=rule) for rule in both} == {rule: {rule: both[rule]} for rule in both}
    assert serve(run_ten(ten(), methods.fedavg(), lr=0.05), rule="ensemble") == {}


@pytest.mark.parametrize("name", ["fedavg", "fedfac", "lg-fedavg"])
def test_serving_the_newcomers_tests_each_on_its_own_samples(name: str) -> None:
    result = run_ten(ten(), methods.build(name), lr=0.05)
    assert result.plan is not None
    figures = serve(result)
    assert tuple(figures) == result.plan.prediction.newcomer_rules
    if "ensemble" in figures:
        wanted, n = accuracy_by_hand(result, dict.fromkeys(result.newcomers, result.ensemble()))
        assert figures["ensemble"]["model"] == "ensemble"
        assert (figures["ensemble"]["accuracy"], figures["ensemble"]["samples"]) == (wanted, n)
    found = figures["adapt"]
    assert (found["model"], found["clients"]) == ("global" if name == "fedavg" else "adapted", 4)
    if name == "fedavg":
        assert found["accuracy"] == accuracy_by_hand(result, {c: result.model(c) for c in result.newcomers})[0]
    else:
        assert found["loss"] != serve(result, epochs=7)["adapt"]["loss"]


def one_by_one(result: fedfac.Result) -> dict[str, Any]:
    """The figures of newcomers that ``result.adapt`` gave their models, one after the other."""
    assert result.federation is not None
    scores = []
    for client in result.newcomers:
        data = result.federation.client(client)
        model = result.adapt(data, client=client)
        classes = result.federation.classes
        metrics = evaluate.named_metrics(None, classes)
        loss = F.cross_entropy if classes else F.mse_loss
        scores.append(evaluate.score(model, client, data.pool, data.test, loss, classes, metrics))
    return evaluate.summary(scores, "by hand")


def served(result: fedfac.Result) -> dict[str, Any]:
    """What the run says about its newcomers, once."""
    (found,) = [record["newcomers"] for record in result.records if "newcomers" in record]
    assert "newcomers" in result.records[-1]
    assert found.keys() == {"adapt"}  # an ensemble would need the clients' personal parts
    return dict(found["adapt"])


@pytest.mark.parametrize("name", ADAPTED)
def test_a_run_serves_its_newcomers_as_adapt_does_to_the_last_bit(name: str) -> None:
    """FedEM's take E steps only; LG-FedAvg's own rule is the ensemble, and adapting its second one."""
    one, two = (run_ten(ten(), methods.build(name), lr=0.05, lanes=lanes) for lanes in (1, 2))
    found = served(one)
    model = "global" if name in ("fedavg", "fedprox") else "adapted"
    assert (found["model"], found["clients"], found["samples"]) == (model, 4, 16)
    assert found | {"model": "by hand"} == one_by_one(one)
    assert two.records == one.records
    assert serve(one)["adapt"] == found


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("name", ["fedavg", "fedavg+", "fedper", "fedfac", "lg-fedavg"])
def test_stacked_newcomers_fare_as_those_served_one_by_one(name: str) -> None:
    settings: dict[str, Any] = {**SMALL, **ADAM, "newcomers": 0.4, "lanes": None}
    stacked, alone = (
        fedfac.fit(mlp(), ten(), method=methods.build(name), stack=stack, **settings) for stack in (True, False)
    )
    found, wanted = served(stacked), one_by_one(stacked)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["accuracy"] == wanted["accuracy"]
    assert served(alone) | {"model": "by hand"} == one_by_one(alone)


def test_newcomers_with_real_targets_have_the_figures_of_a_test() -> None:
    draws = torch.Generator().manual_seed(0)
    arrays = []
    for client in range(6):
        x = torch.randn(20, 2, generator=draws)
        arrays.append((x, 2 * x[:, :1] + client))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    settings: dict[str, Any] = {**SMALL, **ADAM, "newcomers": 0.4, "loss": F.mse_loss, "stack": False}
    result = fedfac.fit(model, Federation.from_arrays(arrays), method=methods.fedper(), **settings)
    assert served(result).keys() == result.records[-1]["test"].keys() == {
        "model", "clients", "samples", "loss", "mse", "r2",
    }  # fmt: skip
    assert served(result) | {"model": "by hand"} == one_by_one(result)
    assert serve(result)["adapt"] == served(result)


def test_all_newcomers_are_served_however_few_clients_are_tested() -> None:
    result = run_ten(ten(), methods.fedper(), evaluate_clients=2)
    assert result.records[-1]["test"]["clients"] == 2
    assert served(result) == served(run_ten(ten(), methods.fedper()))


def test_newcomers_without_test_samples_are_not_served() -> None:
    result = run_ten(ten().without_test(), methods.fedper(), rounds=1)
    assert len(result.newcomers) == 4
    assert "newcomers" not in result.records[-1]


def test_a_newcomer_whose_adaptation_does_not_stay_finite_keeps_the_server_s_model() -> None:
    result = run_ten(ten(), methods.local(), rounds=1)
    calm = serve(result)["adapt"]
    wild = replace(result, local=Local(epochs=2, batch_size=8, lr=1e30, optimizer="sgd"))
    before = {n: t.clone() for n, t in result.server.items()}
    untouched = replace(result, plan=methods.fedavg().plan(Anatomy.of(small_model())))
    assert serve(wild)["adapt"] == serve(untouched)["adapt"] | {"model": "adapted"}
    assert calm["loss"] != serve(wild)["adapt"]["loss"]
    assert bitwise(result.server, before)


# --- a run that is stopped, killed, or made longer -----------------------------------------------------------------


class Killed(Watched):
    """The process dies while newcomers are served."""

    def serve(self, *given: Any) -> list[evaluate.Score]:
        self.inner.serve(*given)
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["fedfac", "fedavg"])
def test_a_run_that_is_killed_while_newcomers_are_served_serves_them_when_it_goes_on(name: str, tmp_path: Path) -> None:
    straight = run_ten(ten(), methods.build(name))
    with pytest.raises(KeyboardInterrupt):
        run_ten(ten(), methods.build(name), out=tmp_path / "run", engine=Killed)
    assert [r["round"] for r in RunDirectory.read(tmp_path / "run").records()] == [1, 2]
    resumed = run_ten(ten(), methods.build(name), out=tmp_path / "run", resume=True)
    assert resumed.records == straight.records
    again = run_ten(ten(), methods.build(name), out=tmp_path / "run", resume=True, engine=Killed)  # nothing is left
    assert again.records == straight.records


def test_newcomers_are_served_after_the_last_round_only_and_again_when_a_run_is_made_longer(tmp_path: Path) -> None:
    whole = run_ten(ten(), methods.fedper(), rounds=3)
    stopped = run_ten(ten(), methods.fedper(), out=tmp_path / "run", rounds=3, should_stop=lambda: True)
    assert "newcomers" not in stopped.records[-1]
    run_ten(ten(), methods.fedper(), out=tmp_path / "run", resume=True, rounds=2)
    longer = run_ten(ten(), methods.fedper(), out=tmp_path / "run", resume=True, rounds=3)
    assert [record["round"] for record in longer.records if "newcomers" in record] == [2, 3]
    assert longer.records[-1] == whole.records[-1]


def test_serving_needs_somebody_to_serve() -> None:
    assert "no client was kept out of training" in message(RunError, lambda: serve(fit(methods.fedavg(), rounds=1)))


# --- from a folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedfac", "fedper", "fedem", "local", "apfl", "lg-fedavg"])
def test_a_loaded_run_serves_newcomers_as_the_run_did(name: str, tmp_path: Path) -> None:
    method = methods.build(name)
    federation = ten()
    result = run_ten(federation, method, out=tmp_path / "run", rounds=2)
    loaded = fedfac.load(tmp_path / "run", small_model(seed=9), method=methods.build(name), federation=federation)
    assert list(loaded.newcomers) == list(result.newcomers) != []
    assert bitwise(references(loaded.adapt(samples())), references(result.adapt(samples())))
    x, _ = samples()
    assert bits(loaded.ensemble()(x)) == bits(result.ensemble()(x))
    assert serve(loaded) == serve(result)


def test_a_run_loaded_without_its_method_says_what_is_missing(tmp_path: Path) -> None:
    result = fit(methods.fedper(), out=tmp_path / "run")
    loaded = fedfac.load(tmp_path / "run", small_model())
    text = message(RunError, lambda: loaded.adapt(samples()))
    assert text == "the run was loaded without its method: fedfac.load(path, model, method=...)"
    x, _ = samples()
    assert bits(loaded.ensemble()(x)) == bits(result.ensemble()(x))
    assert bitwise(references(loaded.model(1)), references(result.model(1)))


def test_a_run_loaded_without_its_loss_says_what_is_missing(tmp_path: Path) -> None:
    def my_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    result = fit(methods.fedper(), out=tmp_path / "run", loss=my_loss)
    loaded = fedfac.load(tmp_path / "run", small_model(), method=methods.fedper())
    assert "loss" in message(RunError, lambda: loaded.adapt(samples()))
    again = fedfac.load(tmp_path / "run", small_model(), method=methods.fedper(), loss=my_loss)
    assert bitwise(references(again.adapt(samples())), references(result.adapt(samples())))


def test_a_fine_tuned_model_is_not_handed_out_without_its_fine_tuning(tmp_path: Path) -> None:
    federation = small_federation()
    result = fit(methods.fedavg_plus(), out=tmp_path / "run")
    whole = fedfac.load(tmp_path / "run", small_model(), method=methods.fedavg_plus(), federation=federation)
    assert bitwise(references(whole.model(2)), references(result.model(2)))
    without_data = fedfac.load(tmp_path / "run", small_model(), method=methods.fedavg_plus())
    assert "federation=" in message(RunError, lambda: without_data.model(2))
    without_method = fedfac.load(tmp_path / "run", small_model())
    assert "method=" in message(RunError, lambda: without_method.model(2))


def test_a_run_is_not_loaded_with_another_method(tmp_path: Path) -> None:
    fit(methods.fedper(), out=tmp_path / "run", rounds=1)
    with pytest.raises(fedfac.FedfacError, match="method"):
        fedfac.load(tmp_path / "run", small_model(), method=methods.fedavg())
