"""Attacks on a run in process: a cohort that is one client, and sums that would be its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise, message
from torch import nn

import fedfac
from fedfac import methods
from fedfac.aggregate import Sums, aggregate
from fedfac.anatomy import Anatomy
from fedfac.cli import main
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.data.federation import Federation
from fedfac.engine.protocol import Engine
from fedfac.errors import ConfigError, TrainingError, UnsoundSumsError
from fedfac.method import Method
from fedfac.moments import Additive, Moments
from fedfac.rules import Rule
from fedfac.run import RunDirectory
from fedfac.split import Split
from fedfac.state import references
from fedfac.switches import Average, Decay, Joint, ServerMomentum, Warmup

HOW: dict[str, Any] = {"epochs": 1, "batch_size": 8, "lanes": 1, "device": "cpu", "evaluate_every": 1}
ALONE = "the sums of one client, with its shared weights, give all its personal weights"


def fit(method: Method, **more: Any) -> fedfac.Result:
    return fedfac.fit(small_model(), small_federation(), method=method, **HOW | {"rounds": 2} | more)


# --- a cohort of one -------------------------------------------------------------------------------------------------


def test_why_the_sums_of_one_client_and_its_shared_rows_are_its_personal_rows() -> None:
    """The attack: G = ZZᵀ and the shared rows Z_s, least squares, and there is Z_p."""
    seen: list[Watched] = []

    def watch(engine: Engine) -> Engine:
        seen.append(Watched(engine))
        return seen[-1]

    draws = torch.Generator().manual_seed(0)
    clients = [(torch.randn(40, 6, generator=draws), torch.arange(40) % 3) for _ in range(4)]
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    method = methods.fedfac(layers=[1], tau="50%")
    federation = Federation.from_arrays(clients)
    result = fedfac.fit(model, federation, method=method, rounds=1, cohort=1, cohort_of_one=True, engine=watch, **HOW)
    (client,) = result.records[0]["cohort"]
    moments = seen[0].moments_seen[0]["0"]
    split, sums = seen[0].sums[0]
    assert isinstance(moments, Moments)
    shared = torch.tensor(split.masks["0"])
    sent = {name: value / sums.weight for name, value in sums.values.items()}
    rows = torch.cat([sent["0.weight"].reshape(-1, 6), sent["0.bias"].reshape(-1, 1)], 1)
    products = moments.products
    vectors = Anatomy.of(model).layers[0].vectors(result.state(client)).double()
    basis = rows[:, : vectors.shape[1]]
    found = torch.linalg.lstsq(basis, products[shared][:, ~shared]).solution.T
    assert torch.linalg.matrix_rank(basis) == vectors.shape[1]
    torch.testing.assert_close(found, vectors[~shared], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (methods.fedfac(layers=[1]), {"cohort": 1}),
        (methods.fedfac(layers=[1], schedule="static"), {"cohort": 1}),
        (methods.fedfac(layers=[1]) | Warmup(1), {"cohort": 1}),
        (methods.fedfac(layers=[1]), {"rate": 0.2}),
        (methods.fedfac(layers=[1]), {"newcomers": 0.8}),
        (methods.fedfac(layers=[1]), {"federation": small_federation(clients=1)}),
        (methods.fedfac(layers=[1], schedule="static", probe_all=True), {"federation": small_federation(clients=1)}),
        (methods.build("variance", {"layers": [1]}), {"cohort": 1}),
    ],
)
def test_one_client_is_not_measured_alone_unless_asked_for(
    tmp_path: Path, method: Method, settings: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {"federation": small_federation(), "rounds": 2, **HOW, **settings}
    out = tmp_path / "run"
    text = message(ConfigError, lambda: fedfac.fit(small_model(), method=method, out=out, **arguments))
    assert "a cohort of one client was asked for" in text
    assert ALONE in text
    assert "cohort_of_one=True, --cohort-of-one" in text
    assert not out.exists()
    assert fedfac.fit(small_model(), method=method, cohort_of_one=True, **arguments).finished


@pytest.mark.parametrize(
    "method",
    [
        methods.fedavg(),
        methods.fedper(),
        methods.build("fedfac-plus", {"layers": [1]}),  # its elements are trained by all
        methods.fedfac(layers=[1], tau=0),  # all shared
        methods.build("random", {"layers": [1]}),  # nothing is measured
        methods.fedfac(layers=[1], schedule="static", probe_all=True),  # all clients are measured
    ],
)
def test_where_there_is_nothing_to_find_out_one_client_may_train(method: Method) -> None:
    assert fit(method, rounds=1, cohort=1).finished


def test_a_cohort_that_shrinks_to_one_client_is_not_measured(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    clients = []
    for client in range(3):
        x = torch.randn(12, 3, generator=draws) * (1e38 if client else 1.0)
        clients.append((x, torch.arange(12) % 2))
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    how: dict[str, Any] = {**HOW, "rounds": 2, "optimizer": "sgd", "lr": 0.1}
    federation = Federation.from_arrays(clients)
    result = fedfac.fit(model, federation, method=methods.fedfac(layers=[1]), out=tmp_path / "run", **how)
    for record in result.records:
        assert record["left_out"].keys() == {"1", "2"}
        assert record["skipped"].startswith(f"only client 0 of the cohort is left, and {ALONE}")
    assert bitwise(result.server, references(model))
    static = methods.fedfac(layers=[1], schedule="static")
    text = message(TrainingError, lambda: fedfac.fit(model, federation, method=static, **how))
    assert "the one decision before the first round cannot be made: only client 0" in text


def test_the_command_line_refuses_and_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["run", "--clients", "6", "--rounds", "1", "--epochs", "1", "--cohort", "1", "--out", "r", "--quiet"]
    assert main(command) == 1
    assert ALONE in capsys.readouterr().err
    assert not Path("r").exists()
    assert main([*command, "--cohort-of-one"]) == 0
    assert main(["resume", "r", "--rounds", "2", "--quiet"]) == 0


# --- sums that are not numbers ---------------------------------------------------------------------------------------


class Poisoned(Watched):
    """An engine whose sums are spoiled in some rounds."""

    def __init__(self, inner: Engine, spoil: Callable[[Sums], Sums], rounds: Sequence[int]) -> None:
        super().__init__(inner)
        self.spoil, self.rounds = spoil, rounds
        self.measure: Callable[[Additive], Additive] = lambda value: value

    def collect(self, split: Split) -> Sums:
        sums = super().collect(split)
        return self.spoil(sums) if len(self.outcomes) in self.rounds else sums

    def moments(self, rule: Rule) -> dict[str, Additive]:
        found = super().moments(rule)
        spoilt = {layer: self.measure(value) for layer, value in found.items()}
        return spoilt if len(self.outcomes) in self.rounds else found


def one_number(value: float, name: str = "7.weight") -> Callable[[Sums], Sums]:
    def spoil(sums: Sums) -> Sums:
        tensor = sums.values[name].clone().double()
        tensor.reshape(-1)[0] = value
        return replace(sums, values={**sums.values, name: tensor})

    return spoil


SPOILT: dict[str, Callable[[Sums], Sums]] = {
    "1e300": one_number(1e300),
    "1e39 times the samples": lambda sums: one_number(-1e39 * sums.weight)(sums),
    "infinite": one_number(float("inf")),
    "NaN": one_number(float("nan")),
    "of nobody": lambda sums: replace(sums, weight=0.0),
    "of a negative number": lambda sums: replace(sums, weight=-5.0),
    "a counter beyond 64 bits": one_number(1e30, "1.num_batches_tracked"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_an_aggregate_that_is_not_fine_is_not_taken(tmp_path: Path, what: str) -> None:
    method = methods.fedavg() | ServerMomentum(0.5) | Average(0.5)

    def poison(engine: Engine) -> Engine:
        return Poisoned(engine, SPOILT[what], [2])

    out = tmp_path / "run"
    result = fit(method, rounds=3, engine=poison, out=out)
    assert ["skipped" in record for record in result.records] == [False, True, False]
    words = "the sum of the clients' weights" if what.startswith("of ") else "is not finite, or out of the range"
    assert words in result.records[1]["skipped"]
    assert "test" not in result.records[1]
    assert all(bool(torch.isfinite(t).all()) for t in result.server.values())
    saved = RunDirectory.read(out).checkpoint()
    assert saved is not None
    assert all(bool(torch.isfinite(t).all()) for t in {**saved.shown, **saved.velocity}.values())
    # the state before stays: round 3 begins where round 1 ended
    one = fit(method, rounds=1, out=tmp_path / "one")
    two = fit(method, rounds=2, out=tmp_path / "two", engine=poison)
    assert bitwise(one.server, two.server)
    again = fit(method, rounds=4, out=out, resume=True)
    assert "skipped" not in again.records[3]
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))


def test_a_poisoned_round_changes_no_personal_state_no_mask_and_no_memory(tmp_path: Path) -> None:
    method = methods.fedfac(layers=[1]) | Decay(0.5)
    one = fit(method, rounds=1, out=tmp_path / "one")
    two = fit(method, rounds=2, out=tmp_path / "two", engine=lambda e: Poisoned(e, one_number(1e300), [2]))
    assert "skipped" in two.records[1]
    assert "7.weight" in two.records[1]["skipped"]
    assert one.masks[1] == two.masks[2]
    for client in range(5):
        assert bitwise(one.state(client), two.state(client))
    memories = [RunDirectory.read(tmp_path / name).checkpoint() for name in ("one", "two")]
    assert memories[0] is not None
    assert memories[1] is not None
    assert bitwise(memories[0].memory, memories[1].memory)


@pytest.mark.parametrize("value", [1e300, float("nan"), float("inf")])
def test_moments_that_are_not_fine_decide_nothing(value: float) -> None:
    def spoil(found: Additive) -> Additive:
        assert isinstance(found, Moments)
        return replace(found, total=torch.full_like(found.total, value))

    def poison(engine: Engine) -> Engine:
        made = Poisoned(engine, lambda sums: sums, [2])
        made.measure = spoil
        return made

    result = fit(methods.fedfac(layers=[1]), rounds=3, engine=poison)
    assert ["skipped" in record for record in result.records] == [False, True, False]
    assert "what clients measured on layer '0'" in result.records[1]["skipped"]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_one_decision_after_a_warm_up_is_made_although_its_round_is_skipped(
    measured: bool, joint: bool, tmp_path: Path
) -> None:
    """It stands where the sums were wrong; where the moments were, it is made in the next round."""

    def poison(engine: Engine) -> Engine:
        made = Poisoned(engine, lambda sums: sums if measured else replace(sums, weight=float("nan")), [2])
        if measured:
            made.measure = nobody
        return made

    def nobody(found: Additive) -> Additive:
        assert isinstance(found, Moments)
        return replace(found, n=0)

    method = methods.fedfac(layers=[1], schedule="static") | Warmup(1) | Joint(joint) | Average(0.5)
    result = fit(method, rounds=4, out=tmp_path / "run", engine=poison)
    assert ["skipped" in record for record in result.records] == [False, True, False, False]
    assert [r["round"] for r in result.records if "tau" in r["split"].get("0", {})] == [3 if measured else 2]
    assert sum(result.masks[4]["0"]) == len(result.masks[4]["0"]) // 2
    assert result.masks[3] == result.masks[4]
    fit(method, rounds=2, out=tmp_path / "in two", engine=poison)
    resumed = fit(method, rounds=4, out=tmp_path / "in two", resume=True)
    assert resumed.masks == result.masks
    assert bitwise(resumed.server, result.server)


def test_a_step_of_the_server_that_overflows_is_not_taken() -> None:
    split = Split({"w": (1,)})
    sums = Sums({"w": torch.tensor([3e38], dtype=torch.float64)}, 1.0)
    fine = aggregate({"w": torch.zeros(1)}, sums, split, before=split, rate=1.0)
    assert torch.isfinite(fine["w"]).all()
    with pytest.raises(UnsoundSumsError, match="the aggregate of w is not finite, or out of the range of its type"):
        aggregate({"w": torch.zeros(1)}, sums, split, before=split, rate=2.0)
    far: list[float] = [1e38, 3.3e38]  # each is a number; a step that goes on half as far again is none

    def push(sums: Sums) -> Sums:
        tensor = torch.full_like(sums.values["7.bias"], far.pop(0) if far else 0.0) * sums.weight
        return replace(sums, values={**sums.values, "7.bias": tensor})

    result = fit(methods.fedavg() | ServerMomentum(0.9), rounds=2, engine=lambda e: Poisoned(e, push, [1, 2]))
    assert "skipped" not in result.records[0]
    assert "after its step with momentum of 7.bias" in result.records[1]["skipped"]
    assert torch.isfinite(result.server["7.bias"]).all()


def test_methods_that_train_as_one_skip_together() -> None:
    from fedfac.rounds import Session
    from fedfac.settings import Settings
    from fedfac.training import Local

    def poison(engine: Engine) -> Engine:
        return Poisoned(engine, one_number(1e300), [2])

    def session(method: Method, **more: Any) -> Session:
        settings = Settings(rounds=3, seed=0, device="cpu", lanes=1, **more)
        return Session(small_model(), small_federation(), method, Local(epochs=1, batch_size=8), settings)

    with session(methods.fedavg(), engine=poison) as first, session(methods.fedavg_plus()) as second:
        for _ in range(3):
            first.step()
            second.step(like=first)
    assert [["skipped" in r for r in s.records] for s in (first, second)] == [[False, True, False]] * 2
    assert bitwise(first.server, second.server)
