"""Convergence and cost (paper 5.4): training loss over rounds, time and bytes, relative to FedAvg.

*Convergence.* The training loss of a round is the mean over the batches of its cohort's local training, for both
methods alike. The paper: FedFac's falls faster, the more so the more heterogeneous the data is, and for nearly IID
data the curves coincide.

*Bytes.* What one client sends in a round: the shared values, and for dynamic FedFac the moments of the layers in Λ, d
sums and a triangle of a symmetric d × d matrix. The network engine sends all of these in double precision, and the
server's whole state down in its own (:mod:`fedfac.report.traffic`). Had the clients to send the layers themselves for
the factor analysis, that would be d × fan-in values: what the moments protocol saves is counted for the paper's
networks and layers. Times are measured, so this study's times (and only they) differ from one run to the next.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fedfac import comparison, models
from fedfac.anatomy import Anatomy, Layer
from fedfac.report.traffic import SENT_UP, moments_values
from fedfac.result import Result
from fedfac.studies import figures
from fedfac.studies.frame import Ask, Finding, Row, markdown
from fedfac.studies.training import IID, Level, config, dirichlet, in_words, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("fedavg", "fedfac")
TIMED = ("fedavg", "fedprox", "fedper", "lg-fedavg", "fedem", "fedrep", "fedfac-static", "fedfac")
# what the paper's table of times says of each, the mean over its eight settings
PAPER_TIMES = {"fedprox": 2.93, "fedper": 0.94, "lg-fedavg": 0.89, "fedem": 7.27, "fedrep": 1.29, "fedfac": 1.84}
# data set, network, shape of a sample, classes, options, Λ (paper, table of accuracies)
PAPER_NETWORKS: tuple[tuple[str, str, tuple[int, ...], int, Mapping[str, Any], int], ...] = (
    ("CIFAR-10", "resnet18", (3, 32, 32), 10, {}, 17),
    ("CIFAR-100", "vgg16", (3, 32, 32), 100, {"width": 4096}, 15),
    ("FEMNIST", "femnist-cnn", (1, 28, 28), 62, {}, 2),
    ("Shakespeare", "char-lstm", (80,), 80, {}, 3),
)
SINGLE = torch.float32.itemsize


def study(ask: Ask) -> Finding:
    """Loss curves over levels, times by turns, bytes by counting."""
    levels = [*dirichlet(0.1), IID] if ask.quick else [*dirichlet(0.1, 0.5, 1.0), IID]
    seeds = ask.seed_list(1 if ask.quick else 3)
    rounds = {"evaluate_every": 1000}
    curves: list[Row] = []
    sent: list[Row] = []
    with ask.steps("cost", len(levels) * len(METHODS) * len(seeds) + 2) as progress:
        for level in levels:
            for method in METHODS:
                for seed in seeds:
                    result = train(ask, config(ask, level, {"name": method}, seed, **rounds))
                    where = {"level": level.title, "method": method, "seed": seed}
                    curves += [{**where, "round": r["round"], "loss": r["train_loss"]} for r in result.records]
                    sent.append({**where, **bytes_sent(result)})
                    progress.step(f"{level.title} {method} seed {seed}")
        times = taken(ask, levels[0])
        progress.step("times")
        layers = paper_layers()
        progress.step("the paper's networks")
    gaps = convergence(curves, levels)
    return Finding(
        tables={"curves": curves, "convergence": gaps, "bytes": sent, "layers": layers, "times": times},
        figures={
            "loss": partial(draw_loss, curves, levels),
            "times": partial(draw_times, times),
            "bytes": partial(draw_bytes, layers),
        },
        page=page(ask, seeds, gaps, times, sent, layers),
        summary={"convergence": gaps, "times": times, "layers": layers},
    )


def bytes_sent(result: Result) -> dict[str, float]:
    """What a client sends, the mean of all rounds, in values and in bytes; and the bytes of one request to it."""
    anatomy = Anatomy.of(result.template)
    model = sum(t.numel() for t in result.server.values())
    masks = [mask for number, mask in result.masks.items() if number > 0]
    shared = statistics.fmean(result.split.with_masks(mask).shared_numel() for mask in masks)
    decided = result.split.masks if result.plan is not None and result.plan.every_round else ()
    moments = sum(moments_values(anatomy.layer(layer).elements) for layer in decided)
    # had the layers to be sent whole, their personal rows would travel beside what is shared anyway
    personal = statistics.fmean(
        sum(weights_values(anatomy.layer(layer), anatomy) * (1 - statistics.fmean(mask[layer])) for layer in decided)
        for mask in masks
    )
    return {
        "shared": shared,
        "moments": float(moments),
        "personal_rows": personal,
        "model": float(model),
        "relative": (shared + moments) / model,
        "relative_layers": (shared + personal) / model,
        "up": SENT_UP * (shared + moments),
        "down": float(sum(t.numel() * t.element_size() for t in result.server.values())),
    }


def weights_values(layer: Layer, anatomy: Anatomy) -> int:
    """The number of the layer's input weights."""
    return sum(torch.Size(anatomy.shapes[rows.tensor]).numel() for rows in layer.weights)


