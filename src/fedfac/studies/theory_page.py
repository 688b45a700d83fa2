"""The study of the theory in words: every number and every verdict comes from the rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scipy.stats import spearmanr

from fedfac.studies.frame import Row, markdown

if TYPE_CHECKING:
    from fedfac.studies.theory import Scale

Tables = Mapping[str, Sequence[Row]]


def broken(rows: Sequence[Row]) -> int:
    """In how many rounds the error is above the bound (beyond rounding)."""
    return sum(row["error"] > row["bound"] * (1 + 1e-9) for row in rows)


def rounds_to(rows: Sequence[Row], share: float) -> int | None:
    """The first round with at most this share of the starting error."""
    return next((row["round"] for row in rows if row["error"] <= share * rows[0]["error"]), None)


def rank(rows: Sequence[Row], one: str, other: str) -> float:
    """Spearman's rank correlation of two columns."""
    return float(spearmanr([row[one] for row in rows], [row[other] for row in rows]).statistic)


def _means(rows: Sequence[Row], by: Sequence[str], columns: Sequence[str]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    return [
        dict(zip(by, key, strict=True)) | {c: statistics.fmean(row[c] for row in own) for c in columns}
        for key, own in groups.items()
    ]


def _networks(tables: Tables) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in tables["convergence"]:
        found.setdefault(row["network"], []).append(row)
    return found


def summary(tables: Tables) -> dict[str, Any]:
    """What the conclusions rest on."""
    networks, effects, found = _networks(tables), tables["effects"], tables["generalisation"]
    fixed = [row for row in found if row["varied"] == "clients" and row["noise"] == 0]
    return {
        "rounds_above_the_bound": {name: broken(rows) for name, rows in networks.items()},
        "rounds_to_a_thousandth": {name: rounds_to(rows, 1e-3) for name, rows in networks.items()},
        "rounds_to_halve_by_the_theorem": networks["FedSplit"][0]["theorem_rounds"],
        "lambda_p_at_least_lambda_s": all(row["lambda_p"] >= row["lambda_s"] - 1e-12 for row in effects),
        "smallest_complexity": min(row["complexity"] for row in found),
        "rank_of_test_error": {c: rank(found, c, "fedsplit_test") for c in ("complexity", "without_c")},
        "test_error_by_clients": {
            row["clients"]: {"FedSplit": row["fedsplit_test"], "FedAvg": row["fedavg_test"]}
            for row in _means(fixed, ["clients"], ["fedsplit_test", "fedavg_test"])
        },
    }


def _convergence_table(networks: Mapping[str, Sequence[Row]]) -> str:
    rows = []
    for name, own in networks.items():
        middle = own[len(own) // 5]
        rows.append(
            {
                "network": name,
                "bound": 1 - (own[1]["bound"] / own[0]["bound"]),
                "measured": 1 - (middle["error"] / own[0]["error"]) ** (1 / middle["round"]),
                "rounds": rounds_to(own, 1e-3),
                "error": f"{middle['error']:.2e}",
                "prediction": f"{middle['prediction']:.2e}",
                "above": broken(own),
                "drift": own[-1]["drift_shared"],
            }
        )
    half = networks["FedSplit"][len(networks["FedSplit"]) // 5]["round"]
    titles = {
        "network": "network",
        "bound": "bound: progress a round",
        "measured": f"measured, first {half} rounds",
        "rounds": "rounds to 1/1000",
        "error": f"error at {half}",
        "prediction": "kernel limit",
        "above": "rounds above the bound",
        "drift": "shared kernel moved",
    }
    return markdown(rows, titles)


def _effects_table(effects: Sequence[Row], varied: str, title: str) -> str:
    columns = ["lambda_s", "lambda_p", "fedsplit_bound", "fedsplit_measured", "fedavg_bound", "fedavg_measured"]
    more = ["start_shared", "drift_shared"]
    rows = _means([row for row in effects if row["varied"] == varied], [varied], columns + more)
    titles = {
        varied: title,
        "lambda_s": "λ^s",
        "lambda_p": "λ^p",
        "fedsplit_bound": "FedSplit: bound",
        "fedsplit_measured": "measured",
        "fedavg_bound": "FedAvg: bound",
        "fedavg_measured": "measured",
        "start_shared": "H^s from its limit",
        "drift_shared": "moved",
    }
    return markdown(rows, titles, ".4f")


def _general_table(found: Sequence[Row]) -> str:
    columns = [
        "complexity",
        "without_c",
        "fedsplit_test",
        "fedavg_test",
        "zero_error",
        "fedsplit_train",
        "fedavg_train",
    ]
    rows = _means(found, ["clients", "samples", "noise"], columns)
    titles = {
        "clients": "C",
        "samples": "n",
        "noise": "random responses",
        "complexity": "Theorem 2",
        "without_c": "over C",
        "fedsplit_test": "FedSplit: test",
        "fedavg_test": "FedAvg: test",
        "zero_error": "always 0",
        "fedsplit_train": "FedSplit: train",
        "fedavg_train": "FedAvg: train",
    }
    return markdown(rows, titles)


def _trend(rows: Sequence[Row], by: str, column: str) -> str:
    """What the mean of a column does from the smallest to the largest value of another."""
    means = sorted(_means(rows, [by], [column]), key=lambda row: row[by])
    low, high = means[0], means[-1]
    word = "rises" if high[column] > low[column] else "falls"
    return f"{word} from {low[column]:.3f} ({low[by]}) to {high[column]:.3f} ({high[by]})"


def page(tables: Tables, scale: Scale, seeds: Sequence[int]) -> str:
    """The page."""
    said = summary(tables)
    networks = _networks(tables)
    found = tables["generalisation"]
    plain = [row for row in found if row["noise"] == 0]
    fixed = [row for row in plain if row["varied"] == "clients"]
    growing = [row for row in plain if row["varied"] == "samples"]
    wide, many = ([row for row in tables["effects"] if row["varied"] == name] for name in ("width", "clients"))
    ranks = said["rank_of_test_error"]
    above = said["rounds_above_the_bound"]
    first = {
        name: f"not in {scale.rounds} rounds" if v is None else f"{v} rounds"
        for name, v in said["rounds_to_a_thousandth"].items()
    }
    better = [c for c, row in said["test_error_by_clients"].items() if row["FedSplit"] < row["FedAvg"]]
    return f"""\
# Theory: the theorems beside what happens (paper 3.3)

Two-layer ReLU networks, inputs on the unit sphere of dimension {scale.inputs}, responses linear in x with half of their
variance common to all clients; parallel gradient descent with {scale.local_steps} local steps, in double precision.
The same step size for all networks, η_l = 1/(G(λ_max(H^s)/C + λ_max(H^p))), η_g = 1. Where a figure is a mean, it is
over seeds {", ".join(map(str, seeds))}.

## Theorem 1: convergence

C = {scale.clients}, n = {scale.samples}, {scale.wide} neurons in each part of model (4).

![Training error, its bound, and the kernels' drift](convergence.png)

{_convergence_table(networks)}

- FedSplit's error is above its bound in {above["FedSplit"]} of {scale.rounds} rounds, FedAvg's in {above["FedAvg"]}.
  The bound counts on the smallest eigenvalues only; the linear dynamics with the whole infinite-width kernels,
  I − ρ₁H^s − ρ₂H^p, come much closer (dashed; the column *kernel limit*).
- *"FedSplit enjoys faster convergence rate than FedAvg."* To a thousandth of the starting error: FedSplit
  {first["FedSplit"]}, FedAvg {first["FedAvg"]}. But model (4) adds *two* normalised networks. The same two networks,
  all shared: {first["FedAvg, two networks"]}. That much of the gain is size; the rest is that ρ₂ is C times ρ₁: a
  client's own update is not divided by the number of clients.
- The theorem's step size. With η_l = (λ^s + λ^p)/(γ^sγ^pGN²) the bound promises to halve the error in
  {said["rounds_to_halve_by_the_theorem"]:.1e} rounds. All training here uses a step that is far larger than that,
  which the theorem does not cover.
- It is a statement about the *training* error.

## What C, n and m change

![Eigenvalues, kernels and rates by C, n and m](effects.png)

{_effects_table(tables["effects"], "clients", "C")}

{_effects_table(tables["effects"], "samples", "n")}

{_effects_table(tables["effects"], "width", "m")}

(*bound*, *measured*: one minus the factor by which the squared error shrinks in a round, over {scale.effect_rounds}
rounds.)

- λ^p ≥ λ^s {"in every one of" if said["lambda_p_at_least_lambda_s"] else "NOT in all of"} the
  {len(tables["effects"])} problems, as the paper says.
- Width: the distance of H^s at the start from its limit {_trend(wide, "width", "start_shared")}, and how far it moves
  {_trend(wide, "width", "drift_shared")}. The theorem asks for a width of the order N⁴/λ⁴.
- With more clients FedAvg's progress in a round {_trend(many, "clients", "fedavg_measured")}, FedSplit's
  {_trend(many, "clients", "fedsplit_measured")}.

## Theorem 2: generalisation

Start MN(0, {scale.start:g}² I), {scale.rounds} rounds, {scale.width} neurons in each part. The loss is min(|h − y|, 1).

![Test error and complexity](generalisation.png)

{_general_table(found)}

- The term 2√((C/n) yᵀ(H^s + H^p)⁻¹y) is at least {said["smallest_complexity"]:.2f} in all {len(found)} problems: for a
  loss of at most 1 a bound above 1 says nothing. Its factor is C/n = C²/N; without the C² (*over C*) it would be, up
  to a constant, the measure of Arora et al. (2019) for N samples.
- *"Increasing the number of clients C or decreasing the number of local samples n would lead to larger generalization
  error."* With N = {scale.total} fixed and more and smaller clients, FedSplit's test error
  {_trend(fixed, "clients", "fedsplit_test")}, FedAvg's {_trend(fixed, "clients", "fedavg_test")}. With
  {scale.clients} clients and more samples, FedSplit's {_trend(growing, "samples", "fedsplit_test")}.
- Over all problems the rank correlation of FedSplit's test error with the term is {ranks["complexity"]:+.2f}, and
  {ranks["without_c"]:+.2f} with the term over C.
- FedSplit's test error is below FedAvg's for {", ".join(f"C = {c}" for c in better) if better else "no C"} of
  {", ".join(str(c) for c in said["test_error_by_clients"])} (N fixed, no random responses).
"""
