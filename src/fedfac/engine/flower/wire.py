"""What crosses the network: requests of the server, replies of the clients, and the checks of both.

A message is a few plain values (JSON) and some tensors (safetensors): no code can hide in it. A client's reply
holds numbers of these kinds only:

- hello: its name, the shape of a sample and the number of classes;
- train: n_k, its mean loss, and what the rule measures (sums over the rows of a layer's weights);
- collect: n_k and n_k·(shared part), in double precision;
- evaluate: counts, mean loss and metrics of its held-out samples.

Replies are not trusted. The server knows every name and shape that a reply must have, and refuses any other, any
number that is not finite, and any size that is not a positive whole number: ``ReplyError`` says what was wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfac.errors import FedfacError, RunError
from fedfac.evaluate import Score
from fedfac.moments import Additive, Moments, Spread
from fedfac.split import Split, mask_of, mask_text
from fedfac.state import State, from_bytes, is_finite, to_bytes

FORMAT = 1
HELLO, TRAIN, COLLECT, EVALUATE = "hello", "train", "collect", "evaluate"
ACTIONS = (HELLO, TRAIN, COLLECT, EVALUATE)


class ReplyError(FedfacError):
    """A reply is not what was asked for; it is refused, and its sender is left out of the round."""


@dataclass(frozen=True)
class Packet:
    """Plain values and tensors, on their way."""

    values: Mapping[str, Any]
    tensors: State = field(default_factory=dict)

    def pack(self) -> tuple[str, bytes]:
        """As text and bytes."""
        return json.dumps({"format": FORMAT, **self.values}), to_bytes(self.tensors)

    @classmethod
    def unpack(cls, text: object, data: object) -> Packet:
        """The inverse of :meth:`pack`, of anything that came."""
        if not isinstance(text, str) or not isinstance(data, bytes):
            raise ReplyError("it is not a fedfac message")
        try:
            values = json.loads(text)
            tensors = from_bytes(data)
        except (ValueError, RecursionError, RunError) as error:
            raise ReplyError(f"it cannot be read ({type(error).__name__})") from error
        found = values.pop("format", None) if isinstance(values, dict) else None
        if found != FORMAT:
            raise ReplyError(f"it is of message format {found!r}; this version of fedfac reads format {FORMAT}")
        return cls(values, tensors)


@dataclass(frozen=True)
class Request:
    """What the server asks one client for.

    ``last`` is the last round in which this client's part was counted: what it kept then is its personal state.
    """

    action: str
    run: str = ""
    round: int = 0
    client: int = 0
    classes: int | None = None
    last: int = 0
    masks: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    server: State = field(default_factory=dict)
    measure: bool = False  # train: whether the rule measures afterwards
    collect: bool = False  # train: whether the split is already final, so that the shared part comes with the reply
    score: bool = True  # evaluate: or only take the model home

    def packet(self) -> Packet:
        """The request, to be sent."""
        values = {name: value for name, value in vars(self).items() if name not in ("masks", "server")}
        return Packet(values | {"masks": {k: mask_text(m) for k, m in self.masks.items()}}, self.server)

    @classmethod
    def read(cls, packet: Packet) -> Request:
        """The request as a client sees it."""
        values = dict(packet.values)
        masks = {layer: mask_of(text) for layer, text in values.pop("masks").items()}
        return cls(**values, masks=masks, server=packet.tensors)


# ---------------------------------------------------------------- what clients reply


def hello_reply(name: str, shape: Sequence[int], classes: int | None) -> Packet:
    """Who a node is, and what its samples look like."""
    return Packet({"name": name, "shape": list(shape), "classes": classes})


def problem_reply(problem: str) -> Packet:
    """The client could not do it."""
    return Packet({"problem": problem})


def train_reply(samples: int, loss: float, measured: Mapping[str, Additive] | None, part: State | None) -> Packet:
    """n_k and the loss; what the rule measures; and the weighted shared part where the split is already final."""
    tensors: State = {} if part is None else {f"part/{name}": tensor for name, tensor in part.items()}
    counts: dict[str, int] = {}
    for layer, statistic in (measured or {}).items():
        counts[layer], own = _statistic_tensors(statistic)
        tensors |= {f"sums/{layer}/{name}": tensor for name, tensor in own.items()}
    return Packet({"samples": samples, "loss": loss, "counts": counts}, tensors)


def collect_reply(samples: int, part: State) -> Packet:
    """n_k and n_k·(shared part)."""
    return Packet({"samples": samples}, {f"part/{name}": tensor for name, tensor in part.items()})


def evaluate_reply(scores: Mapping[str, Score]) -> Packet:
    """Counts and figures, no sample."""
    named = {
        part: {"samples": s.samples, "correct": s.correct, "loss": s.loss, "metrics": dict(s.metrics)}
        for part, s in scores.items()
    }
    return Packet({"scores": named})


def _statistic_tensors(statistic: Additive) -> tuple[int, State]:
    if isinstance(statistic, Moments):
        products = statistic.products
        if torch.equal(products, products.T):  # nothing is lost, and half of the bytes are saved
            products = products[tuple(torch.triu_indices(*products.shape))]
        return int(statistic.n), {"total": statistic.total, "products": products}
    if isinstance(statistic, Spread):
        return statistic.clients, {"total": statistic.total, "squares": statistic.squares}
    raise RunError(f"a {type(statistic).__name__} cannot be sent: the wire knows Moments and Spread")


# ---------------------------------------------------------------- what the server makes of them


@dataclass(frozen=True)
class Trained:
    """A checked reply to a train request."""

    samples: int
    loss: float
    measured: Mapping[str, Additive]
    part: State


def check_problem(packet: Packet) -> None:
    """Fail if the client says that it could not do it."""
    problem = packet.values.get("problem")
    if problem is not None:
        raise ReplyError(str(problem)[:200])


def read_hello(packet: Packet) -> tuple[str, tuple[int, ...], int | None]:
    """Name, shape of a sample, classes."""
    check_problem(packet)
    name, shape, classes = (packet.values.get(key) for key in ("name", "shape", "classes"))
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise ReplyError("its name is not a short printable text")
    if not isinstance(shape, list) or not all(_is_count(size) and size > 0 for size in shape):
        raise ReplyError(f"the shape of its samples is {shape!r}")
    if classes is not None and not (_is_count(classes) and classes > 0):
        raise ReplyError(f"it says that it has {classes!r} classes")
    return name, tuple(shape), classes


def read_train(packet: Packet, split: Split, sizes: Mapping[str, tuple[int, int]], *, collect: bool) -> Trained:
    """n_k, loss, and exactly the sums that were asked for: ``sizes`` has (elements, fan-in) of the layers measured."""
    check_problem(packet)
    samples, loss = _samples(packet), packet.values.get("loss")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise ReplyError(f"its loss is {loss!r}")
    measured: dict[str, Additive] = {}
    tensors = dict(packet.tensors)
    counts = packet.values.get("counts")
    if not isinstance(counts, dict):
        raise ReplyError("it has no counts")
    for layer, size in sizes.items():
        prefix = f"sums/{layer}/"
        own = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        measured[layer] = _read_statistic(layer, size, counts.get(layer), own)
    part = _read_part(tensors, split) if collect else {}
    if not collect and tensors:
        raise ReplyError(f"it sent tensors that nobody asked for: {sorted(tensors)[:3]}")
    return Trained(samples, loss, measured, part)


def read_collect(packet: Packet, split: Split, samples: int) -> State:
    """n_k·(shared part), for the n_k that the client trained with."""
    check_problem(packet)
    found = _samples(packet)
    if found != samples:
        raise ReplyError(f"it trained with {samples} samples, and weighs its part by {found}")
    return _read_part(packet.tensors, split)


def read_scores(packet: Packet, client: int, metrics: Sequence[str], *, classes: bool) -> dict[str, Score]:
    """Evaluation counts of the held-out parts."""
    check_problem(packet)
    scores = packet.values.get("scores")
    if not isinstance(scores, dict) or "test" not in scores or scores.keys() - {"test", "validation"}:
        raise ReplyError("it has no test scores")
    return {part: _read_score(client, entry, metrics, classes=classes) for part, entry in scores.items()}


def _read_score(client: int, entry: Any, metrics: Sequence[str], *, classes: bool) -> Score:
    if not isinstance(entry, dict):
        raise ReplyError("a score of it is not a table")
    values: list[Any] = [entry.get(key) for key in ("samples", "correct", "loss", "metrics")]
    samples, correct, loss, figures = values
    if not _is_count(samples):
        raise ReplyError(f"it tested {samples!r} samples; a whole number from 0 up is allowed")
    if classes != (correct is not None) or (correct is not None and not (_is_count(correct) and correct <= samples)):
        raise ReplyError(f"it counts {correct!r} correct answers of {samples}")
    wanted = set(metrics) if samples else set()
    if not isinstance(figures, dict) or figures.keys() != wanted:
        raise ReplyError(f"its metrics are not {sorted(wanted)}")
    for value in (loss, *figures.values()):
        if not isinstance(value, float) or not math.isfinite(value):
            raise ReplyError(f"a figure of it is {value!r}")
    return Score(client, samples, correct, float(loss), dict(figures))


def _read_statistic(layer: str, size: tuple[int, int], count: Any, found: State) -> Additive:
    """One client's moments or spread of a layer, of the layer's size and finite."""
    elements, rows = size
    if found.keys() == {"total", "products"}:
        packed = (elements * (elements + 1) // 2,)
        triangle = found["products"].ndim == 1
        wanted = {"total": (elements,), "products": packed if triangle else (elements, elements)}
        _check_sums(layer, found, wanted, count, rows)
        return Moments(rows, found["total"], _unpacked(found["products"], elements) if triangle else found["products"])
    if found.keys() == {"total", "squares"}:
        _check_sums(layer, found, {"total": (elements, rows), "squares": (elements,)}, count, 1)
        return Spread(1, found["total"], found["squares"])
    raise ReplyError(f"its sums of layer {layer} are {sorted(found)}")


def _check_sums(layer: str, found: State, shapes: Mapping[str, tuple[int, ...]], count: Any, wanted: int) -> None:
    if not _is_count(count) or count != wanted:
        raise ReplyError(f"its sums of layer {layer} are over {count!r}, not over {wanted}")
    for name, shape in shapes.items():
        if found[name].dtype != torch.float64 or tuple(found[name].shape) != shape:
            raise ReplyError(f"its {name} of layer {layer} is of shape {tuple(found[name].shape)}, not {shape}")
    if not is_finite(found):
        raise ReplyError(f"its sums of layer {layer} are not finite")


def _unpacked(triangle: Tensor, size: int) -> Tensor:
    rows, columns = torch.triu_indices(size, size)
    full = torch.empty(size, size, dtype=triangle.dtype)
    full[rows, columns] = triangle
    full[columns, rows] = triangle
    return full


def _read_part(tensors: State, split: Split) -> State:
    """Exactly the shared numbers of the split, in double precision and finite."""
    part = {name.removeprefix("part/"): tensor for name, tensor in tensors.items()}
    wanted = shared_shapes(split)
    if part.keys() != wanted.keys():
        odd = sorted(part.keys() ^ wanted.keys())
        raise ReplyError(f"its part has other tensors than the shared ones: {odd[:3]}")
    for name, shape in wanted.items():
        if part[name].dtype != torch.float64 or tuple(part[name].shape) != shape:
            found = f"{tuple(part[name].shape)} of {str(part[name].dtype).removeprefix('torch.')}"
            raise ReplyError(f"its part of {name} is {found}, not {shape} of float64")
    if not is_finite(part):
        raise ReplyError("its part is not finite")
    return part


def shared_shapes(split: Split) -> dict[str, tuple[int, ...]]:
    """The tensors of a client's part: whole ones, and of those decided by element the shared numbers in a row."""
    return {
        name: (int(split.mask(name).sum()),) if name in split.cut else tuple(shape)
        for name, shape in split.shapes.items()
        if name not in split.personal_tensors
    }


def weighted(state: State, samples: int) -> State:
    """n_k·state in double precision: exact for single precision weights."""
    return {name: tensor.double() * samples for name, tensor in state.items()}


def _samples(packet: Packet) -> int:
    samples: Any = packet.values.get("samples")
    if not _is_count(samples) or samples < 1:
        raise ReplyError(f"its size is {samples!r}; a positive whole number is allowed")
    return int(samples)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
