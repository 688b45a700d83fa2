"""What a node does with a request: the in-process engine, for one client.

Training, measuring, weighing and testing are the lane engine's, so a client's numbers are the same bits here as in
process. The engine lives for one message; what must outlive it is in the node's own folder.

No sample and no personal number leaves: a reply has what :mod:`~fedfac.engine.flower.wire` lists, and an error is
reported by its kind only, since its text may quote the data. The text is in the node's own log.
"""

from __future__ import annotations

import logging

import torch

from fedfac.anatomy import Anatomy
from fedfac.engine.flower import data as node_data
from fedfac.engine.flower import wire
from fedfac.engine.flower.folder import Folder
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import Packet, Request
from fedfac.engine.lanes import LaneEngine, pick_device
from fedfac.errors import RunError
from fedfac.method import Plan
from fedfac.moments import Additive
from fedfac.numerics import Numerics
from fedfac.preflight import check_fits
from fedfac.split import Split
from fedfac.state import State, check_same_tensors, references

log = logging.getLogger("fedfac")


class Node:
    """One client, as one message finds it."""

    def __init__(self, run: Deployment, config: NodeConfig) -> None:
        self.run, self.config = run, config

    def answer(self, request: Request) -> Packet:
        """The reply to a request; a failure is a reply too."""
        try:
            if request.action == wire.HELLO:
                return self.hello()
            folder = Folder(self.config.folder, request.run, self.config.name)
            act = {wire.TRAIN: self.train, wire.COLLECT: self.collect, wire.EVALUATE: self.evaluate}[request.action]
            with folder.lock():
                return act(request, folder)
        except Exception as error:
            log.exception("client %s, %s of round %s", self.config.name, request.action, request.round)
            return wire.problem_reply(f"it failed with a {type(error).__name__}; its own log says why")

    def hello(self) -> Packet:
        """Who this is; the model is tried on the data now rather than in round one."""
        data, classes = node_data.load(self.run, self.config, client=0)
        inputs, _ = data.pool.batch(data.train[:1])
        shape = tuple(inputs.shape[1:])
        template, _ = self.run.plan(self.run.model(shape, classes))
        check_fits(template, node_data.federation_of_one(data, 0, classes), self.run.local(classes))
        return wire.hello_reply(self.config.name, shape, classes)

    def train(self, request: Request, folder: Folder) -> Packet:
        """Train from what the server sent and what this client kept; results stay, sums go out."""
        lane = _Lane(self, request, folder)
        split, client = lane.split, request.client
        with lane:
            outcome = lane.engine.train(request.round, request.server, split, [client])[client]
            if outcome.problem is not None:
                return wire.problem_reply(outcome.problem)
            rule = lane.plan.rule
            measured = lane.engine.moments(rule) if request.measure and rule is not None else {}
            # what is decided by element waits for its masks; what is shared as a whole is weighed now
            nothing = {layer: [False] * len(mask) for layer, mask in split.masks.items()}
            known = split if request.collect else split.with_masks(nothing)
            part = lane.engine.collect(known).values
            lane.engine.keep(known)
        own = lane.store.put_state
        self._check_hidden(measured, lane.anatomy, lane.before, own)
        if request.collect:
            if split.kept:
                folder.keep(request.round, own, last=request.last, masks=split.masks)
            return wire.train_reply(outcome.samples, outcome.loss, measured, part)
        if request.round > 0:
            whole = {f"part/{name}": t for name, t in part.items() if name not in split.cut}
            values = {"samples": outcome.samples, "split": split.to_json()}
            folder.hold(request.round, values, whole | {f"own/{name}": t for name, t in own.items()})
        return wire.train_reply(outcome.samples, outcome.loss, measured, None)

    def collect(self, request: Request, folder: Folder) -> Packet:
        """Now the masks are known: n_k·(shared part) goes out, and what is the client's own is kept."""
        held = folder.held(request.round)
        if held is None:
            raise RunError(f"nothing was trained here in round {request.round}")
        values, tensors = held
        split = Split.from_json(values["split"]).with_masks(request.masks)
        part, own = (
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            for prefix in ("part/", "own/")
        )
        folder.keep(request.round, own, last=request.last, masks=split.masks)
        return wire.collect_reply(values["samples"], part | wire.weighted(split.shared(own), values["samples"]))

    def evaluate(self, request: Request, folder: Folder) -> Packet:
        """Test this client's own model on its held-out samples, and remember the model for ``deploy export``."""
        lane = _Lane(self, request, folder)
        with lane:
            clients = [request.client] if request.score else []
            scores = lane.engine.evaluate(request.round, request.server, lane.split, clients)
        about = {
            "round": request.round,
            "last": request.last,
            "client": request.client,
            "masks": request.packet().values["masks"],
            "shape": list(lane.shape),
            "classes": request.classes,
            "run": dict(self.run.flat),
            "node": dict(self.config.values),
        }
        folder.set_model(about, request.server)
        return wire.evaluate_reply({part: found[0] for part, found in scores.items() if found})

    def _check_hidden(self, measured: dict[str, Additive], anatomy: Anatomy, before: State, after: State) -> None:
        """Fail if a statistic holds the weights themselves: over a network it arrives by itself, not in a sum.

        (The variance rule's does; moments do for a layer whose elements have a single input weight.)
        """
        if self.config.shares_weights:
            return
        for layer in anatomy.layers:
            if layer.name not in measured:
                continue
            own = layer.vectors(after).double().flatten()
            step = own - layer.vectors(before).double().flatten()
            sent = [value.flatten() for value in vars(measured[layer.name]).values() if isinstance(value, torch.Tensor)]
            if any(torch.equal(value, hidden) for value in sent for hidden in (own, step)):
                raise RunError(
                    f"the rule of method {self.run.config.method_name!r} sends the weights of layer {layer.name!r} "
                    "themselves, personal ones too. If this node may send them: --node-config 'share-weights=true'"
                )


