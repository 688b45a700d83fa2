"""Feature maps (paper 5.6): one image through the personal and the shared channels of a layer, beside FedAvg's.

FedFac and FedAvg start from the same weights, so channel j of one is channel j of the other, trained differently.
Shown is what the layer hands on (after its ReLU) for a test image of one client, in that client's FedFac model and in
FedAvg's global model. Beside the picture, over the test images of up to 20 clients that have trained, two numbers a
channel put the paper's three remarks to the test:

*agreement*  the correlation of the channel's map with FedAvg's map of the same channel (paper: shared filters behave
             similarly, personal ones do not)
*roughness*  the mean squared difference of neighbouring pixels of the map, over twice its variance: 1 for white noise,
             near 0 for a smooth map (paper: FedAvg's maps have more noise than those of personal filters)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfac.data.federation import Federation
from fedfac.errors import ModelError
from fedfac.result import Result
from fedfac.studies import figures
from fedfac.studies.frame import Ask, Finding, Row, markdown
from fedfac.studies.training import config, dirichlet, in_words, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYER = "conv2"
SHOWN = 8  # channels of each kind in the picture
CLIENTS = 20  # at most, for the two numbers


def study(ask: Ask) -> Finding:
    """Train FedFac and FedAvg from one start, and look at one layer of both."""
    (level,) = dirichlet(0.5)  # the paper's
    seed = ask.seed
    with ask.steps("features", 3) as progress:
        ours = train(ask, config(ask, level, {"name": "fedfac", "layers": [LAYER], "tau": "50%"}, seed))
        progress.step("fedfac")
        theirs = train(ask, config(ask, level, {"name": "fedavg"}, seed))
        progress.step("fedavg")
        mask = ours.split.masks[LAYER]
        clients = [c for c in range(len(ours.names)) if ours.store.get(c) is not None][:CLIENTS]
        channels = compared(ours, theirs, clients, mask)
        progress.step("feature maps")
    image, label = first_image(_federation(ours), clients[0])
    maps = {"FedFac": maps_of(ours.model(clients[0]), LAYER, image), "FedAvg": maps_of(theirs.model(0), LAYER, image)}
    shown = rows_of_maps({name: found[0] for name, found in maps.items()}, mask)
    groups = by_group(channels)
    return Finding(
        tables={"channels": channels, "maps": shown, "groups": groups},
        figures={
            "features": partial(draw_maps, image[0, 0], label, shown, mask),
            "channels": partial(draw_channels, channels),
        },
        page=page(ask, ours.names[clients[0]], label, groups),
        summary={"groups": groups},
    )


@torch.no_grad()
def maps_of(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """What a layer hands on for these images, after its ReLU: (images, channels, height, width)."""
    found: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, given, out: found.append(out))
    try:
        model(images)
    finally:
        handle.remove()
    if not found or found[0].dim() != 4:
        raise ModelError(f"layer {layer!r} hands on no maps (channels, height, width): choose a convolution")
    return found[0].relu()


def agreement(one: Tensor, other: Tensor) -> float | None:
    """The correlation of two sets of maps of one channel; None where one of them is constant."""
    a, b = one.double().flatten() - one.double().mean(), other.double().flatten() - other.double().mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else None


def roughness(maps: Tensor) -> float | None:
    """Mean squared difference of neighbours over twice the variance; None for constant maps.

    >>> stripes = torch.tensor([[[0.0, 1.0, 0.0, 1.0]] * 4])
    >>> roughness(stripes), roughness(torch.ones(1, 4, 4))
    (1.0, None)
    """
    maps = maps.double()
    variance = float((maps - maps.mean((-2, -1), keepdim=True)).square().mean())
    across, down = maps.diff(dim=-1).square().mean(), maps.diff(dim=-2).square().mean()
    return float((across + down) / 2) / (2 * variance) if variance else None


def compared(ours: Result, theirs: Result, clients: Sequence[int], mask: Sequence[bool]) -> list[Row]:
    """Both numbers for every channel of every client."""
    federation, common = _federation(ours), theirs.model(0)
    rows: list[Row] = []
    for client in clients:
        data = federation.client(client)
        if not len(data.test):
            continue
        images, _ = data.pool.batch(data.test)
        own, other = maps_of(ours.model(client), LAYER, images), maps_of(common, LAYER, images)
        for j, shared in enumerate(mask):
            rows.append(
                {
                    "client": ours.names[client],
                    "channel": j,
                    "kind": "shared" if shared else "personal",
                    "agreement": agreement(own[:, j], other[:, j]),
                    "roughness_fedfac": roughness(own[:, j]),
                    "roughness_fedavg": roughness(other[:, j]),
                }
            )
    return rows


def by_group(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over channels and clients, personal and shared apart; silent channels (constant maps) are counted."""
    made = []
    for kind in ("personal", "shared"):
        own = [row for row in rows if row["kind"] == kind]
        numbers: dict[str, Any] = {"kind": kind, "channels": len({row["channel"] for row in own})}
        for name in ("agreement", "roughness_fedfac", "roughness_fedavg"):
            values = [row[name] for row in own if row[name] is not None]
            numbers[name] = statistics.fmean(values) if values else None
        numbers["silent"] = sum(row["roughness_fedfac"] is None for row in own) / len(own)
        made.append(numbers)
    return made