def paper_layers() -> list[Row]:
    """What a client sends for the factor analysis of the paper's layers: the weights, or their moments."""
    rows: list[Row] = []
    for data, name, shape, classes, options, number in PAPER_NETWORKS:
        with torch.device("meta"):  # shapes are all that is needed
            anatomy = Anatomy.of(models.build(name, shape=shape, classes=classes, seed=0, **options))
        layer = anatomy.layer(number)
        weights, moments = weights_values(layer, anatomy), moments_values(layer.elements)
        rows.append(
            {
                "data": data,
                "network": name,
                "layer": f"{number} {layer.name}",
                "elements": layer.elements,
                "fan_in": weights // layer.elements,
                "weights": weights,
                "moments": moments,
                "ratio": moments / weights,
                "weights_bytes": SINGLE * weights,
                "moments_bytes": SENT_UP * moments,
                "ratio_bytes": SENT_UP * moments / (SINGLE * weights),
            }
        )
    return rows


def taken(ask: Ask, level: Level) -> list[Row]:
    """The time of a round of every method over FedAvg's, the methods taking turns."""
    options = {"fedprox": {"mu": 0.1}}
    configs = {name: config(ask, level, {"name": name, **options.get(name, {})}, ask.seed) for name in TIMED}
    seconds = comparison.seconds_a_round(configs, 2 if ask.quick else 9, lanes=ask.lanes, device=ask.device)
    return [
        {"method": name, "relative": value / seconds["fedavg"], "paper": PAPER_TIMES.get(name)}
        for name, value in seconds.items()
    ]


