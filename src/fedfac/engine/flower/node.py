"""What a node does with a request: the in-process engine, for one client.

Training, measuring, weighing and testing are the lane engine's, so a client's numbers are the same bits here as in
process. The engine lives for one message; what must outlive it is in the node's own folder.

What leaves: a reply has what :mod:`~fedfac.engine.flower.wire` lists, no sample, and of personal weights nothing that
the server could compute them from, unless the node's owner says ``share-weights`` (:mod:`.consent`). It arrives by
itself, not in a sum, and a server that lies learns more than one that does not: the node bounds what it may ask for
(:mod:`.consent`, :mod:`.ledger`). A refusal is told by its kind and an error by its class only, since a text may quote
the data. The text is in the node's own log.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from fedfac.anatomy import Anatomy
from fedfac.engine.flower import consent, wire
from fedfac.engine.flower import data as node_data
from fedfac.engine.flower.consent import Allowed
from fedfac.engine.flower.folder import About, Folder, Held, prune
from fedfac.engine.flower.ledger import Ledger
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import Packet, RefusedError, Request
from fedfac.engine.lanes import LaneEngine, pick_device
from fedfac.errors import RunError
from fedfac.method import Plan
from fedfac.numerics import Numerics
from fedfac.preflight import check_fits
from fedfac.split import Split, mask_text
from fedfac.state import State, check_same_tensors, references

log = logging.getLogger("fedfac")


class Node:
    """One client, as one message finds it."""

    def __init__(self, run: Deployment, config: NodeConfig) -> None:
        self.run, self.config = run, config

    def answer(self, request: Request) -> Packet:
        """The reply to a request, and to no other; a failure is a reply too."""
        try:
            packet = self._act(request)
        except RefusedError as refusal:
            log.warning("client %s, %s of round %s: %s", self.config.name, request.action, request.round, refusal)
            packet = wire.problem_reply("it refused; its own log says why", refusal.kind)
        except Exception as error:
            log.exception("client %s, %s of round %s", self.config.name, request.action, request.round)
            packet = wire.problem_reply(f"it failed with a {type(error).__name__}; its own log says why")
        return replace(packet, to=request.key)

    def _act(self, request: Request) -> Packet:
        if request.action == wire.HELLO:
            return self.hello()
        folder = Folder(self.config.folder, request.run, self.config.name)
        act = {wire.TRAIN: self.train, wire.COLLECT: self.collect, wire.EVALUATE: self.evaluate}[request.action]
        with folder.lock():
            found = folder.ledger()
            if not found.run:
                removed = prune(self.config.folder, request.run, self.config.keeps)
                log.info("earlier runs removed (keep-runs, keep-days, keep-bytes): %s", ", ".join(removed) or "none")
            ledger = found.of_run(self.run.identity(request.client, request.classes))
            return act(request, folder, ledger)

    def hello(self) -> Packet:
        """Who this is, and whether it would take part; the model is tried on the data now rather than in round one."""
        data, classes = node_data.load(self.run, self.config, client=0)
        inputs, _ = data.pool.batch(data.train[:1])
        shape = tuple(inputs.shape[1:])
        template, plan = self.run.plan(self.run.model(shape, classes))
        check_fits(template, node_data.federation_of_one(data, 0, classes), self.run.local(classes))
        refuses = self._apart(plan, Anatomy.of(template))
        kind = wire.MEASURE if refuses else None
        return wire.hello_reply(self.config.name, shape, classes, samples=len(data.train), refuses=kind)

    def train(self, request: Request, folder: Folder, ledger: Ledger) -> Packet:
        """Train from what the server sent and what this client kept; results stay, sums go out."""
        with _Lane(self, request, folder) as lane:
            self._check_measured(request, lane)
            allowed = Allowed.of(lane.plan, round=request.round, seed=self.run.config.train.seed)
            ledger = ledger.trains(request, goes_back=self.config.goes_back)
            if request.collect:
                ledger = self._released(ledger, request, lane.plan, lane.split, allowed)
            folder.write_ledger(ledger)
            return self._trained(request, folder, lane, allowed)

    def _trained(self, request: Request, folder: Folder, lane: _Lane, allowed: Allowed) -> Packet:
        split, client = lane.split, request.client
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
        if request.collect:
            if split.kept:
                folder.keep(request.round, own, last=request.last)
            return wire.train_reply(outcome.samples, outcome.loss, measured, part)
        if request.round > 0:
            whole = {f"part/{name}": t for name, t in part.items() if name not in split.cut}
            values = Held(outcome.samples, split.to_json(), allowed, once=not lane.plan.every_round)
            folder.hold(request.round, values, whole | {f"own/{name}": t for name, t in own.items()})
        return wire.train_reply(outcome.samples, outcome.loss, measured, None)

    def collect(self, request: Request, folder: Folder, ledger: Ledger) -> Packet:
        """Now the masks are known: n_k·(shared part) goes out, and what is the client's own is kept."""
        held = folder.held(request.round)
        if held is None:
            raise RunError(f"nothing was trained here in round {request.round}")
        values, tensors = held
        split = Split.from_json(values.split).with_masks(request.masks)
        masks = _texts(split)
        values.allowed.check(masks, request.round)
        folder.write_ledger(ledger.releases(request.round, masks, once=values.once))
        part, own = (
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            for prefix in ("part/", "own/")
        )
        folder.keep(request.round, own, last=request.last)
        return wire.collect_reply(values.samples, part | wire.weighted(split.shared(own), values.samples))

    def evaluate(self, request: Request, folder: Folder, ledger: Ledger) -> Packet:
        """Test this client's own model on its held-out samples, and remember the model for ``deploy export``.

        Once in a round: the answer to the same request is the same.
        """
        if ledger.answers(request):
            return Packet(ledger.answer)
        ledger = ledger.evaluates(request, goes_back=self.config.goes_back)
        if request.score:
            self._check_due(request.round)
        with _Lane(self, request, folder) as lane:
            if request.score and lane.split.cut:
                allowed = Allowed.of(lane.plan, round=request.round, seed=self.run.config.train.seed)
                allowed.check(_texts(lane.split), request.round)
            clients = [request.client] if request.score else []
            scores = lane.engine.evaluate(request.round, request.server, lane.split, clients)
        about = About(
            round=request.round,
            last=request.last,
            client=request.client,
            masks=_texts(lane.split),
            shape=list(lane.shape),
            classes=request.classes,
            run=dict(self.run.flat),
            node=dict(self.config.values),
        )
        reply = wire.evaluate_reply({part: found[0] for part, found in scores.items() if found})
        folder.write_ledger(ledger.answered(reply.values))
        folder.set_model(about, request.server)
        return reply

    def _apart(self, plan: Plan, anatomy: Anatomy) -> list[str]:
        """The layers for which this node refuses the run."""
        return [] if self.config.shares_weights else consent.measured_apart(plan, anatomy)

    def _check_measured(self, request: Request, lane: _Lane) -> None:
        """Fail if moments would leave apart from the rows, in this round or in a later one."""
        layers = self._apart(lane.plan, lane.anatomy)
        if not layers and request.measure and not request.collect and not self.config.shares_weights:
            layers = list(lane.plan.rule.tau) if lane.plan.rule is not None else []
        if layers:
            raise RefusedError(wire.MEASURE, f"method {self.run.config.method_name!r}, layers {', '.join(layers)}")

    def _released(self, ledger: Ledger, request: Request, plan: Plan, split: Split, allowed: Allowed) -> Ledger:
        masks = _texts(split) if split.cut else {}  # where nothing is cut, masks say nothing about what leaves
        if masks:
            allowed.check(masks, request.round)
        return ledger.releases(request.round, masks, once=not plan.every_round)

    def _check_due(self, round: int) -> None:
        train = self.run.config.train
        due = round % (train.evaluate_every or 1) == 0 and round >= train.evaluate_from
        if not due and round != train.rounds:
            raise RefusedError(wire.EVALUATION, f"round {round} of {train.rounds} is not one that is evaluated")


def _texts(split: Split) -> dict[str, str]:
    return {layer: mask_text(mask) for layer, mask in split.masks.items()}


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
