"""Requests over Flower's messages: who is who, who answers, who does not. Flower's own records, no process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from helpers import message
from loopback import deployment, nodes

from fedfac.engine.flower import server, wire
from fedfac.engine.flower.grid import GridTransport, from_content, to_content
from fedfac.engine.flower.node import Node
from fedfac.engine.flower.settings import Deployment
from fedfac.engine.flower.wire import Packet, Request
from fedfac.errors import RunError
from fedfac.run import RunDirectory
from fedfac.state import same


class PostOffice:
    """What the transport uses of Flower's grid; nodes are functions of a request."""

    def __init__(self, **names: str | None) -> None:
        """Nodes by their number (``_7``) and the name that they give; None: they never answer."""
        self.nodes = {int(number.lstrip("_")): name for number, name in names.items()}
        self._ids = count()
        self._replies: dict[str, Message] = {}
        self.sent: list[tuple[int, str]] = []

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        ids = []
        for sent in messages:
            identity = f"m{next(self._ids)}"
            sent.metadata.__dict__["_message_id"] = identity
            node = sent.metadata.dst_node_id
            self.sent.append((node, sent.metadata.message_type))
            if self.nodes[node] is not None:
                self._replies[identity] = self.answer(node, sent)
            ids.append(identity)
        return ids

    def answer(self, node: int, sent: Message) -> Message:
        request = Request.read(from_content(sent.content))
        if self.nodes[node] == "crashed":
            return Message(Error(code=8, reason="secret"), reply_to=sent)
        if self.nodes[node] == "junk":
            return Message(RecordDict({"values": ConfigRecord({"json": 3})}), reply_to=sent)
        if request.action == wire.HELLO:
            hello = wire.hello_reply(str(self.nodes[node]), (3,), 2, samples=5)
            return Message(to_content(replace(hello, to=request.key)), reply_to=sent)
        return Message(to_content(Packet({"round": request.round}, to=request.key)), reply_to=sent)

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(identity) for identity in list(ids)[::-1] if identity in self._replies]


@pytest.fixture(autouse=True)
def as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages bear the run that the process belongs to."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def transport(office: PostOffice, deadline: float = 0.05) -> GridTransport:
    grid: Any = office
    return GridTransport(grid, deadline)


def test_nodes_are_asked_once_who_they_are() -> None:
    office = PostOffice(_7="north", _8="south")
    there = transport(office)
    assert there.meet() == there.meet() == {"north": 7, "south": 8}
    assert office.sent == [(7, "query.hello"), (8, "query.hello")]
    office.nodes[9] = "west"
    assert there.wait_for(3) == {"north": 7, "south": 8, "west": 9}
    del office.nodes[7]
    assert there.wait_for(3, ["north", "west"]) == {"west": 9}


def test_a_name_belongs_to_the_node_that_holds_the_key(caplog: pytest.LogCaptureFixture) -> None:
    office = PostOffice(_7="north", _8="north")
    with caplog.at_level(logging.WARNING):
        there = transport(office)
        assert there.meet() == {"north": 7}
        assert "node 8 is not taken in: it says that it is 'north', but that is node 7" in caplog.text
        there.bind(["north"], {"north": 7})
        del office.nodes[7]
        office.nodes[9] = "north"
        assert there.meet() == {}
    loose = transport(PostOffice(_9="north"))
    loose.bind(["north"], {})
    assert loose.meet() == {"north": 9}
    strict = transport(PostOffice(_9="north"))
    strict.bind(["north"], {"north": 7})
    assert strict.meet() == {}


def test_every_client_has_an_answer_or_a_reason() -> None:
    office = PostOffice(_1="a", _2="b", _3="c", _4="d")
    there = transport(office)
    there.meet()
    there.bind(["a", "b", "c", "d", "e"], {})
    office.nodes |= {2: None, 3: "crashed", 4: "junk"}
    answers = there.exchange({client: Request(wire.TRAIN, round=5) for client in range(5)})
    assert list(answers) == list(range(5))
    assert answers[0].packet is not None
    assert answers[0].packet.values == {"round": 5}
    assert {client: answer.problem for client, answer in answers.items() if client} == {
        1: "no reply within 0.05 s",
        2: "its node failed (CLIENT_APP_CRASHED)",
        3: "the reply of node 4 was refused: it is not a fedfac message",
        4: "its node is not connected",
    }


def test_a_node_that_was_not_taken_in_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    office = PostOffice(_1="junk")
    there = transport(office)
    assert there.meet() == there.meet() == {}
    assert len(office.sent) == 1
    office.nodes[1] = "a"
    monkeypatch.setattr("fedfac.engine.flower.grid.time.monotonic", lambda: 1e12)
    assert there.meet() == {"a": 1}


