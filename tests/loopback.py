"""Nodes in this process: every request and reply goes through its bytes, but over no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfac.engine.flower.engine import Answer, NetworkEngine, Terms
from fedfac.engine.flower.node import Node
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import Packet, Request
from fedfac.result import Result
from fedfac.roster import Roster
from fedfac.rounds import Session
from fedfac.seeds import generator
from fedfac.settings import Settings

RUN = "0123456789abcdef"
SHAPE = (2, 6)
CLASSES = 3
CLIENTS = 4


def load(node: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A client's samples: what a user's own data function looks like."""
    client = int(node["client"])
    draws = generator(0, "loopback", client)
    n = 18 + 5 * client
    x = torch.randn(n, *SHAPE, generator=draws)
    y = (x.flatten(1)[:, client : client + 3].sum(1) > 0).long() + client % 2
    return x[:-6], y[:-6], x[-6:], y[-6:]


Meddle = Callable[[int, Request, Packet], Packet | None]


def honest(client: int, request: Request, reply: Packet) -> Packet | None:
    return reply


class Loopback:
    """A transport to nodes in this process; ``meddle`` may change a reply on its way, or lose it."""

    def __init__(self, nodes: Sequence[Node], meddle: Meddle = honest) -> None:
        self.nodes, self.meddle = nodes, meddle
        self.received: list[Packet] = []

    def gather(self, clients: Sequence[int], least: int) -> None:
        pass

    def exchange(self, requests: Mapping[int, Request], *, most: int = 1 << 30) -> dict[int, Answer]:
        answers = {}
        for client in sorted(requests, reverse=True):  # arrival has nothing to do with the cohort's order
            request = Request.read(Packet.unpack(*requests[client].packet().pack()))
            reply = self.meddle(client, request, Packet.unpack(*self.nodes[client].answer(request).pack(), most))
            if reply is not None and not reply.to:  # a reply that a test has made: liars know what they answer
                reply = replace(reply, to=request.key)
            if reply is None:
                answers[client] = Answer(f"n{client}", problem="no reply within 1 s")
            else:
                self.received.append(reply)
                answers[client] = Answer(f"n{client}", reply)
        return answers


def deployment(method: str, **changes: Any) -> Deployment:
    flat = {
        "data.classes": str(CLASSES),
        "model.name": "mlp",
        "model.hidden": 10,
        "method.name": method,
        "train.rounds": 3,
        "train.epochs": 1,
        "train.batch_size": 8,
        "train.cohort": 3,
    }
    return Deployment.read(flat | {key.replace("__", "."): value for key, value in changes.items()})


def nodes(run: Deployment, folder: Path, **config: Any) -> list[Node]:
    made = []
    for client in range(CLIENTS):
        values = {"client": str(client), "data": "loopback:load", "folder": str(folder / str(client)), **config}
        made.append(Node(run, NodeConfig.read(values, client)))
    return made


def session(run: Deployment, transport: Loopback, **settings: Any) -> Session:
    """The round loop of a server that knows its clients by name only."""
    names = [str(client) for client in range(CLIENTS)]
    terms = Terms(run=RUN, names=names, classes=CLASSES, metrics=[], minimum=0.5)

    def connect(model: Any, plan: Any, records: Any) -> NetworkEngine:
        return NetworkEngine(model, plan, records, transport, terms)

    roster = Roster(names, CLASSES, "loopback", connect, {"run": RUN, "shape": list(SHAPE), "classes": CLASSES})
    train = run.config.train
    asked = {"rounds": train.rounds, "cohort": train.cohort, "seed": train.seed, "device": "cpu", **settings}
    return Session(run.model(SHAPE, CLASSES), roster, run.method, run.local(CLASSES), Settings(**asked))


def over_the_wire(run: Deployment, folder: Path, meddle: Meddle = honest, **settings: Any) -> Result:
    return session(run, Loopback(nodes(run, folder, **{"share-weights": True}), meddle), **settings).drive()
