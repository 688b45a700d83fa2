"""How far the two solvers of factor analysis are from each other and from the limit, by κ; and their earlier names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import message
from loopback import RUN, deployment, over_the_wire
from recording import moments_of_a_run

import fedfac
from fedfac import comparison, experiment, methods
from fedfac.cli import main
from fedfac.deploy.export import export
from fedfac.engine.flower.folder import Folder
from fedfac.errors import ConfigError
from fedfac.exported import CONFIG, WEIGHTS
from fedfac.moments import Moments
from fedfac.rules import Asked, FactorRule, Memory, Threshold, with_new_names
from fedfac.run import RunDirectory
from fedfac.state import from_bytes, references, same

Matrix = npt.NDArray[np.float64]
HALF = Threshold.parse("50%")


@pytest.fixture(scope="module")
def recorded() -> list[Moments]:
    """The digits, 64 elements, twelve rounds."""
    return moments_of_a_run("cnn")


def sides(recorded: list[Moments], solver: str, kappa: float) -> Matrix:
    """The mask of the last round."""
    rule = FactorRule({"fc1": HALF}, {"fc1": kappa}, solver=solver)
    memory: Memory = {}
    for number, total in enumerate(recorded, start=1):
        made = rule.score(Asked("fc1", 64, total, seed=0, round=number, memory=memory))
        memory = made.memory
    return np.array(HALF.cut(made.values)[0])


def at_the_limit(total: Moments, kappa: float) -> Matrix:
    """The mask of the iteration that has converged, by numpy alone and from the numbers that clients sent."""
    n, mean, products = total.n, total.total.numpy() / total.n, total.products.numpy()
    covariance = products / n - np.outer(mean, mean)
    scale = np.sqrt(np.diag(covariance))
    corr = covariance / np.outer(scale, scale)
    values, vectors = np.linalg.eigh(corr)
    shares = np.maximum(values[::-1], 0).cumsum() / np.maximum(values, 0).sum()
    factors = int((shares < kappa).sum()) + 1
    nu = (vectors[:, -factors:] ** 2 * values[-factors:]).sum(1)
    for _ in range(40_000):
        before = nu
        values, vectors = np.linalg.eigh(corr - np.diag(np.clip(1 - nu, 0, 1)))
        nu = (vectors[:, -factors:] ** 2 * np.maximum(values[-factors:], 0)).sum(1)
        if np.abs(nu - before).max() < 1e-6:
            return np.asarray(nu >= np.quantile(nu, 0.5))
    raise AssertionError("the reference has not converged")


@pytest.mark.parametrize(
    ("kappa", "cold", "warm"),
    [
        (0.2, (0.96, 1), (0.96, 1)),
        (0.3, (0.96, 1), (0.96, 1)),
        (0.7, (0.7, 0.95), (0.6, 0.95)),
        (0.85, (0.5, 0.8), (0.5, 0.85)),
    ],
)
def test_both_solvers_reach_the_limit_at_a_low_kappa_and_neither_does_at_the_default(
    kappa: float, cold: tuple[float, float], warm: tuple[float, float], recorded: list[Moments]
) -> None:
    """Shares of elements on the limit's side; .5 is chance. What a solver is called must not promise more."""
    limit = at_the_limit(recorded[-1], kappa)
    masks = {solver: sides(recorded, solver, kappa) for solver in ("cold", "warm")}
    for solver, (least, most) in (("cold", cold), ("warm", warm)):
        agreement = float((masks[solver] == limit).mean())
        assert least <= agreement <= most, (solver, agreement)
    each_other = float((masks["cold"] == masks["warm"]).mean())
    assert each_other >= 0.96 if kappa <= 0.3 else each_other <= 0.95, each_other


def test_the_names_of_earlier_versions_are_answered_with_todays() -> None:
    said = message(ConfigError, lambda: methods.fedfac(solver="exact"))
    assert said == (
        "solver is 'exact', which is called 'cold' now: 'warm' goes on from the last round's communalities, 'cold' "
        "begins anew every round and is no more exact. Write solver='cold'"
    )
    assert "called 'warm' now" in message(ConfigError, lambda: methods.fedfac_plus(solver="fast"))
    assert "called 'warm' now" in message(ConfigError, lambda: FactorRule({}, {}, solver="fast"))


FLAGS = [
    "--data",
    "digits",
    "--clients",
    "12",
    "--method",
    "fedfac",
    "--layers",
    "fc1",
    "--cohort",
    "4",
    "--epochs",
    "1",
]


@pytest.mark.parametrize(("then", "now"), [("exact", "cold"), ("fast", "warm")])
def test_a_run_of_an_earlier_version_is_resumed_and_loaded(then: str, now: str, tmp_path: Path) -> None:
    """Its config.json has the old name in two places; nothing of the run is lost."""
    out = tmp_path / "run"
    assert main(["run", *FLAGS, "--solver", now, "--rounds", "3", "--out", str(tmp_path / "straight")]) == 0
    assert main(["run", *FLAGS, "--solver", now, "--rounds", "2", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["method"]["solver"] == config["origin"]["method"]["solver"] == now
    config["settings"]["method"]["solver"] = config["origin"]["method"]["solver"] = then
    (out / "config.json").write_text(json.dumps(config))
    loaded = fedfac.load(out)
    assert loaded.plan is not None
    assert experiment.config_of(out).method_options["solver"] == now
    assert main(["resume", str(out), "--rounds", "3"]) == 0
    saved, straight = RunDirectory.read(out), RunDirectory.read(tmp_path / "straight")
    assert saved.records() == straight.records()
    ours, theirs = saved.checkpoint(), straight.checkpoint()
    assert ours is not None
    assert theirs is not None
    assert same(ours.server, theirs.server)


def test_a_model_of_an_earlier_version_is_exported_and_loaded(tmp_path: Path) -> None:
    """A node's folder and an exported model remember how the method was asked for."""
    over_the_wire(deployment("fedfac", method__solver="cold", train__rounds=1), tmp_path)
    folder = Folder(tmp_path / "1", RUN, "1")
    found = folder.model()
    assert found is not None
    about, server = found
    assert about["run"]["method.solver"] == "cold"
    folder.set_model({**about, "run": {**about["run"], "method.solver": "exact"}}, server)
    export(tmp_path / "1", tmp_path / "model")
    path = tmp_path / "model" / CONFIG
    config = json.loads(path.read_text())
    assert config["method"]["solver"] == "cold"
    config["method"]["solver"] = "exact"
    path.write_text(json.dumps(config))
    assert same(
        references(fedfac.load(tmp_path / "model").model("1")), from_bytes((path.parent / WEIGHTS).read_bytes())
    )


def test_a_comparison_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    tables = {"data": {"clients": 8}, "train": {"rounds": 1}, "method": {"solver": "cold"}}
    asked: dict[str, Any] = {"methods": ["fedavg", "fedfac"], "tables": tables, "seeds": [0]}
    planned = comparison.plan(tmp_path / "grid", **asked)
    path = tmp_path / "grid" / comparison.PLAN
    path.write_text(path.read_text().replace('"cold"', '"exact"'))
    assert '"exact"' in path.read_text()
    assert comparison.load(tmp_path / "grid").cells == planned.cells
    assert comparison.plan(tmp_path / "grid", **asked).cells == planned.cells


def test_names_are_replaced_where_a_solver_is_named_and_nowhere_else() -> None:
    found = {"method": {"solver": "fast", "name": "exact"}, "data": {"name": "fast"}, "solver": ["fast"]}
    assert with_new_names(found) == {**found, "method": {"solver": "warm", "name": "exact"}}