class Answering(PostOffice):
    """Nodes that answer their hello as a test says."""

    def __init__(self, change: Callable[[Packet], Packet], **names: str | None) -> None:
        super().__init__(**names)
        self.change = change

    def answer(self, node: int, sent: Message) -> Message:
        request = Request.read(from_content(sent.content))
        hello = replace(wire.hello_reply(str(self.nodes[node]), (3,), 2, samples=5), to=request.key)
        return Message(to_content(self.change(hello)), reply_to=sent)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda hello: replace(hello, to="///0/00"), "it answers another request: '///0/00', not '/0/hello/0/"),
        (lambda hello: Packet({**hello.values, "name": "a\x1b[2J"}, to=hello.to), "its name is 'a?[2J'"),
        (lambda hello: Packet({**hello.values, "classes": 10**9}, to=hello.to), "Expected `int` <= 100000"),
        (lambda hello: Packet({**hello.values, "samples": 2**53 - 1}, to=hello.to), "at most 10000000 are allowed"),
        (lambda hello: Packet({"problem": "\x07" * 5000}, to=hello.to), "?" * 100),
        (lambda hello: Packet(hello.values, {"a": torch.zeros(2**19)}, hello.to), "bytes of tensors; at most 1048576"),
    ],
)
def test_a_hello_that_cannot_be_is_refused_in_one_printable_line(
    change: Callable[[Packet], Packet], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert transport(Answering(change, _7="north")).meet() == {}
    assert why in caplog.text
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 600


def test_a_run_that_nodes_refuse_ends_before_anything_is_made(tmp_path: Path) -> None:
    office: Any = Answering(lambda hello: replace(hello, values={**hello.values, "refuses": "measure"}), _7="a", _8="b")
    run = Deployment.read({"deploy.clients": 2, "deploy.deadline": 5.0, "deploy.out": str(tmp_path / "run")})
    text = message(RunError, lambda: server.train(office, run))
    assert text.startswith("2 of 2 nodes refuse this run (a, b): its owner has not agreed to be measured")
    assert text.endswith("--node-config 'share-weights=true'")
    assert not (tmp_path / "run").exists()
    assert {kind for _, kind in office.sent} == {"query.hello"}


class Hospitals(PostOffice):
    """Real nodes behind Flower's records; what the server has on disk is noted when a node is asked."""

    def __init__(self, made: Sequence[Node], out: Path) -> None:
        super().__init__(**{f"_{number}": node.config.name for number, node in enumerate(made, start=10)})
        self.made, self.out = made, out
        self.dies_at: tuple[str, int] | None = None
        self.on_disk: list[tuple[int, int]] = []

    def answer(self, node: int, sent: Message) -> Message:
        request = Request.read(from_content(sent.content))
        if (request.action, request.round) == self.dies_at:
            raise KeyboardInterrupt
        if request.action == wire.TRAIN:
            saved = RunDirectory.read(self.out).checkpoint()
            self.on_disk.append((request.round, 0 if saved is None else saved.round))
        return Message(to_content(self.made[node - 10].answer(request)), reply_to=sent)


def hospitals(folder: Path, method: str, **changes: Any) -> tuple[Any, Deployment]:
    """A grid of real nodes, and a run on them."""
    out = folder / "run"
    more = {"deploy__clients": 4, "deploy__deadline": 30.0, "deploy__out": str(out), "train__evaluate_every": 1}
    run = deployment(method, **(more | changes))
    return Hospitals(nodes(run, folder / "nodes", **{"share-weights": True}), out), run


@pytest.mark.parametrize("dies_at", [(wire.TRAIN, 2), (wire.COLLECT, 2), (wire.EVALUATE, 2), (wire.TRAIN, 3)])
def test_a_server_that_dies_in_a_round_asks_for_the_same_again_and_nodes_answer(
    dies_at: tuple[str, int], tmp_path: Path
) -> None:
    """Nodes only go forward: the server has every round on disk before it asks for the next."""
    straight, run = hospitals(tmp_path / "straight", "fedfac")
    whole = server.train(straight, run)
    grid, run = hospitals(tmp_path / "killed", "fedfac")
    grid.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        server.train(grid, run)
    grid.dies_at = None
    result = server.train(grid, run)
    assert result.records == whole.records
    assert all(not record["left_out"] and "not_tested" not in record for record in result.records)
    assert same(result.server, whole.server)
    assert all(disk == asked - 1 for office in (straight, grid) for asked, disk in office.on_disk)


def test_who_has_more_samples_than_the_server_allows_is_named(tmp_path: Path) -> None:
    grid, run = hospitals(tmp_path, "fedavg", deploy__most_samples=20, deploy__deadline=0.1)
    text = message(RunError, lambda: server.train(grid, run))
    assert text.startswith(
        "2 of 4 nodes came within 0.1 s (0, 1). Not taken in: node 12: it says 22 samples; at most 20 "
    )
    assert "node 13: it says 27 samples" in text
