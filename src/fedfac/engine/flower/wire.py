"""What crosses the network: requests of the server, replies of the clients, and the checks of both.

A message is a few plain values (JSON) and some tensors (safetensors): no code can hide in it. A client's reply
holds numbers of these kinds only:

- hello: its name, the shape of a sample, the numbers of classes and samples, and whether it takes part;
- train: n_k, its mean loss, and what the rule measures (sums over the rows of a layer's weights);
- collect: n_k and n_k·(shared part), in double precision;
- evaluate: counts, mean loss and metrics of its held-out samples.

Each reply arrives by itself, before it is added up: the server can look at it.

Replies are not trusted. The server knows every name and shape that a reply must have, and refuses any other, any
number that is not finite or that the tensor's type cannot hold, and any size out of bounds: ``ReplyError`` says what
was wrong. A reply names the request that it answers (run, round, action, client and a number used once), so an earlier
reply is not taken for a new one. Requests are checked by the same types, and bounded by the node: :mod:`.node`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from fedfac.errors import FedfacError, RunError
from fedfac.evaluate import Score
from fedfac.moments import Additive, Moments, Spread
from fedfac.split import Split, mask_of, mask_text
from fedfac.state import State, from_bytes, is_finite, to_bytes

FORMAT = 2
HELLO, TRAIN, COLLECT, EVALUATE = "hello", "train", "collect", "evaluate"
HEADER = 1 << 20  # bytes of plain values, at most
BODY = 1 << 36  # bytes of tensors where nobody knows better
TEXT = 500  # characters of a text that goes into a record or a log
LARGEST = float(torch.finfo(torch.float32).max)  # of any figure, and of any weight
SAMPLES = 10_000_000  # of one client, where [deploy] most_samples says nothing else
CLASSES = 100_000
ROUNDS = 1_000_000_000
PIXELS = 1 << 26  # numbers of one sample
SLACK = 1e-9  # relative, for the rounding of sums in double precision

# Why a node may refuse what it is asked for, by kind: the server has the words, a node sends the kind only.
MEASURE, MASKS, ROUND, EVALUATION, CHANGED = "measure", "masks", "round", "evaluation", "changed"
REFUSALS: Mapping[str, str] = {
    MEASURE: "its owner has not agreed to be measured: the moments of a layer, together with the rows of it that are "
    "shared, give a server the personal rows too. Choose a method that does not measure what is personal "
    "(fedfac-plus with schedule='dynamic' and joint=True, fedper), or let the owner agree: "
    "--node-config 'share-weights=true'",
    MASKS: "the masks are not those that the method makes, or not those of before: more would leave than the run says",
    ROUND: "rounds only go forward, and a round is repeated only with the same state and masks. To go back, let the "
    "owner agree: --node-config 'go-back=true'",
    EVALUATION: "it evaluates once in a round, the newest, and only in rounds that the run's config evaluates. To go "
    "back, let the owner agree: --node-config 'go-back=true'",
    CHANGED: "the method, model, data or training of this run are not those with which it began",
}


class ReplyError(FedfacError):
    """A reply is not what was asked for; it is refused, and its sender is left out of the round.

    The text may quote the reply: it is cut short and freed of control characters. ``kind`` says why a node refused.
    """

    def __init__(self, text: str, kind: str | None = None) -> None:
        super().__init__(clean(text))
        self.kind = kind


class RequestError(RunError):
    """A request is not one that this version of fedfac sends."""


class RefusedError(RunError):
    """A node does not do what the server asks for; ``kind``, one of ``REFUSALS``, is all that the server learns."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"refused ({detail}): {REFUSALS[kind]}")
        self.kind = kind


def clean(text: str, most: int = TEXT) -> str:
    """A text of somebody else's, for a record or a log: one short printable line.

    >>> clean("a\\x1b[31mb\\nc")
    'a?[31mb?c'
    """
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut)


def is_name(name: object) -> bool:
    """Whether this can be a client's name: short, printable, without blanks around it."""
    return isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable() and name == name.strip()


