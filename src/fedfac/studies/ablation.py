"""Ablation (paper 5.5): what personal and shared elements are each worth, and what factor analysis is worth.

Panel A. A group of elements of the layers in Λ, the shared or the personal half (τ = 50 %), is replaced by random
values: those that the layer would have if the network had been initialised from another seed. The paper masks "when
updating the local models", which can be read in two ways, and both are here: *after training*, the models are masked
and tested as they are; *every round*, the group is masked whenever a client begins its local training, so that it
never holds more than one round has taught it. Convolutions and fully connected layers are masked, each in a run of
its own. After training, a random half of the layer stands beside the two groups: what any half is worth.

Panel B. The same network, clients and cohorts with the split made by factor analysis (dynamic and static) and at
random: drawn once, or again every round, which are very different things (the paper does not say which one it took).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfac import evaluate, experiment, methods
from fedfac.anatomy import Anatomy
from fedfac.config import Config
from fedfac.errors import ConfigError
from fedfac.method import Begin, Plan
from fedfac.result import Result
from fedfac.rounds import Session
from fedfac.seeds import stream
from fedfac.split import Split
from fedfac.state import State, copy_into, load_state, references, state_of
from fedfac.studies import figures
from fedfac.studies.frame import Ask, Finding, Row, markdown
from fedfac.studies.training import config, dirichlet, in_words, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = ("conv2", "fc1")
GROUPS = ("nothing", "shared", "personal", "random half")
TRAINED = ("shared", "personal")
MASKS = (*GROUPS, *(f"{group}, every round" for group in TRAINED))
SPLITS = ("fedfac", "fedfac-static", "random", "random-redrawn")
NAMES = {
    "fedfac": "factor analysis, every round",
    "fedfac-static": "factor analysis, once",
    "random": "random, once",
    "random-redrawn": "random, every round",
}


def study(ask: Ask) -> Finding:
    """Both panels, over levels of heterogeneity."""
    levels = dirichlet(0.1, 1.0) if ask.quick else dirichlet(0.1, 0.5, 1.0)
    layers = LAYERS[1:] if ask.quick else LAYERS
    seeds = ask.seed_list(1 if ask.quick else 3)
    draws = 1 if ask.quick else 3
    panel_a: list[Row] = []
    panel_b: list[Row] = []
    cells = [(level, layer, seed) for level in levels for layer in layers for seed in seeds]
    with ask.steps("ablation", len(cells) * len(SPLITS)) as progress:
        for level, layer, seed in cells:
            where = {"level": level.title, "layer": layer, "seed": seed}
            for split in SPLITS:
                asked = config(ask, level, {"name": split, "layers": [layer], "tau": "50%"}, seed)
                result = train(ask, asked)
                panel_b.append({**where, "split": split, "accuracy": result.headline["last"]})
                if split == "fedfac":
                    fresh = state_of(experiment.build(config(ask, level, asked.method, seed + 1000))[0])
                    panel_a += [{**where, **row} for row in masked(result, fresh, draws)]
                    for group in TRAINED:
                        score = masked_every_round(ask, asked, group, fresh).headline["last"]
                        panel_a.append({**where, "masked": f"{group}, every round", "draw": 0, "accuracy": score})
                progress.step(f"{level.title} {layer} {split} seed {seed}")
    return Finding(
        tables={"masked": panel_a, "splits": panel_b},
        figures={"masked": partial(draw_masked, panel_a), "splits": partial(draw_splits, panel_b)},
        page=page(ask, seeds, panel_a, panel_b),
        summary={"masked": means(panel_a, "masked"), "splits": means(panel_b, "split")},
    )


def masked(result: Result, fresh: State, draws: int) -> list[dict[str, Any]]:
    """Accuracy of all clients' models with each group of elements replaced by ``fresh`` values."""
    rows = []
    for group in GROUPS:
        for draw in range(draws if group == "random half" else 1):
            chosen = elements(result.split, group, seed=result.seed, draw=draw)
            rows.append({"masked": group, "draw": draw, "accuracy": accuracy(result, chosen, fresh)})
    return rows


def masked_every_round(ask: Ask, asked: Config, group: str, fresh: State) -> Result:
    """The run with a group of elements replaced by ``fresh`` values whenever a client begins to train."""
    running: list[Session] = []

    @torch.no_grad()
    def mask(begin: Begin) -> None:
        if running:  # a trial batch before the first round is not masked
            chosen = elements(running[0].split, group)
            state = references(begin.model)
            copy_into(state, replaced(state, chosen, fresh))

    def base(anatomy: Anatomy) -> Plan:
        made = method.base(anatomy)
        phases = tuple(replace(phase, before=mask) for phase in made.training.phases)
        return replace(made, training=replace(made.training, phases=phases))

    method = methods.build(asked.method_name, asked.method_options)
    session = experiment.session(asked, method=replace(method, base=base), lanes=ask.lanes, device=ask.device)
    running.append(session)
    return session.drive()


def elements(split: Split, group: str, *, seed: int = 0, draw: int = 0) -> Split:
    """A split whose *personal* elements are those that are masked: the group, of every layer in Λ."""
    if group not in GROUPS:
        raise ConfigError(f"there is no group {group!r} to mask; there are {', '.join(GROUPS)}")
    masks: dict[str, list[bool]] = {}
    for layer, mask in split.masks.items():
        if group == "random half":
            order = stream(seed, "mask", layer, draw).permutation(len(mask))
            out = set(order[: len(mask) - sum(mask)].tolist())
        else:
            out = {j for j, shared in enumerate(mask) if group != "nothing" and shared == (group == "shared")}
        masks[layer] = [j not in out for j in range(len(mask))]
    return split.with_masks(masks)


