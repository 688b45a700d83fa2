"""What crosses the network: it comes back as it was, and what is not what was asked for is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import bitwise, counted, message
from hypothesis import given
from hypothesis import strategies as st

from fedfac.anatomy import Anatomy
from fedfac.conformance import small_model
from fedfac.engine.flower import wire
from fedfac.engine.flower.wire import Packet, ReplyError, Request
from fedfac.errors import RunError
from fedfac.evaluate import Score
from fedfac.moments import Moments, Spread
from fedfac.split import Split
from fedfac.state import references

MODEL = small_model()
ANATOMY = Anatomy.of(MODEL)
CONV = ANATOMY.layers[0]
SPLIT = Split.of(ANATOMY, layers=[CONV], personal=["7.weight", "7.bias"]).with_masks({"0": [True, False] * 3})
SIZES = {"0": (6, 18)}
NOT = "it is not what was asked for: "


def moments() -> Moments:
    return Moments.of(CONV, references(MODEL))


def part(samples: int = 5) -> dict[str, torch.Tensor]:
    return wire.weighted(SPLIT.shared(references(MODEL)), samples)


def sent(packet: Packet) -> Packet:
    return Packet.unpack(*packet.pack())


def test_a_request_arrives_as_it_was_sent() -> None:
    request = Request(
        "train",
        run="0123456789abcdef",
        round=3,
        client=2,
        classes=None,
        last=1,
        masks=SPLIT.masks,
        server=counted(SPLIT.shapes),
        measure=True,
    )
    came = Request.read(sent(request.packet()))
    assert bitwise(came.server, request.server)
    assert {k: v for k, v in vars(came).items() if k != "server"} == {
        k: v for k, v in vars(request).items() if k != "server"
    }


def test_what_a_client_trained_arrives_bit_by_bit() -> None:
    own = moments()
    came = wire.read_train(sent(wire.train_reply(5, 0.25, {"0": own}, part())), SPLIT, SIZES, collect=True)
    assert (came.samples, came.loss) == (5, 0.25)
    found = came.measured["0"]
    assert isinstance(found, Moments)
    assert found.n == own.n
    assert bitwise({"t": found.total, "p": found.products}, {"t": own.total, "p": own.products})
    assert bitwise(came.part, part())


@given(st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_moments_cost_half_when_nothing_is_lost_by_it(elements: int, rows: int, symmetric: bool) -> None:
    z = torch.rand(elements, rows, dtype=torch.float64)
    products = z @ z.T
    products = (products + products.T) / 2
    if not symmetric:
        products[0, -1] *= 1 - 1e-12
    packet = wire.train_reply(1, 0.0, {"a": Moments(rows, z.sum(1), products)}, None)
    numbers = packet.tensors["sums/a/products"].numel()
    if symmetric:
        assert numbers == elements * (elements + 1) // 2
    came = wire.read_train(sent(packet), SPLIT, {"a": (elements, rows)}, collect=False).measured["a"]
    assert isinstance(came, Moments)
    assert torch.equal(came.products, products)


def test_a_spread_and_scores_arrive() -> None:
    spread = Spread.of(CONV, references(MODEL))
    came = wire.read_train(sent(wire.train_reply(1, 0.0, {"0": spread}, None)), SPLIT, SIZES, collect=False)
    found = came.measured["0"]
    assert isinstance(found, Spread)
    assert torch.equal(found.total, spread.total)
    score = Score(3, 10, 7, 0.5, {"mse": 1.5})
    read = wire.read_scores(sent(wire.evaluate_reply({"test": score})), 3, ["mse"], classes=True)
    assert read == {"test": score}
    with pytest.raises(RunError, match="a str cannot be sent: the wire knows Moments and Spread"):
        wire.train_reply(1, 0.0, {"0": "text"}, None)


@pytest.mark.parametrize(
    ("text", "data", "why"),
    [
        (None, b"", "it is not a fedfac message"),
        ("{}", "text", "it is not a fedfac message"),
        ("{", Packet({}).pack()[1], "it cannot be read (DecodeError)"),
        ('{"loss": NaN}', Packet({}).pack()[1], "it cannot be read (DecodeError)"),
        ("{}", b"junk", "it cannot be read (RunError)"),
        ("[" * 100_000, b"", "it cannot be read (RecursionError)"),
        ("[]", Packet({}).pack()[1], "it is of message format None; this version of fedfac reads format 2"),
        ('{"format": 1}', Packet({}).pack()[1], "it is of message format 1; this version of fedfac reads format 2"),
        ('{"format": 2, "to": 3, "values": {}}', Packet({}).pack()[1], NOT + "Expected `str`, got `int` - at `$.to`"),
        (" " * (2**20 + 1), b"", "it has 1048577 characters of values; at most 1048576 are allowed"),
    ],
)
def test_what_is_no_message_is_refused(text: Any, data: Any, why: str) -> None:
    assert message(ReplyError, lambda: Packet.unpack(text, data)) == why


def changed(values: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Packet:
    """A good train reply with some of it replaced (None: left out); __ stands for a slash."""
    good = wire.train_reply(5, 0.25, {"0": moments()}, part())
    new = {name.replace("__", "/").replace("_at_", "."): t for name, t in tensors.items()}
    kept = {name: t for name, t in good.tensors.items() if name not in new}
    return Packet({**good.values, **(values or {})}, kept | {n: t for n, t in new.items() if t is not None})


@pytest.mark.parametrize("size", [0, -1, 1.5, "5", None, True, 2**60, [5]])
def test_a_size_that_is_not_a_positive_whole_number_is_refused(size: Any) -> None:
    packet = sent(changed({"samples": size}))
    for read in (
        lambda: wire.read_train(packet, SPLIT, SIZES, collect=True),
        lambda: wire.read_collect(Packet({"samples": size}, part()), SPLIT, 5),
    ):
        with pytest.raises(ReplyError, match=r"`int`.*\$\.samples|its size|at most 10000000 are|weighs its part"):
            read()


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (changed({"loss": float("inf")}), NOT + "Expected `float`, got `null` - at `$.loss`"),
        (changed({"loss": 1e39}), NOT + "Expected `float` <= 3.4028234663852886e+38 - at `$.loss`"),
        (changed({"loss": "0.1"}), NOT + "Expected `float`, got `str` - at `$.loss`"),
        (changed({"counts": None}), NOT + "Expected `object`, got `null` - at `$.counts`"),
        (changed({"more": "x" * 1000}), NOT + "Object contains unknown field `more`"),
        (changed({"counts": {"0": 17}}), "its sums of layer 0 are over 17, not over 18"),
        (changed({"counts": {}}), "its sums of layer 0 are over None, not over 18"),
        (changed(sums__0__total=None), "its sums of layer 0 are ['products']"),
        (changed(sums__0__total=torch.zeros(7).double()), "its total of layer 0 is of shape (7,), not (6,)"),
        (changed(sums__0__total=torch.zeros(6)), "its total of layer 0 is of shape (6,), not (6,)"),
        (changed(sums__0__total=torch.full((6,), float("nan")).double()), "its sums of layer 0 are not finite"),
        (changed(sums__0__products=torch.zeros(20).double()), "its products of layer 0 is of shape (20,), not (21,)"),
        (changed(part__0_at_bias=None), "its part has other tensors than the shared ones: ['0.bias']"),
        (
            changed(part__7_at_bias=torch.zeros(3).double()),
            "its part has other tensors than the shared ones: ['7.bias']",
        ),
        (
            changed(part__0_at_bias=torch.zeros(6).double()),
            "its part of 0.bias is (6,) of float64, not (3,) of float64",
        ),
        (changed(part__0_at_bias=torch.zeros(3)), "its part of 0.bias is (3,) of float32, not (3,) of float64"),
        (changed(part__0_at_bias=torch.tensor([0, 1, float("inf")]).double()), "its part is not finite"),
        (wire.problem_reply("its loss is nan"), "its loss is nan"),
    ],
)
def test_a_part_or_sums_that_nobody_asked_for_are_refused(packet: Packet, why: str) -> None:
    assert message(ReplyError, lambda: wire.read_train(sent(packet), SPLIT, SIZES, collect=True)) == why


def test_tensors_that_nobody_asked_for_are_refused() -> None:
    packet = sent(wire.train_reply(5, 0.1, None, part()))
    why = message(ReplyError, lambda: wire.read_train(packet, SPLIT, {}, collect=False))
    assert why.startswith("it sent tensors that nobody asked for: ['part/0.bias'")
    why = message(ReplyError, lambda: wire.read_collect(sent(wire.collect_reply(6, part(6))), SPLIT, 5))
    assert why == "it trained with 5 samples, and weighs its part by 6"


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (None, NOT + "Expected `object`, got `null` - at `$.scores`"),
        ({}, "it has no test scores"),
        ({"test": []}, NOT + "Expected `object`, got `array` - at `$.scores[...]`"),
        ({"samples": -1}, NOT + "Expected `int` >= 0 - at `$.scores[...].samples`"),
        ({"samples": 2**53}, f"it says {2**53} samples; at most 10000000 are allowed ([deploy] most_samples)"),
        ({"correct": 11}, "it counts 11 correct answers of 10"),
        ({"correct": None}, "it counts None correct answers of 10"),
        ({"loss": float("nan")}, NOT + "Expected `float`, got `null` - at `$.scores[...].loss`"),
        ({"loss": 1e308}, NOT + "Expected `float` <= 3.4028234663852886e+38 - at `$.scores[...].loss`"),
        ({"metrics": {}}, "its metrics are not ['mse']"),
        ({"metrics": {"mse": "x" * 1000}}, NOT + "Expected `float`, got `str` - at `$.scores[...].metrics[...]`"),
    ],
)
def test_scores_that_cannot_be_are_refused(scores: Any, why: str) -> None:
    good = {"samples": 10, "correct": 7, "loss": 0.5, "metrics": {"mse": 1.0}}
    if scores and not scores.keys() & {"test", "validation"}:
        scores = {"test": good | scores}
    packet = sent(Packet({"scores": scores}))
    assert message(ReplyError, lambda: wire.read_scores(packet, 0, ["mse"], classes=True)) == why


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"name": ""}, "its name is ''; a name is up to 100 printable characters"),
        ({"name": "a\x1b[2J\nb"}, "its name is 'a?[2J?b'; a name is up to 100 printable characters"),
        ({"name": "n" * 101}, f"its name is '{'n' * 39}…'; a name is up to 100 printable characters"),
        ({"shape": [3, 0]}, NOT + "Expected `int` >= 1 - at `$.shape[1]`"),
        ({"shape": [2**26, 2]}, "the shape of its samples is [67108864, 2]; a sample has at most 67108864 numbers"),
        ({"classes": 0}, NOT + "Expected `int` >= 1 - at `$.classes`"),
        ({"classes": 10**9}, NOT + "Expected `int` <= 100000 - at `$.classes`"),
        ({"samples": 2**53 - 1}, f"it says {2**53 - 1} samples; at most 10000000 are allowed ([deploy] most_samples)"),
        ({"refuses": "x\x07"}, "it refuses for a reason of its own: 'x?'"),
    ],
)
def test_a_node_that_does_not_say_who_it_is_is_refused(values: dict[str, Any], why: str) -> None:
    good = wire.hello_reply("north", (3,), 2, samples=48)
    assert wire.read_hello(sent(good)) == wire.Hello("north", (3,), 2, 48)
    assert message(ReplyError, lambda: wire.read_hello(sent(Packet({**good.values, **values})))) == why
