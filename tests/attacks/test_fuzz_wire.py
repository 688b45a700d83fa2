"""Mutated messages and files: what comes out is a valid object, or fedfac's own error. More: ``FEDFAC_FUZZ=100000``."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import counted
from loopback import CLASSES, RUN, SHAPE, deployment, nodes

from fedfac.engine.flower import wire
from fedfac.engine.flower.consent import Allowed
from fedfac.engine.flower.folder import About, Folder, Held
from fedfac.engine.flower.ledger import Ledger
from fedfac.engine.flower.wire import Packet, Request
from fedfac.errors import FedfacError, RunError
from fedfac.evaluate import Score
from fedfac.moments import Moments
from fedfac.state import digest, references

MUTATIONS = int(os.environ.get("FEDFAC_FUZZ", "400"))
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**53,
    2**70,
    1.5,
    -0.0,
    1e308,
    "",
    "²",
    "\x1b[2J",
    "\ud800",
    "x" * 10_000,
    [],
    {},
]
VALUES += [[[]], {"a": {}}, "101", "NaN", [1] * 100, {"": None}]
RUN_OF = deployment("fedfac")
MODEL = RUN_OF.model(SHAPE, CLASSES)
PLAN = RUN_OF.plan(MODEL)[1]
SPLIT = PLAN.split.with_masks({"fc1": (True, False) * 5})
SIZES = {"fc1": (10, 12)}


def weights(samples: int) -> dict[str, torch.Tensor]:
    return wire.weighted(SPLIT.shared(references(MODEL)), samples)


def moments() -> Moments:
    z = references(MODEL)["fc1.weight"].double()
    return Moments(12, z.sum(1), z @ z.T)


GOOD: dict[str, tuple[Packet, Callable[[Packet], object]]] = {
    "request": (
        Request("train", run=RUN, round=3, client=2, classes=3, masks=SPLIT.masks, server=references(MODEL)).packet(),
        Request.read,
    ),
    "hello": (wire.hello_reply("north", (2, 6), 3, samples=18, refuses="measure"), wire.read_hello),
    "train": (
        wire.train_reply(18, 0.5, {"fc1": moments()}, weights(18)),
        lambda packet: wire.read_train(packet, SPLIT, SIZES, collect=True),
    ),
    "collect": (wire.collect_reply(18, weights(18)), lambda packet: wire.read_collect(packet, SPLIT, 18)),
    "evaluate": (
        wire.evaluate_reply({"test": Score(0, 6, 3, 0.5, {"mse": 1.5}), "validation": Score(0, 6, 3, 0.5, {"mse": 1})}),
        lambda packet: wire.read_scores(packet, 0, ["mse"], classes=True),
    ),
}


def mutations(text: str, data: bytes, seed: str) -> Iterator[tuple[Any, Any]]:
    """A message with some of its values, its text or its bytes changed."""
    draw = random.Random(seed)
    for _ in range(MUTATIONS):
        kind = draw.randrange(4)
        if kind == 0:
            yield json.dumps(changed(json.loads(text), draw)), data
        elif kind == 1:
            yield garbled(text.encode(), draw).decode(errors="surrogateescape"), data
        elif kind == 2:
            yield text, garbled(data, draw)
        else:  # only the head of the tensors: their names, types and shapes
            yield text, garbled(data[:200], draw) + data[200:]


def changed(values: Any, draw: random.Random) -> Any:
    """The same JSON with one value somewhere replaced, removed or added."""
    if draw.random() < 0.2 or not isinstance(values, dict | list) or not values:
        return draw.choice(VALUES)
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    key = draw.choice(keys)
    if isinstance(values, dict) and draw.random() < 0.2:
        values[draw.choice(["", "more", "\x00", "x" * 1000])] = values.pop(key)
    else:
        values[key] = changed(values[key], draw)
    return values


def garbled(content: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut out or doubled."""
    made = bytearray(content)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(made) + 1)
        kind = draw.randrange(3)
        if kind == 0 and at < len(made):
            made[at] = draw.randrange(256)
        elif kind == 1:
            del made[at : at + draw.randrange(1, 20)]
        else:
            made[at:at] = made[at : at + draw.randrange(1, 20)]
    return bytes(made)


@pytest.mark.parametrize("name", GOOD)
def test_a_mutated_message_is_read_or_refused(name: str) -> None:
    packet, read = GOOD[name]
    text, data = packet.pack()
    read(Packet.unpack(text, data))  # the good one is good
    refused = []
    for mutated in mutations(text, data, name):
        try:
            read(Packet.unpack(*mutated))
        except FedfacError as error:
            refused.append(str(error))
    assert len(refused) > MUTATIONS // 4
    assert all(text.isprintable() and len(text) <= 700 for text in refused)


def test_a_node_answers_whatever_it_is_asked(tmp_path: Path) -> None:
    node = nodes(RUN_OF, tmp_path, **{"share-weights": True})[0]
    draw = random.Random("requests")
    for number in range(max(20, MUTATIONS // 20)):
        values = {
            "action": draw.choice(["hello", "train", "collect", "evaluate"]),
            "run": draw.choice([RUN, "f" * 16]),
            "round": draw.choice([0, 1, number, 10**9]),
            "client": draw.choice([0, 0, 1, 10**7]),
            "classes": draw.choice([3, 3, None, 1]),
            "last": draw.choice([0, number, 10**9]),
            "masks": draw.choice([{}, {"fc1": "10" * 5}, {"fc1": "1"}, {"fc2": "111"}, {"": ""}]),
            "measure": draw.random() < 0.5,
            "collect": draw.random() < 0.5,
            "score": draw.random() < 0.5,
            "nonce": "00",
        }
        server = draw.choice([references(MODEL), {}, counted({"fc1.weight": (10, 12)})])
        request = Request.read(Packet.unpack(*Packet(values, server).pack()))
        reply = Packet.unpack(*node.answer(request).pack())
        assert reply.to == request.key
        assert reply.values.keys() & {"problem", "samples", "scores", "name"}


FILES: dict[str, Callable[[Folder], object]] = {
    "kept-000001": lambda folder: folder.kept(1),
    "held-000002": lambda folder: folder.held(2),
    "model": lambda folder: folder.model(),
    "ledger": lambda folder: folder.ledger(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_mutated_file_is_read_or_refused(name: str, sealed: bool, tmp_path: Path) -> None:
    """As it lies there, and with a checksum that fits."""
    folder = Folder(tmp_path, RUN, "north")
    state = counted({"a": (3, 2), "b": (4,)})
    folder.keep(1, state, last=0)
    folder.hold(2, Held(3, SPLIT.to_json(), Allowed(), once=True), state)
    folder.set_model(About(1, 0, 0, {"fc1": "10"}, [2], 3, {"a": 1}, {}), state)
    folder.write_ledger(Ledger(run="a", trained=3, masks={"fc1": "10"}, answer={"scores": {}}))
    path = folder.path / name
    check, _, body = path.read_bytes().partition(b"\n")
    assert FILES[name](folder) is not None
    draw = random.Random(name)
    refused = []
    for _ in range(MUTATIONS // 4):
        mutated = garbled(body, draw)
        path.write_bytes((digest(mutated).encode() if sealed else check) + b"\n" + mutated)
        try:
            FILES[name](folder)
        except RunError as error:
            refused.append(str(error))
        else:
            assert sealed or mutated == body
    assert refused
    assert all(str(path) in text for text in refused)