@dataclass(frozen=True)
class Packet:
    """Plain values and tensors, on their way; ``to`` is the request that a reply answers."""

    values: Mapping[str, Any]
    tensors: State = field(default_factory=dict)
    to: str = ""

    def pack(self) -> tuple[str, bytes]:
        """As text and bytes. A number that is not finite becomes null, which no reader takes for a number."""
        envelope = {"format": FORMAT, "to": self.to, "values": dict(self.values)}
        return msgspec.json.encode(envelope).decode(), to_bytes(self.tensors)

    @classmethod
    def unpack(cls, text: object, data: object, most: int = BODY) -> Packet:
        """The inverse of :meth:`pack`, of anything that came: at most so many bytes of tensors."""
        if not isinstance(text, str) or not isinstance(data, bytes):
            raise ReplyError("it is not a fedfac message")
        for found, allowed, what in (
            (len(text), HEADER, "characters of values"),
            (len(data), most, "bytes of tensors"),
        ):
            if found > allowed:
                raise ReplyError(f"it has {found} {what}; at most {allowed} are allowed")
        try:
            plain = msgspec.json.decode(text)
            tensors = from_bytes(data)
        except (ValueError, RecursionError, RunError) as error:
            raise ReplyError(f"it cannot be read ({type(error).__name__})") from error
        version = plain.get("format") if isinstance(plain, dict) else None
        if version != FORMAT:
            raise ReplyError(f"it is of message format {version!r}; this version of fedfac reads format {FORMAT}")
        envelope = _convert(plain, _Envelope)
        return cls(envelope.values, tensors, envelope.to)


Name = Annotated[str, Meta(max_length=300)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Figure = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]  # NaN is neither
Classes = Annotated[int, Meta(ge=1, le=CLASSES)]
Round = Annotated[int, Meta(ge=0, le=ROUNDS)]
Masks = dict[Name, Annotated[str, Meta(pattern=r"^[01]*\Z")]]
Header = TypeVar("Header")


class _Envelope(Struct, forbid_unknown_fields=True):
    format: int
    to: Annotated[str, Meta(max_length=200)]
    values: dict[str, Any]


class _Request(Struct, forbid_unknown_fields=True):
    action: Literal["hello", "train", "collect", "evaluate"]
    run: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]
    round: Round
    client: Annotated[int, Meta(ge=0, le=10**7)]
    classes: Classes | None
    last: Round
    masks: Masks
    measure: bool
    collect: bool
    score: bool
    nonce: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,32}\Z")]


class _Hello(Struct, forbid_unknown_fields=True):
    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=1, le=PIXELS)]], Meta(max_length=8)]
    classes: Classes | None
    samples: Annotated[int, Meta(ge=1)]
    refuses: str | None = None


class _Trained(Struct, forbid_unknown_fields=True):
    samples: Annotated[int, Meta(ge=1)]
    loss: Figure
    counts: dict[Name, Count]


class _Collected(Struct, forbid_unknown_fields=True):
    samples: Annotated[int, Meta(ge=1)]


class _Score(Struct, forbid_unknown_fields=True):
    samples: Count
    correct: Count | None
    loss: Figure
    metrics: dict[Name, Figure]


class _Scores(Struct, forbid_unknown_fields=True):
    scores: dict[Literal["test", "validation"], _Score]


def _convert(values: Any, kind: type[Header]) -> Header:
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ReplyError(f"it is not what was asked for: {error}") from None


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
    nonce: str = ""  # of this request and no other

    def packet(self) -> Packet:
        """The request, to be sent."""
        values = {name: value for name, value in vars(self).items() if name not in ("masks", "server")}
        return Packet(values | {"masks": {k: mask_text(m) for k, m in self.masks.items()}}, self.server)

    @property
    def key(self) -> str:
        """What a reply to this request, and to no other, must bear."""
        return f"{self.run}/{self.round}/{self.action}/{self.client}/{self.nonce}"

    @classmethod
    def read(cls, packet: Packet) -> Request:
        """The request as a client sees it."""
        try:
            values = msgspec.structs.asdict(_convert(packet.values, _Request))
        except ReplyError as error:
            raise RequestError(f"the server's request cannot be read: {error}") from error
        masks = {layer: mask_of(text) for layer, text in values.pop("masks").items()}
        return cls(**values, masks=masks, server=packet.tensors)


# ---------------------------------------------------------------- what clients reply


def hello_reply(
    name: str, shape: Sequence[int], classes: int | None, *, samples: int, refuses: str | None = None
) -> Packet:
    """Who a node is, what its samples look like, and why it would refuse this run, if it would."""
    values = {"name": name, "shape": list(shape), "classes": classes, "samples": samples}
    return Packet(values | ({} if refuses is None else {"refuses": refuses}))