class _Lane:
    """The in-process engine for one client and one message."""

    def __init__(self, node: Node, request: Request, folder: Folder) -> None:
        run, config, train = node.run, node.config, node.run.config.train
        data, _ = node_data.load(run, config, client=request.client)
        inputs, _ = data.pool.batch(data.train[:1])
        self.shape = tuple(inputs.shape[1:])
        template, self.plan = run.plan(run.model(self.shape, request.classes))
        check_same_tensors(references(template), request.server)
        self.anatomy = Anatomy.of(template)
        self.split = self.plan.split_in(request.round, request.masks)
        self.store = _OneState(own_state(folder, self.split, request.last, self.plan, begins_anew=config.begins_anew))
        self.before = self.split.overlay(request.server, self.store.own)
        self.engine = LaneEngine(
            template,
            node_data.federation_of_one(data, request.client, request.classes),
            self.plan,
            run.local(request.classes),
            self.store,
            seed=train.seed,
            lanes=1,
            numerics=Numerics.choose(
                template,
                pick_device(config.device),
                precision=train.precision,
                layout=train.layout,
                deterministic=train.deterministic,
            ),
            stack=False,  # there is but one client here
            metrics=run.metrics(request.classes),
        )

    plan: Plan

    def __enter__(self) -> _Lane:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()


class _OneState:
    """A ``Store`` for one message: what the client had, and what it would keep now."""

    def __init__(self, own: State | None) -> None:
        self.own = own
        self.put_state: State = {}

    def get(self, client: int) -> State | None:
        """What the client kept in the last round that counted."""
        return self.own

    def put(self, client: int, state: State) -> None:
        """What it would keep now."""
        self.put_state = state


def own_state(folder: Folder, split: Split, last: int, plan: Plan, *, begins_anew: bool) -> State | None:
    """What the client kept in the last round that counted; None if it has nothing of its own yet."""
    if last <= plan.warmup or not split.kept:
        return None
    own = folder.kept(last)
    if own is None and not begins_anew:
        raise RunError(
            f"the personal state of round {last} is not in {folder.path}. Restore it from a backup, or let the client "
            "begin anew from the shared state: --node-config 'begin-anew=true'"
        )
    return own
