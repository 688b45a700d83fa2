"""Requests and replies over Flower's message API.

A request is a message of type ``train.ACTION`` (or ``query.hello``, ``evaluate.evaluate``) with the plain values in a
``ConfigRecord`` and the tensors, as safetensors, in an ``ArrayRecord``, which Flower sends in pieces.

Who is who: a node says its client's name when it is first seen. With node authentication a node's number stays the
same over restarts, so a name belongs to the node that holds the key: no other node is taken for that client.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedfac.engine.flower import wire
from fedfac.engine.flower.engine import Answer
from fedfac.engine.flower.wire import Hello, Limits, Packet, ReplyError, Request
from fedfac.errors import RunError

log = logging.getLogger("fedfac")
PAUSE = 0.5  # seconds between two looks for replies
AGAIN = 30.0  # seconds until a node that was not taken in is asked again: it may have been mended
ERRORS = {code: name for name, code in vars(ErrorCode).items() if isinstance(code, int)}
TYPES = {
    wire.HELLO: "query.hello",
    wire.TRAIN: "train.train",
    wire.COLLECT: "train.collect",
    wire.EVALUATE: "evaluate.evaluate",
}


def to_content(packet: Packet) -> RecordDict:
    """A packet as Flower's records."""
    text, data = packet.pack()
    array = Array(dtype="uint8", shape=(len(data),), stype="safetensors", data=data)
    return RecordDict({"values": ConfigRecord({"json": text}), "tensors": ArrayRecord({"state": array})})


def from_content(content: RecordDict, most: int = wire.BODY) -> Packet:
    """The inverse of :func:`to_content`, of anything that came: at most so many bytes of tensors."""
    try:
        text, data = content["values"]["json"], content["tensors"]["state"].data  # type: ignore[union-attr]
    except (KeyError, TypeError, AttributeError) as error:
        raise ReplyError("it is not a fedfac message") from error
    return Packet.unpack(text, data, most)