def problem_reply(problem: str, kind: str | None = None) -> Packet:
    """The client could not do it, or would not: then ``kind`` says why."""
    return Packet({"problem": problem} | ({} if kind is None else {"kind": kind}))


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
class Limits:
    """What one client's reply may be, at most: ``largest`` is what the type of a tensor can hold."""

    samples: int = SAMPLES
    largest: Mapping[str, float] = field(default_factory=dict)
    announced: Mapping[int, int] = field(default_factory=dict)  # by client, the samples that it said it has

    @classmethod
    def of(cls, state: State, *, samples: int = SAMPLES, announced: Mapping[int, int] | None = None) -> Limits:
        """For the tensors of a model."""
        held = {
            name: min(LARGEST, torch.finfo(t.dtype).max if t.is_floating_point() else torch.iinfo(t.dtype).max)
            for name, t in state.items()
            if t.dtype != torch.bool
        }
        return cls(samples, held, announced or {})

    def check(self, samples: int, client: int | None = None) -> None:
        """Fail if that is more than a client may have, or far from what it said that it has."""
        if samples > self.samples:
            raise ReplyError(f"it says {samples} samples; at most {self.samples} are allowed ([deploy] most_samples)")
        known = None if client is None else self.announced.get(client)
        if known is not None and not known <= 2 * samples <= 4 * known:
            raise ReplyError(f"it says {samples} samples, and said {known} before: it may not jump")


ANY = Limits()


@dataclass(frozen=True)
class Trained:
    """A checked reply to a train request."""

    samples: int
    loss: float
    measured: Mapping[str, Additive]
    part: State


def check_problem(packet: Packet) -> None:
    """Fail if the client says that it could not do it, or would not."""
    problem = packet.values.get("problem")
    if problem is None:
        return
    kind = packet.values.get("kind")
    if isinstance(kind, str) and kind in REFUSALS:
        raise ReplyError(f"it refused: {REFUSALS[kind]}", kind)
    raise ReplyError(clean(str(problem), 200))


def check_answers(packet: Packet, request: Request) -> None:
    """Fail unless the reply is to this very request."""
    if packet.to != request.key:
        raise ReplyError(f"it answers another request: {packet.to!r}, not {request.key!r}")


@dataclass(frozen=True)
class Hello:
    """What a node says of itself; ``refuses`` is why it would not take part, one of ``REFUSALS``."""

    name: str
    shape: tuple[int, ...]
    classes: int | None
    samples: int
    refuses: str | None = None


def read_hello(packet: Packet, limits: Limits = ANY) -> Hello:
    """What a node says of itself."""
    check_problem(packet)
    found = _convert(packet.values, _Hello)
    if not is_name(found.name):
        raise ReplyError(f"its name is {clean(found.name, 40)!r}; a name is up to 100 printable characters")
    if math.prod(found.shape) > PIXELS:
        raise ReplyError(f"the shape of its samples is {found.shape}; a sample has at most {PIXELS} numbers")
    if found.refuses is not None and found.refuses not in REFUSALS:
        raise ReplyError(f"it refuses for a reason of its own: {clean(found.refuses, 40)!r}")
    limits.check(found.samples)
    return Hello(found.name, tuple(found.shape), found.classes, found.samples, found.refuses)


def read_train(
    packet: Packet,
    split: Split,
    sizes: Mapping[str, tuple[int, int]],
    *,
    collect: bool,
    limits: Limits = ANY,
    client: int | None = None,
) -> Trained:
    """n_k, loss, and exactly the sums that were asked for: ``sizes`` has (elements, fan-in) of the layers measured."""
    check_problem(packet)
    said = _convert(packet.values, _Trained)
    limits.check(said.samples, client)
    measured: dict[str, Additive] = {}
    tensors = dict(packet.tensors)
    for layer, size in sizes.items():
        prefix = f"sums/{layer}/"
        own = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        measured[layer] = _read_statistic(layer, size, said.counts.get(layer), own)
    part = _read_part(tensors, split, said.samples, limits) if collect else {}
    if not collect and tensors:
        raise ReplyError(f"it sent tensors that nobody asked for: {_few(tensors)}")
    return Trained(said.samples, said.loss, measured, part)


def read_collect(packet: Packet, split: Split, samples: int, limits: Limits = ANY) -> State:
    """n_k·(shared part), for the n_k that the client trained with."""
    check_problem(packet)
    found = _convert(packet.values, _Collected).samples
    if found != samples:
        raise ReplyError(f"it trained with {samples} samples, and weighs its part by {found}")
    return _read_part(packet.tensors, split, samples, limits)


def read_scores(
    packet: Packet,
    client: int,
    metrics: Sequence[str],
    *,
    classes: bool,
    limits: Limits = ANY,
) -> dict[str, Score]:
    """Evaluation counts of the held-out parts."""
    check_problem(packet)
    scores = _convert(packet.values, _Scores).scores
    if "test" not in scores:
        raise ReplyError("it has no test scores")
    for found in scores.values():
        limits.check(found.samples)
        if classes != (found.correct is not None) or (found.correct or 0) > found.samples:
            raise ReplyError(f"it counts {found.correct} correct answers of {found.samples}")
        wanted = sorted(metrics) if found.samples else []
        if sorted(found.metrics) != wanted:
            raise ReplyError(f"its metrics are not {wanted}")
    return {p: Score(client, s.samples, s.correct, s.loss, dict(s.metrics)) for p, s in scores.items()}