def first_image(federation: Federation, client: int) -> tuple[Tensor, int]:
    """The client's first test image (its first training image if it has none), and what it shows."""
    data = federation.client(client)
    images, labels = data.pool.batch((data.test if len(data.test) else data.train)[:1])
    return images, int(labels[0])


def rows_of_maps(maps: dict[str, Tensor], mask: Sequence[bool]) -> list[Row]:
    """The pictured maps as rows of plain values: those channels of each kind that say most in FedFac's model."""
    rows: list[Row] = []
    for kind in ("personal", "shared"):
        own = [j for j, shared in enumerate(mask) if shared == (kind == "shared")]
        loud = sorted(sorted(own, key=lambda j: -float(maps["FedFac"][j].sum()))[:SHOWN])
        for method, found in maps.items():
            rows += [{"kind": kind, "method": method, "channel": j, "map": found[j].tolist()} for j in loud]
    return rows


def draw_maps(image: Tensor, label: int, rows: Sequence[Row], mask: Sequence[bool]) -> Figure:
    """The image, and four strips of maps: personal and shared channels, FedFac's and FedAvg's."""
    strips = [(kind, method) for kind in ("personal", "shared") for method in ("FedFac", "FedAvg")]
    figure, axes = figures.panels(1 + len(strips), 1, width=7.2, height=1.5)
    grey = axes[0, 0].imshow(image.numpy(), cmap="gray_r")
    top = max(float(torch.tensor(row["map"]).max()) for row in rows)
    figures.label(axes[0, 0], "pixel", "pixel", f"the image: a {label} of one client")
    grey.axes.grid(False)
    for place, (kind, method) in enumerate(strips, 1):
        own = [row for row in rows if (row["kind"], row["method"]) == (kind, method)]
        tiles = [torch.tensor(row["map"]) for row in own]
        size = tiles[0].shape[1]
        gap = torch.full((tiles[0].shape[0], 1), torch.nan)
        strip = torch.cat([part for tile in tiles for part in (tile, gap)][:-1], dim=1)
        here = axes[place, 0]
        drawn = here.imshow(torch.nan_to_num(strip, nan=0.0).numpy(), cmap="viridis", vmin=0, vmax=top)
        for j in range(1, len(tiles)):
            here.axvspan(j * (size + 1) - 1.5, j * (size + 1) - 0.5, color="white")
        here.set_xticks([j * (size + 1) + (size - 1) / 2 for j in range(len(tiles))], [row["channel"] for row in own])
        here.set_yticks([])
        here.grid(False)
        count = sum(shared == (kind == "shared") for shared in mask)
        whose = (
            f"FedFac, {kind} channels ({len(own)} of {count})"
            if method == "FedFac"
            else f"FedAvg, the channels that are {kind} in FedFac"
        )
        figures.label(here, "channel", "map", whose)
        figure.colorbar(drawn, ax=here, fraction=0.02, pad=0.01, label="value")
    return figure