class GridTransport:
    """Clients on SuperNodes, by number once :meth:`bind` has said which name has which."""

    def __init__(self, grid: Grid, deadline: float, limits: Limits = wire.ANY) -> None:
        self.grid, self.deadline, self.limits = grid, deadline, limits
        self.hellos: dict[int, Hello] = {}  # by node
        self._refused: dict[int, float] = {}  # by node, until when
        self.reasons: dict[int, str] = {}  # by node, why it is not taken in
        self._nodes: dict[str, int] = {}
        self._owners: Mapping[str, int] = {}
        self._names: Sequence[str] = ()

    def bind(self, names: Sequence[str], owners: Mapping[str, int]) -> None:
        """From now on clients have these names, in the order of their numbers; some belong to a certain node."""
        self._names, self._owners = names, owners

    def meet(self) -> dict[str, int]:
        """The nodes that are there, by name; whoever is new is asked who it is."""
        there = set(self.grid.get_node_ids())
        waiting = {node for node, until in self._refused.items() if time.monotonic() < until}
        new = sorted(there - self.hellos.keys() - waiting)
        requests = {node: Request(wire.HELLO, nonce=secrets.token_hex(8)) for node in new}
        answers = self._exchange(requests, wire.HEADER)
        for node in new:  # not in the order of arrival
            answer = answers[node]
            try:
                if answer.packet is None:
                    raise ReplyError(answer.problem or "no reply")
                wire.check_answers(answer.packet, requests[node])
                hello = wire.read_hello(answer.packet, self.limits)
                self._take(node, hello.name, there)
                self.hellos[node] = hello
                self.reasons.pop(node, None)
            except ReplyError as error:
                self._refused[node] = time.monotonic() + AGAIN
                self.reasons[node] = str(error)
                log.warning("node %s is not taken in: %s", node, error)
        return {name: node for name, node in self._nodes.items() if node in there}

    def _take(self, node: int, name: str, there: Collection[int]) -> None:
        """The node is the client of that name, unless another one is."""
        holder = self._owners.get(name, self._nodes.get(name))
        if holder not in (None, node) and (name in self._owners or holder in there):
            raise ReplyError(f"it says that it is {name!r}, but that is node {holder}")
        self._nodes[name] = node

    def wait_for(self, clients: int, names: Iterable[str] | None = None) -> dict[str, int]:
        """Wait until that many nodes (or as many of those names) are there, or the deadline has passed."""
        end = time.monotonic() + self.deadline
        wanted = None if names is None else set(names)
        while True:
            there = self.meet()
            found = there if wanted is None else {name: there[name] for name in there if name in wanted}
            if len(found) >= clients or time.monotonic() > end:
                return found
            time.sleep(PAUSE)

    def gather(self, clients: Sequence[int], least: int) -> None:
        """Wait until that many of the clients are there, or the deadline has passed."""
        self.wait_for(least, [self._names[client] for client in clients])

    def exchange(self, requests: Mapping[int, Request], *, most: int = wire.BODY) -> dict[int, Answer]:
        """Send, and wait for the replies until the deadline; a longer one than ``most`` is refused."""
        there = set(self.grid.get_node_ids())
        nodes = {client: self._nodes.get(self._names[client]) for client in requests}
        known = {node: client for client, node in nodes.items() if node in there and node is not None}
        answers = self._exchange({node: requests[client] for node, client in known.items()}, most)
        found = {known[node]: answer for node, answer in answers.items()}
        return {c: found.get(c, Answer("", problem="its node is not connected")) for c in requests}

    def _exchange(self, requests: Mapping[int, Request], most: int) -> dict[int, Answer]:
        """By node; every node has an answer."""
        contents: dict[int, RecordDict] = {}
        messages = []
        for node, request in requests.items():
            contents[node] = to_content(request.packet())
            messages.append(Message(contents[node], node, TYPES[request.action], ttl=self.deadline))
        waiting: dict[str, int] = {}
        answers: dict[int, Answer] = {}
        for message in messages:  # one by one: together they could be more than one transfer may hold
            node = message.metadata.dst_node_id
            identities = list(self.grid.push_messages([message]))
            if identities and identities[0]:
                waiting[identities[0]] = node
            else:
                answers[node] = Answer(str(node), problem="the SuperLink did not take its message")
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(waiting)):
                sender = waiting.pop(reply.metadata.reply_to_message_id, None)
                if sender is not None:  # an error of the SuperLink's own has no sender: the request tells it
                    answers[sender] = _answer(str(sender), reply, most)
            if waiting:
                time.sleep(PAUSE)
        for node in waiting.values():
            answers[node] = Answer(str(node), problem=f"no reply within {self.deadline:g} s")
        return answers


def _answer(sender: str, reply: Message, most: int) -> Answer:
    if reply.has_error():
        return Answer(sender, problem=f"its node failed ({ERRORS.get(reply.error.code, reply.error.code)})")
    try:
        return Answer(sender, from_content(reply.content, most))
    except ReplyError as error:
        return Answer(sender, problem=f"the reply of node {sender} was refused: {error}")


def roster_of(hellos: Mapping[str, Hello]) -> tuple[list[str], tuple[int, ...], int | None]:
    """Names in the order of the clients' numbers, the shape of a sample, and the number of classes."""
    refusing = {name: hello.refuses for name, hello in hellos.items() if hello.refuses is not None}
    if refusing:
        reasons = "; ".join(wire.REFUSALS[kind] for kind in sorted(set(refusing.values())))
        raise RunError(
            f"{len(refusing)} of {len(hellos)} nodes refuse this run ({', '.join(sorted(refusing))}): {reasons}"
        )
    names = sorted(hellos, key=_in_order)
    shapes = {name: hellos[name].shape for name in names}
    if len(set(shapes.values())) > 1:
        raise RunError(
            f"the nodes have samples of different shapes: {shapes}. A column of text becomes as many inputs as it has "
            "values on a node: encode it before, in the same way everywhere"
        )
    counts = {name: hellos[name].classes for name in names}
    known = [count for count in counts.values() if count is not None]
    if known and len(known) < len(names):
        raise RunError(f"some nodes have classes and some have real targets: {counts}")
    return names, shapes[names[0]], max(known) if known else None


def _in_order(name: str) -> tuple[bool, int, str]:
    """Numbers by their size, then names."""
    number = name.isascii() and name.isdigit()  # other scripts have digits that are no numbers
    return not number, int(name) if number else 0, name