def replaced(state: Mapping[str, Tensor], chosen: Split, fresh: Mapping[str, Tensor]) -> State:
    """The state with the chosen elements' numbers replaced by fresh ones."""
    return {
        name: torch.where(chosen.mask(name, tensor.device), tensor, fresh[name].to(tensor.device))
        if name in chosen.owners
        else tensor
        for name, tensor in state.items()
    }


def accuracy(result: Result, chosen: Split, fresh: State) -> float:
    """Σ correct / Σ n over all clients' test samples, each with its own masked model."""
    federation, local = result.federation, result.local
    if federation is None or local is None:
        raise ConfigError("masking needs the run's federation; keep it with the result")
    model = copy.deepcopy(result.template)
    scores = []
    for client in range(len(federation)):
        load_state(model, replaced(result.state(client), chosen, fresh))
        data = federation.client(client)
        scores.append(evaluate.score(model, client, data.pool, data.test, local.loss, federation.classes))
    return float(evaluate.summary(scores, "masked")["accuracy"])


def means(rows: Sequence[Row], key: str) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds (and draws) of every cell, in the order of the rows."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["level"], row["layer"], row[key]), []).append(float(row["accuracy"]))
    return [
        {
            "level": level,
            "layer": layer,
            key: name,
            "accuracy": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
        }
        for (level, layer, name), values in found.items()
    ]


def draw_masked(rows: Sequence[Row]) -> Figure:
    """Panel A: a group of bars for every level, a panel for every layer."""
    names = {mask: f"masked: {mask}" for mask in MASKS}
    return _bars(means(rows, "masked"), "masked", names)


def draw_splits(rows: Sequence[Row]) -> Figure:
    """Panel B."""
    return _bars(means(rows, "split"), "split", NAMES)


def _bars(rows: Sequence[Row], key: str, names: Mapping[str, str]) -> Figure:
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    levels = list(dict.fromkeys(row["level"] for row in rows))
    figure, axes = figures.panels(1, len(layers), width=5.4, height=3.6, sharey=True)
    width = 0.8 / len(names)
    for place, layer in enumerate(layers):
        here = axes[0, place]
        for i, (name, title) in enumerate(names.items()):
            own = {row["level"]: row for row in rows if (row["layer"], row[key]) == (layer, name)}
            x = [j + (i - (len(names) - 1) / 2) * width for j in range(len(levels))]
            heights = [own[level]["accuracy"] for level in levels]
            spread = [own[level]["std"] or 0.0 for level in levels]
            here.bar(x, heights, width, yerr=spread if any(spread) else None, label=title, color=figures.COLOURS[i])
        here.set_xticks(range(len(levels)), levels)
        here.set_ylim(0, 1.02)
        here.set_axisbelow(True)
        figures.label(here, "heterogeneity of clients", "test accuracy", f"layer {layer}")
    axes[0, 0].legend(loc="lower left", ncols=2, fontsize=8, bbox_to_anchor=(0, 1.12))
    return figure


def page(ask: Ask, seeds: Sequence[int], panel_a: Sequence[Row], panel_b: Sequence[Row]) -> str:
    """What came out."""
    a, b = means(panel_a, "masked"), means(panel_b, "split")
    return "\n\n".join(
        [
            "# Ablation: masked elements, and splits at random",
            f"{in_words(ask, seeds)} Λ is one layer, τ = 50 %, κ = .85. Accuracy over all test samples: after the last "
            "round where elements are masked, the mean of the last evaluations where splits are compared.",
            "## Masked elements (panel A)",
            "![accuracy with masked elements](masked.png)",
            markdown(_wide(a, "masked", MASKS), {"level": "level", "layer": "layer", **{m: m for m in MASKS}}),
            _said_masked(a),
            "## Factor analysis against random splits (panel B)",
            "![accuracy by kind of split](splits.png)",
            markdown(_wide(b, "split", SPLITS), {"level": "level", "layer": "layer", **NAMES}),
            _said_splits(b),
        ]
    )


def _wide(rows: Sequence[Row], key: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row a level and layer, one column a name."""
    cells = list(dict.fromkeys((row["level"], row["layer"]) for row in rows))
    found = {(row["level"], row["layer"], row[key]): row["accuracy"] for row in rows}
    return [{"level": v, "layer": y, **{name: found[v, y, name] for name in names}} for v, y in cells]


def _said_masked(rows: Sequence[Row]) -> str:
    wide = _wide(rows, "masked", MASKS)

    def compared(end: str) -> str:
        gaps = [row[f"shared{end}"] - row[f"personal{end}"] for row in wide]
        return f"**{sum(g > 0 for g in gaps)} of {len(gaps)}** settings (by {statistics.fmean(gaps):+.3f} in the mean)"

    return (
        "Masking the personal elements does more harm than masking the shared ones in "
        f"{compared('')} when models are masked after training, and in {compared(', every round')} when they are "
        f"masked "
        "every round. The paper finds it in all eight of its settings, most where data is heterogeneous."
    )


def _said_splits(rows: Sequence[Row]) -> str:
    wide = _wide(rows, "split", SPLITS)

    def better(one: str, other: str) -> str:
        gaps = [row[one] - row[other] for row in wide]
        return f"**{sum(g > 0 for g in gaps)} of {len(gaps)}** settings (by {statistics.fmean(gaps):+.3f} in the mean)"

    return (
        f"Dynamic factor analysis beats a split redrawn every round in {better('fedfac', 'random-redrawn')}, and a "
        f"split "
        f"drawn once in {better('fedfac', 'random')}; static factor analysis beats a split drawn once in "
        f"{better('fedfac-static', 'random')}. The paper has factor analysis ahead of its random split in all eight "
        "settings, and does not say whether that one was redrawn."
    )
