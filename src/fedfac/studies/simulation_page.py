"""The simulation study in words: every sentence's numbers come from the rows, and so does its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfac.studies.frame import Row, markdown

if TYPE_CHECKING:
    from fedfac.studies.simulation import Scale

Tables = Mapping[str, Sequence[Row]]
LAST = "accuracy after the last round"


def final(rows: Sequence[Row]) -> list[Row]:
    """The last point of every curve."""
    end = max(row["round"] for row in rows)
    return [row for row in rows if row["round"] == end]


def differences(curves: Sequence[Row], method: str, other: str = "true") -> list[float]:
    """Final accuracy of a method minus that of another, for every setting and seed."""
    ends = {(r["p"], r["alpha"], r["seed"], r["method"]): r["accuracy"] for r in final(curves) if r["balanced"]}
    return [value - ends[(*key, other)] for (*key, name), value in ends.items() if name == method]


def paired(curves: Sequence[Row], method: str, other: str = "true") -> tuple[float, float]:
    """The mean of those differences and its standard error (0 where there is one only)."""
    values = differences(curves, method, other)
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def mean_auc(recovery: Sequence[Row], weights: str, estimator: str = "principal-axis", kappa: float = 0.85) -> float:
    """Over settings and seeds."""
    want = (weights, estimator, kappa, True)
    own = [r["auc"] for r in recovery if (r["weights"], r["estimator"], r["kappa"], r["balanced"]) == want]
    return statistics.fmean(own)


def mean_start(recovery: Sequence[Row], weights: str) -> float:
    """Rank correlation of ν with ν of the untrained start, over settings and seeds."""
    return statistics.fmean(r["start"] for r in recovery if r["weights"] == weights and r["balanced"])


def last_kept(kept: Sequence[Row], method: str) -> float:
    """The share of neurons that keep their side, mean over the last fifth of the rounds."""
    end = max(row["round"] for row in kept)
    return statistics.fmean(
        r["kept"] for r in kept if r["method"] == method and r["balanced"] and r["round"] > 0.8 * end
    )


def summary(tables: Tables) -> dict[str, Any]:
    """What the conclusions rest on."""
    curves, recovery = tables["curves"], tables["recovery"]
    names = list(dict.fromkeys(row["method"] for row in curves))
    trained = [w for w in dict.fromkeys(r["weights"] for r in recovery) if w != "true parameters"]
    return {
        "accuracy": {
            name: statistics.fmean(r["accuracy"] for r in final(curves) if r["balanced"] and r["method"] == name)
            for name in names
        },
        "minus_true": {name: paired(curves, name)[0] for name in names},
        "auc": {where: mean_auc(recovery, where) for where in ["true parameters", *trained]},
        "like_the_start": {where: mean_start(recovery, where) for where in trained},
        "kept": {name: last_kept(tables["kept"], name) for name in ("fedfac", "random-redrawn")},
    }


def _accuracy_table(curves: Sequence[Row]) -> str:
    ends = [row for row in final(curves) if row["balanced"]]
    settings = sorted({(row["p"], row["alpha"]) for row in ends})
    rows = []
    for name in dict.fromkeys(row["method"] for row in ends):
        row: dict[str, Any] = {"method": name}
        for p, alpha in settings:
            values = [r["accuracy"] for r in ends if (r["p"], r["alpha"], r["method"]) == (p, alpha, name)]
            row[f"p = {p}, α = {alpha}"] = statistics.fmean(values)
        mean, error = paired(curves, name)
        row["minus true"] = f"{mean:+.3f} ± {error:.3f}"
        rows.append(row)
    return markdown(rows)


def _label_table(labels: Sequence[Row]) -> str:
    rows = []
    for p, alpha in dict.fromkeys((row["p"], row["alpha"]) for row in labels):
        own = {
            balanced: [r["majority"] for r in labels if (r["p"], r["alpha"], r["balanced"]) == (p, alpha, balanced)]
            for balanced in (False, True)
        }
        rows.append(
            {
                "p": f"{p:g}",
                "alpha": f"{alpha:g}",
                "median": statistics.median(own[False]),
                "share": f"{sum(v > 0.95 for v in own[False])} of {len(own[False])}",
                "balanced": statistics.median(own[True]),
            }
        )
    titles = {
        "p": "p",
        "alpha": "α",
        "median": "as written: median",
        "share": "as written: draws above .95",
        "balanced": "balanced a: median",
    }
    return markdown(rows, titles)


def _oracle_table(recovery: Sequence[Row]) -> str:
    true = [row for row in recovery if row["weights"] == "true parameters"]
    rows = [
        {"estimator": e}
        | {f"κ = {k}": mean_auc(true, "true parameters", e, k) for k in sorted({r["kappa"] for r in true})}
        for e in dict.fromkeys(row["estimator"] for row in true)
    ]
    return markdown(rows)


def verdict(mean: float, error: float, *, margin: float = 0.01) -> str:
    """A difference in words; within the margin, or within two standard errors, it is none."""
    if abs(mean) <= max(margin, 2 * error):
        return "no different from"
    return "better than" if mean > 0 else "worse than"


def page(tables: Tables, scale: Scale, seeds: Sequence[int]) -> str:
    """The page."""
    curves, recovery = tables["curves"], tables["recovery"]
    said = {
        name: (*paired(curves, name), verdict(*paired(curves, name)))
        for name in dict.fromkeys(r["method"] for r in curves)
    }

    def against(name: str) -> str:
        mean, error, words = said[name]
        return f"{words} the true one ({mean:+.3f} ± {error:.3f})"

    literal = {r["method"]: r["accuracy"] for r in final(curves) if not r["balanced"]}
    found = summary(tables)
    aucs, start, kept = found["auc"], found["like_the_start"], found["kept"]
    trained_local = paired(curves, "true", "local")
    return f"""\