def convergence(curves: Sequence[Row], levels: Sequence[Level]) -> list[Row]:
    """By level: the mean loss of the last rounds, and in which share of the rounds FedFac's is lower."""
    rows: list[Row] = []
    for level in levels:
        fedavg, ours = (mean_curve(curves, level, method) for method in METHODS)
        last = max(1, len(fedavg) // 6)
        a, b = statistics.fmean(fedavg[-last:]), statistics.fmean(ours[-last:])
        reached = next((t for t, loss in enumerate(ours, 1) if loss <= a), None)
        rows.append(
            {
                "level": level.title,
                "fedavg": a,
                "fedfac": b,
                "difference": a - b,
                "lower": statistics.fmean(float(y < x) for x, y in zip(fedavg, ours, strict=True)),
                "reached": reached,
                "rough_fedavg": roughness(fedavg),
                "rough_fedfac": roughness(ours),
            }
        )
    return rows


def roughness(curve: Sequence[float]) -> float:
    """How far a curve jumps from round to round: the mean absolute second difference."""
    return statistics.fmean(abs(a - 2 * b + c) for a, b, c in zip(curve, curve[1:], curve[2:], strict=False))


def mean_curve(curves: Sequence[Row], level: Level, method: str) -> list[float]:
    """The loss of every round, the mean over seeds."""
    found: dict[int, list[float]] = {}
    for row in curves:
        if (row["level"], row["method"]) == (level.title, method):
            found.setdefault(row["round"], []).append(float(row["loss"]))
    return [statistics.fmean(found[number]) for number in sorted(found)]


def draw_loss(curves: Sequence[Row], levels: Sequence[Level]) -> Figure:
    """A panel a level: FedAvg's and FedFac's training loss."""
    figure, axes = figures.panels(1, len(levels), width=3.1, height=2.8, sharey=True)
    for place, level in enumerate(levels):
        here = axes[0, place]
        for method, title, colour in (("fedavg", "FedAvg", 0), ("fedfac", "FedFac", 1)):
            curve = mean_curve(curves, level, method)
            here.plot(range(1, len(curve) + 1), curve, label=title, color=figures.COLOURS[colour])
        figures.label(here, "round", "training loss", level.title)
    axes[0, 0].set_ylim(0, None)  # shared by all; set when everything is drawn
    axes[0, 0].legend()
    return figure


def draw_times(times: Sequence[Row]) -> Figure:
    """A bar a method."""
    figure, axes = figures.panel(width=5.6)
    names = [row["method"] for row in times]
    axes.bar(
        range(len(names)), [row["relative"] for row in times], color=figures.COLOURS[0], width=0.6, label="measured"
    )
    known = [(i, row["paper"]) for i, row in enumerate(times) if row["paper"] is not None]
    axes.scatter([i for i, _ in known], [v for _, v in known], color=figures.COLOURS[1], zorder=3, label="paper, mean")
    axes.axhline(1, color="#999999", linewidth=1)
    axes.set_axisbelow(True)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.legend()
    figures.label(axes, "method", "time of a round / FedAvg's", "time")
    return figure


def draw_bytes(layers: Sequence[Row]) -> Figure:
    """Weights against moments of the paper's layers, on a logarithmic axis."""
    figure, axes = figures.panel(width=6.2)
    bars = (("weights_bytes", "the layer's weights, fp32"), ("moments_bytes", "their moments, fp64 as sent"))
    for i, (key, title) in enumerate(bars):
        x = [place + (i - 0.5) * 0.38 for place in range(len(layers))]
        axes.bar(x, [row[key] / 1e6 for row in layers], 0.38, label=title, color=figures.COLOURS[i])
    for place, row in enumerate(layers):
        height = row["moments_bytes"] / 1e6 * 1.15
        axes.text(place + 0.19, height, f"× {row['ratio_bytes']:.2g}", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(None, 2 * max(max(row["weights_bytes"], row["moments_bytes"]) for row in layers) / 1e6)
    axes.set_axisbelow(True)
    axes.set_xticks(
        range(len(layers)), [f"{row['data']}\n{row['network']}, {row['layer']}" for row in layers], fontsize=7
    )
    axes.legend()
    figures.label(
        axes, "the paper's network and layer", "MB that a client sends", "for the factor analysis of one layer"
    )
    return figure


def bytes_text(sent: Sequence[Row], layers: Sequence[Row]) -> str:
    """What was counted, in words: values first, then the bytes of the wire."""
    ours, theirs = ([row for row in sent if row["method"] == method] for method in ("fedfac", "fedavg"))
    relative, naive, up, down = (
        statistics.fmean(row[key] for row in ours) for key in ("relative", "relative_layers", "up", "down")
    )
    up_fedavg = statistics.fmean(row["up"] for row in theirs)
    more, heavier = ([row["data"] for row in layers if row[key] > 1] for key in ("ratio", "ratio_bytes"))
    exceptions = f" (not for {', '.join(more)}: moments are fewer where the fan-in exceeds (d + 3)/2)" if more else ""
    return (
        f"In the runs above a FedFac client sends {relative:.2f} of the values that a FedAvg client sends, moments "
        f"included; sending the layer itself instead of its moments would make that {naive:.2f}. On the wire that is "
        f"{up / 1e3:.0f} kB up by client and round, and {up_fedavg / 1e3:.0f} kB for FedAvg, because sums are sent in "
        f"double precision; down it is {down / 1e3:.0f} kB for either, the server's whole state in single precision, "
        "for every training and once more for every evaluation.\n\n"
        f"For the paper's layers the moments are fewer values than the weights in {len(layers) - len(more)} of "
        f"{len(layers)} cases{exceptions}. In bytes, moments in double precision as they are sent against weights in "
        f"single precision, they are less in {len(layers) - len(heavier)} of {len(layers)} (where the fan-in exceeds "
        "d + 3). The paper counts no bytes."
    )


def page(
    ask: Ask,
    seeds: Sequence[int],
    gaps: Sequence[Row],
    times: Sequence[Row],
    sent: Sequence[Row],
    layers: Sequence[Row],
) -> str:
    """What came out."""
    faster = [row for row in gaps if row["difference"] > 0]
    order = [row["difference"] for row in gaps]
    falling = all(a >= b for a, b in itertools.pairwise(order))
    smoother = [row for row in gaps if row["rough_fedfac"] < row["rough_fedavg"]]
    ours = next(row for row in times if row["method"] == "fedfac")
    iid = gaps[-1]
    return "\n\n".join(
        [
            "# Convergence and cost",
            f"{in_words(ask, seeds)} FedFac splits the last hidden layer, τ = 50 %, κ = .85.",
            "## Convergence",
            "![training loss](loss.png)",
            markdown(
                gaps,
                {
                    "level": "level",
                    "fedavg": "FedAvg, last rounds",
                    "fedfac": "FedFac, last rounds",
                    "difference": "difference",
                    "lower": "share of rounds with FedFac lower",
                    "reached": "round in which FedFac reaches FedAvg's last loss",
                    "rough_fedavg": "jumps, FedAvg",
                    "rough_fedfac": "jumps, FedFac",
                },
            ),
            f"FedFac's training loss is lower at the end at **{len(faster)} of {len(gaps)}** levels (paper: at all). "
            f"The difference "
            + ("falls" if falling else "does not fall steadily")
            + f" from the most heterogeneous level to the least (paper: it falls), and is {iid['difference']:+.3f} "
            f"for IID clients "
            f"(paper: the curves nearly coincide). FedFac's curve is smoother at {len(smoother)} of {len(gaps)} "
            f"levels (paper: "
            "at all). A lower *training* loss of personal models is no better test accuracy: see the fairness study.",
            "## Time",
            "![time of a round relative to FedAvg's](times.png)",
            markdown(
                times, {"method": "method", "relative": "time / FedAvg's", "paper": "paper, mean of 8 settings"}, ".2f"
            ),
            f"A round of dynamic FedFac takes {ours['relative']:.2f} times FedAvg's (paper: .86 to 3.39). Measured "
            f"on this machine "
            "by turns, medians; the ratios depend on the network: factor analysis costs d³ of a layer's d elements, "
            "training "
            "costs all the rest.",
            "## Bytes",
            "![bytes sent for the factor analysis](bytes.png)",
            markdown(
                layers,
                {
                    "data": "data",
                    "network": "network",
                    "layer": "layer",
                    "elements": "elements",
                    "fan_in": "fan-in",
                    "weights": "weights, values",
                    "moments": "moments, values",
                    "ratio": "ratio",
                    "weights_bytes": "weights, bytes (fp32)",
                    "moments_bytes": "moments, bytes (fp64, as sent)",
                    "ratio_bytes": "ratio of bytes",
                },
                ".3g",
            ),
            bytes_text(sent, layers),
        ]
    )
