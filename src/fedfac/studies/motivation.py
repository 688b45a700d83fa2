"""The motivating example (paper 1): some neurons say the same on all clients, some do not.

One hundred clients have one digit each (every digit is dealt to ten clients), or, for comparison, images at random.
Each trains an MLP with one hidden layer of 200 units alone, from a common start; a unit's *output* on a client is
its mean activation. The entropy of the 100 outputs of a unit measures how much it differs between clients.

The paper does not say from which start, for how long, or over which images. There are two readings of the last, and
they answer different questions: over the client's *own* images, outputs differ because the images do, before anything
is learnt (so we show the untrained network too); over the *same* images for all clients, they differ only because
the clients have learnt different things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from scipy.signal import find_peaks
from scipy.stats import gaussian_kde
from torch import Tensor, nn

from fedfac import methods, models
from fedfac.config import DataConfig
from fedfac.data import partition, sources
from fedfac.data.federation import Federation, Index
from fedfac.data.samples import Samples
from fedfac.rounds import fit
from fedfac.seeds import stream
from fedfac.studies import figures
from fedfac.studies.entropy import entropy
from fedfac.studies.frame import Ask, Finding, Row, markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Outputs = npt.NDArray[np.float64]  # (clients, units)
CASES = ("IID", "non-IID")
VIEWS = ("own images, untrained", "own images", "same images")
SAME = 1000  # at most so many images that all clients' networks see


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Which digits, and how long each client trains."""

    data: str = "mnist"
    groups: int = 10  # clients for each digit
    hidden: int = 200
    epochs: int = 5
    batch_size: int = 32
    neighbours: int = 3


FULL = Scale()
QUICK = Scale(data="digits", epochs=10, batch_size=8)


def study(ask: Ask) -> Finding:
    """Train all clients in both cases, and look at what their hidden units say."""
    scale = QUICK if ask.quick else FULL
    samples = sources.load_samples(DataConfig(name=scale.data, data_dir=ask.data_dir))
    outputs: dict[tuple[str, str], Outputs] = {}
    accuracy: dict[str, float] = {}
    with ask.steps("motivation", len(CASES)) as progress:
        for case in CASES:
            seen, accuracy[case] = train(cut(samples, case, scale.groups, ask.seed), scale, ask)
            outputs |= {(case, view): table for view, table in seen.items()}
            progress.step(case)
    return present(outputs, accuracy, scale)


def cut(samples: Samples, case: str, groups: int, seed: int) -> Federation:
    """Every digit dealt to ``groups`` clients, or as many clients with images at random."""
    labels, classes = np.asarray(samples.labels), int(samples.classes or 0)
    if case == "IID":
        parts = {str(i): p for i, p in enumerate(partition.iid(labels, clients=classes * groups, seed=seed))}
    else:
        draws = stream(seed, "motivation", "digits")
        dealt = [np.array_split(draws.permutation(np.flatnonzero(labels == digit)), groups) for digit in range(classes)]
        parts = {f"{digit}-{i}": np.sort(part) for digit, several in enumerate(dealt) for i, part in enumerate(several)}
    held: dict[str, tuple[Index, Index]] = {
        name: partition.hold_out(part, 0.2, seed=seed, client=i, purpose="test")
        for i, (name, part) in enumerate(parts.items())
    }
    return Federation.from_pool(samples.pool, held, classes=classes, fingerprint=samples.fingerprint, seed=seed)