# Simulation: does factor analysis find the true decomposition? (paper 4.3)

{scale.clients} clients, d = {scale.inputs} covariates, m = {scale.hidden} hidden neurons, a share p of them shared; a
share α of the covariates has the same distribution on all clients. One MLP with {scale.hidden} hidden neurons, split
in eight ways from the same start, with the same cohorts. Test accuracy, seeds {", ".join(map(str, seeds))}:

![Test accuracy by round](accuracy.png)

After the last round; *minus true* is the difference from the true split, mean and standard error over settings and
seeds:

{_accuracy_table(curves)}

## What came out, and what the paper says

- *"The first four decomposition methods can generate nearly identical results."* The oracle is {against("oracle")},
  static FedFac {against("fedfac-static")}, dynamic FedFac {against("fedfac")}.
- *"The random decomposition is much inferior."* That depends on which one. Redrawn every round it is
  {against("random-redrawn")}; drawn once and then fixed it is {against("random")}.
- **Why a fixed random split must do as well.** The network starts from random weights that know nothing of the true
  neurons' numbers: renumbering the hidden neurons leaves the distribution of the start, and of everything after it,
  as it was. So the true mask, the oracle's and a random one of the same size give the same distribution of results:
  what helps is the *size* of the personal part, and that it stays the same. Equal curves say nothing about recovery.
- **Recovery, measured** as the AUC of ν for the true shared set (0.5 is chance). Of the *true* parameters:
  {aucs["true parameters"]:.2f}. Of trained weights: {aucs["before round 1 (static)"]:.2f} where static FedFac decides,
  {aucs["last round (dynamic)"]:.2f} in the last round of dynamic FedFac, for the reason above;
  {aucs["trained under the true split"]:.2f} of weights that were trained under the true split itself.
- **What trained weights do tell** is the start that all clients share: the rank correlation of ν with ν of the
  untrained network is {start["before round 1 (static)"]:.2f} where static FedFac decides and
  {start["last round (dynamic)"]:.2f} in the last round of dynamic FedFac. To that extent FedFac's split is itself a
  random one, drawn by the initialisation.
- *"Nearly all neurons will reach their final stable states."* In the last fifth of the rounds {kept["fedfac"]:.3f} of
  the neurons keep their side from round to round with dynamic FedFac, {kept["random-redrawn"]:.3f} with a redrawn
  random split. A split that hardly moves is as good as a fixed one; the memory of the start is one reason why it
  hardly moves.
- The true split minus local training is {trained_local[0]:+.3f} ± {trained_local[1]:.3f}: {verdict(*trained_local)}
  training alone, in this simulation. The paper does not show local training here.

![Share of neurons that keep their side](kept.png)

![AUC of ν for the true shared set](recovery.png)

AUC for the true parameters by estimator and κ, mean over settings and seeds:

{_oracle_table(recovery)}

## What the paper leaves open, and what was chosen

- Samples: {scale.samples} for training and {scale.samples} for testing on each client. Noise: c = {scale.noise:g} (the
  response has a standard deviation of tens to hundreds). Rounds: {scale.rounds}, with {scale.rate:.0%} of the clients
  in each; {scale.epochs} local epochs, batches of {scale.batch_size}, Adam at 1e-3; cross-entropy of two outputs.
  κ = 0.85; τ makes the share 1 − p of the neurons personal, for FedFac, oracle and random alike.
- **The labels.** As it is written the generator gives nearly constant labels most of the time: covariates and personal
  weights have the same mean μ_c, so the response is near (Σ a_q)·‖μ_c‖² on *every* client. The share of a client's
  most frequent label, over ten draws of the world:

{_label_table(tables["labels"])}

  Everything above therefore draws **a** from MN(0, I) given that the personal a_q sum to 0, a special case of the
  paper's model. As written, one seed, p = 0.5, α = 0.4: {", ".join(f"{n} {a:.3f}" for n, a in literal.items())}.
"""