def _few(names: Mapping[str, Any]) -> str:
    return f"{[clean(name, 60) for name in sorted(names)[:3]]}"


def _read_statistic(layer: str, size: tuple[int, int], count: Any, found: State) -> Additive:
    """One client's moments or spread of a layer, of the layer's size, finite, and such as weights can have."""
    elements, rows = size
    if found.keys() == {"total", "products"}:
        packed = (elements * (elements + 1) // 2,)
        triangle = found["products"].ndim == 1
        wanted = {"total": (elements,), "products": packed if triangle else (elements, elements)}
        _check_sums(layer, found, wanted, count, rows)
        products = _unpacked(found["products"], elements) if triangle else found["products"]
        _check_moments(layer, rows, found["total"], products)
        return Moments(rows, found["total"], products)
    if found.keys() == {"total", "squares"}:
        _check_sums(layer, found, {"total": (elements, rows), "squares": (elements,)}, count, 1)
        _check_spread(layer, found["total"], found["squares"])
        return Spread(1, found["total"], found["squares"])
    raise ReplyError(f"its sums of layer {layer} are {_few(found)}")


def _check_sums(layer: str, found: State, shapes: Mapping[str, tuple[int, ...]], count: Any, wanted: int) -> None:
    if count != wanted:
        raise ReplyError(f"its sums of layer {layer} are over {count!r}, not over {wanted}")
    for name, shape in shapes.items():
        if found[name].dtype != torch.float64 or tuple(found[name].shape) != shape:
            raise ReplyError(f"its {name} of layer {layer} is of shape {tuple(found[name].shape)}, not {shape}")
    if not is_finite(found):
        raise ReplyError(f"its sums of layer {layer} are not finite")


def _check_moments(layer: str, rows: int, total: Tensor, products: Tensor) -> None:
    """Squares are not negative, and no sum is larger than they allow (Cauchy and Schwarz)."""
    squares = products.diagonal()
    length = squares.clamp_min(0).sqrt()
    most = torch.outer(length, length) * (1 + SLACK)
    fits = bool((squares >= 0).all()) and float(length.max()) <= math.sqrt(rows) * LARGEST
    fits = fits and bool((products.abs() <= most).all())
    if not fits or not bool((total.abs() <= length * math.sqrt(rows) * (1 + SLACK)).all()):
        raise ReplyError(f"its moments of layer {layer} are not those of any weights in single precision")


def _check_spread(layer: str, total: Tensor, squares: Tensor) -> None:
    """Those of one client: the squares are the squares of its sums."""
    if float(total.abs().max()) > LARGEST or not torch.allclose(squares, total.square().sum(1), rtol=SLACK, atol=0):
        raise ReplyError(f"its spread of layer {layer} is not that of any weights in single precision")


def _unpacked(triangle: Tensor, size: int) -> Tensor:
    rows, columns = torch.triu_indices(size, size)
    full = torch.empty(size, size, dtype=triangle.dtype)
    full[rows, columns] = triangle
    full[columns, rows] = triangle
    return full


def _read_part(tensors: State, split: Split, samples: int, limits: Limits) -> State:
    """Exactly the shared numbers of the split, in double precision, finite, and such as their type can hold."""
    part = {name.removeprefix("part/"): tensor for name, tensor in tensors.items()}
    wanted = shared_shapes(split)
    if part.keys() != wanted.keys() or len(part) != len(tensors):
        odd = dict.fromkeys(part.keys() ^ wanted.keys())
        raise ReplyError(f"its part has other tensors than the shared ones: {_few(odd)}")
    for name, shape in wanted.items():
        if part[name].dtype != torch.float64 or tuple(part[name].shape) != shape:
            found = f"{tuple(part[name].shape)} of {str(part[name].dtype).removeprefix('torch.')}"
            raise ReplyError(f"its part of {name} is {found}, not {shape} of float64")
    if not is_finite(part):
        raise ReplyError("its part is not finite")
    for name, tensor in part.items():
        largest = float(tensor.abs().max()) / samples if tensor.numel() else 0.0
        if largest > limits.largest.get(name, LARGEST):
            raise ReplyError(f"its part of {name} is up to {largest:.3g} a sample, more than its type can hold")
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