def train(federation: Federation, scale: Scale, ask: Ask) -> tuple[dict[str, Outputs], float]:
    """Each client alone: its units' mean outputs by view, and the accuracy over all test images."""
    first = federation.client(0)
    shape = tuple(first.pool.batch(first.train[:1])[0].shape[1:])
    model = models.build("mlp", shape=shape, classes=federation.classes or 1, seed=ask.seed, hidden=scale.hidden)
    result = fit(
        model,
        federation,
        method=methods.local(),
        rounds=1,
        rate=1.0,
        epochs=scale.epochs,
        batch_size=scale.batch_size,
        seed=ask.seed,
        lanes=ask.lanes,
        device=ask.device,
    )
    clients = [federation.client(number) for number in range(len(federation))]
    held = torch.cat([client.test for client in clients])
    same, _ = first.pool.batch(held[:: max(1, len(held) // SAME)][:SAME])
    own = [client.pool.batch(client.train)[0] for client in clients]
    trained = [result.model(number) for number in range(len(clients))]
    return {
        VIEWS[0]: np.stack([hidden_outputs(model, images) for images in own]),
        VIEWS[1]: np.stack([hidden_outputs(net, images) for net, images in zip(trained, own, strict=True)]),
        VIEWS[2]: np.stack([hidden_outputs(net, same) for net in trained]),
    }, result.accuracy


@torch.no_grad()
def hidden_outputs(model: nn.Module, images: Tensor) -> Outputs:
    """The mean output of every hidden unit of ``models.mlp`` (after ReLU) over these images."""
    below_the_head = nn.Sequential(*list(model.children())[:-1])
    found: Outputs = below_the_head(images).double().mean(0).cpu().numpy()
    return found


def peaks(values: npt.NDArray[np.float64]) -> list[float]:
    """Where a smoothed histogram has its peaks; one of less than a tenth of the highest does not count."""
    grid = np.linspace(values.min() - 1, values.max() + 1, 400)
    density = gaussian_kde(values)(grid)
    return [float(grid[i]) for i in find_peaks(density, prominence=0.1 * density.max())[0]]


def present(outputs: Mapping[tuple[str, str], Outputs], accuracy: Mapping[str, float], scale: Scale) -> Finding:
    """Tables, figures and words for the clients' outputs."""
    entropies = {key: entropy(table, k=scale.neighbours) for key, table in outputs.items()}
    long = [
        {"case": case, "view": view, "unit": unit, "entropy": float(value)}
        for (case, view), own in entropies.items()
        for unit, value in enumerate(own)
    ]
    rows = [
        {
            "view": view,
            "case": case,
            "median": float(np.median(entropies[case, view])),
            "spread": float(np.subtract(*np.quantile(entropies[case, view], (0.9, 0.1)))),
            "peaks": ", ".join(f"{place:.1f}" for place in peaks(entropies[case, view])),
            "deviation": float(np.median(outputs[case, view].std(0))),
            "silent": float((outputs[case, view] == 0).mean()),
        }
        for view in VIEWS
        for case in CASES
    ]
    higher = {view: float(np.mean(entropies["non-IID", view] > entropies["IID", view])) for view in VIEWS}
    return Finding(
        tables={"outputs": _long(outputs), "entropy": long},
        figures={"heatmap": partial(draw_heatmaps, outputs), "entropy": partial(draw_entropies, entropies)},
        page=_page(rows, higher, accuracy, scale),
        summary={"views": rows, "higher_entropy_non_iid": higher, "accuracy": dict(accuracy)},
    )


def _long(outputs: Mapping[tuple[str, str], Outputs]) -> pa.Table:
    columns: dict[str, list[Any]] = {"case": [], "view": [], "client": [], "unit": [], "output": []}
    for (case, view), table in outputs.items():
        clients, units = np.indices(table.shape)
        for name, values in (("client", clients), ("unit", units), ("output", table)):
            columns[name] += values.ravel().tolist()
        columns["case"] += [case] * table.size
        columns["view"] += [view] * table.size
    return pa.table(columns)


def draw_heatmaps(outputs: Mapping[tuple[str, str], Outputs]) -> Figure:
    """After training: a row for every unit, those with the largest mean output on top; a column for every client."""
    figure, axes = figures.panels(2, len(CASES), width=4.2, height=3.2)
    for line, view in enumerate(VIEWS[1:]):
        largest = max(float(np.quantile(outputs[case, view], 0.995)) for case in CASES)
        for own, case in zip(axes[line], CASES, strict=True):
            table = outputs[case, view]
            ordered = table[:, np.argsort(-table.mean(0))].T
            image = own.imshow(ordered, aspect="auto", cmap="viridis", vmin=0, vmax=largest, interpolation="nearest")
            figures.label(own, "client", "unit, by mean output", f"{case}, {view}")
            own.grid(visible=False)
        figure.colorbar(image, ax=list(axes[line]), label="mean output")
    return figure


def draw_entropies(entropies: Mapping[tuple[str, str], npt.NDArray[np.float64]]) -> Figure:
    """The paper's two histograms for each view, on one scale."""
    figure, axes = figures.panels(len(CASES), len(VIEWS), width=3.0, height=2.3, sharex=True, sharey=True)
    together = np.concatenate(list(entropies.values()))
    bins = np.linspace(together.min(), together.max(), 41).tolist()
    for line, case in enumerate(CASES):
        for column, view in enumerate(VIEWS):
            own: Axes = axes[line, column]
            own.hist(entropies[case, view], bins=bins, color=figures.COLOURS[line])
            figures.label(own, "entropy over clients (nats)", "hidden units", f"{case}, {view}")
    return figure


def _page(rows: Sequence[Row], higher: Mapping[str, float], accuracy: Mapping[str, float], scale: Scale) -> str:
    found = {(row["case"], row["view"]): row for row in rows}
    titles = {
        "view": "outputs over",
        "case": "case",
        "median": "median entropy",
        "spread": "10 % to 90 %",
        "peaks": "peaks at",
        "deviation": "median std. deviation",
        "silent": "outputs that are 0",
    }

    def gap(view: str) -> str:
        return f"{found['non-IID', view]['median'] - found['IID', view]['median']:+.2f} nats"

    def wider(view: str) -> float:
        return float(found["non-IID", view]["deviation"] / found["IID", view]["deviation"])

    untrained, own, same = VIEWS
    count = len(found["non-IID", own]["peaks"].split(","))
    return f"""\
# Motivation: what hidden units say on different clients (paper 1)

{scale.data}, {10 * scale.groups} clients; one digit each (non-IID) or images at random (IID). Each trains an MLP with
{scale.hidden} hidden units alone, {scale.epochs} epochs, from a common start. Accuracy on the clients' own test
images: IID {accuracy["IID"]:.3f}, non-IID {accuracy["non-IID"]:.3f} (there, the answer is always the same).

![Outputs of every hidden unit on every client](heatmap.png)

![Histograms of the entropy](entropy.png)

{markdown(rows, titles, ".2f")}

## What came out, and what the paper says

- *"There exist neurons learning quite varied representations across clients in the non-IID case."* Over clients, a
  unit's output has a median standard deviation of {found["non-IID", own]["deviation"]:.2f} on own images and
  {found["non-IID", same]["deviation"]:.2f} on the same images, against {found["IID", own]["deviation"]:.2f} and
  {found["IID", same]["deviation"]:.2f} in the IID case.
- *"The bigger the entropy, the greater the dispersion degree."* From the IID to the non-IID case the standard deviation
  becomes {wider(own):.1f} times as large on own images and {wider(same):.1f} times on the same images; the median
  entropy changes by {gap(own)} and {gap(same)}, and is higher for {higher[own]:.0%} and {higher[same]:.0%} of the
  units. Entropy is not spread: the ten clients of one digit start alike, learn alike and say nearly the same, and a
  unit that is silent says exactly 0 ({found["non-IID", own]["silent"]:.0%} of the non-IID outputs on own images,
  {found["IID", own]["silent"]:.0%} of the IID ones). The nearest neighbours of an output are then its twins, and the
  estimate is low however far apart the digits are.
- *"In the non-IID case, the entropy values have two peaks, one near zero and the other near two."* On own images the
  smoothed histogram has {count} peak{"" if count == 1 else "s"}, at {found["non-IID", own]["peaks"]}; on the same
  images at {found["non-IID", same]["peaks"]}. Differential entropy moves with the scale of the outputs, which the
  paper does not give.
- **The untrained network.** On own images the non-IID entropies are higher for {higher[untrained]:.0%} of the units
  ({gap(untrained)}) before any training: clients that see other images have other outputs, whatever their weights are.

## What the paper leaves open, and what was chosen

A common start; {scale.epochs} epochs of Adam at 1e-3, batches of {scale.batch_size}; outputs are means after ReLU, over
the client's own training images or over the same held-out images for all (at most {SAME}); entropy by the
{scale.neighbours} nearest neighbours, with a jitter of a thousandth of the largest output, so that equal outputs have a
distance: the histograms' left ends depend on it.
"""