def draw_channels(rows: Sequence[Row]) -> Figure:
    """How the two numbers are spread over channels and clients."""
    figure, axes = figures.panels(1, 2, width=4.2, height=3.2)
    kinds = ("personal", "shared")
    spread = [
        [row["agreement"] for row in rows if row["kind"] == kind and row["agreement"] is not None] for kind in kinds
    ]
    axes[0, 0].boxplot(spread, tick_labels=list(kinds), medianprops={"color": figures.COLOURS[1]})
    figures.label(axes[0, 0], "channels of FedFac", "correlation with FedAvg's map", "agreement")
    for place, kind in enumerate(kinds):
        own = [row for row in rows if row["kind"] == kind]
        pairs = [(r["roughness_fedavg"], r["roughness_fedfac"]) for r in own]
        both = [(x, y) for x, y in pairs if x is not None and y is not None]
        axes[0, 1].scatter(
            [x for x, _ in both], [y for _, y in both], s=6, alpha=0.5, label=kind, color=figures.COLOURS[place]
        )
    top = max(axes[0, 1].get_xlim()[1], axes[0, 1].get_ylim()[1])
    axes[0, 1].plot([0, top], [0, top], color="#999999", linewidth=1)
    axes[0, 1].legend()
    figures.label(axes[0, 1], "FedAvg's map", "FedFac's map", "roughness (1 = white noise)")
    return figure


def page(ask: Ask, client: str, label: int, groups: Sequence[Row]) -> str:
    """What came out."""
    personal, shared = groups
    columns = {
        "kind": "channels",
        "channels": "number",
        "agreement": "agreement with FedAvg's",
        "roughness_fedfac": "roughness, FedFac",
        "roughness_fedavg": "roughness, FedAvg",
        "silent": "silent in FedFac",
    }
    nearer = shared["agreement"] > personal["agreement"]
    smoother = personal["roughness_fedfac"] < personal["roughness_fedavg"]
    apart = abs(personal["roughness_fedfac"] - shared["roughness_fedfac"])
    return "\n\n".join(
        [
            "# Feature maps of personal and shared channels",
            f"{in_words(ask, [ask.seed])} Clients by Dir(0.5); FedFac splits `{LAYER}`, τ = 50 %. The paper takes "
            f"the fifth "
            f"convolution of ResNet-18 on CIFAR-10. The image is a test image (a {label}) of client {client}; the "
            f"{SHOWN} channels "
            "of each kind that say most are shown, all on one colour scale.",
            "![feature maps](features.png)",
            "![agreement and roughness of all channels](channels.png)",
            markdown(groups, columns),
            f"**Shared filters behave similarly to FedAvg's, personal ones differ** (paper): shared channels agree "
            f"with FedAvg's "
            f"by {shared['agreement']:.3f}, personal ones by {personal['agreement']:.3f}; here that "
            + ("holds." if nearer else "does not hold.")
            + f" **FedAvg's maps have more noise than personal ones** (paper): roughness "
            f"{personal['roughness_fedavg']:.3f} "
            f"against {personal['roughness_fedfac']:.3f}; here that "
            + ("holds." if smoother else "does not hold.")
            + f" **The two kinds look quite different** (paper): their mean roughness differs by {apart:.3f}; "
            f"whether a single "
            "picture looks clearer is left to the reader.",
        ]
    )


def _federation(result: Result) -> Federation:
    if result.federation is None:
        raise ModelError("feature maps need the run's federation; keep it with the result")
    return result.federation
