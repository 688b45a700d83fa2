"""The engine protocol over requests and replies: what the round loop sees of a network.

A round costs two exchanges (train with the shared part, evaluate), or three where a rule decides the split anew every
round: train with what the rule measures, collect, evaluate. Clients keep their personal state when they collect; the
server says in every request which of their rounds counted last, so nothing needs to be said afterwards.

Each contribution arrives by itself and is added up here: this process *could* look at a single one. Sums are taken in
the order of the cohort, whatever the order of arrival. A request waits for replies until the deadline; whoever has not
answered by then, or has sent what it was not asked for, is left out of the rest of the round and named in the record.
With fewer replies than the minimum the round is skipped; if that is because nodes refuse to be measured, the run ends
and says so.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import nn

from fedfac.aggregate import Sums
from fedfac.anatomy import Anatomy
from fedfac.engine.flower import wire
from fedfac.engine.flower.wire import Limits, Packet, ReplyError, Request, Trained
from fedfac.errors import RunError, TooFewRepliesError
from fedfac.evaluate import Score
from fedfac.method import Plan
from fedfac.moments import Additive
from fedfac.records import has_decided
from fedfac.rules import Rule
from fedfac.split import Split
from fedfac.state import State, numel, references
from fedfac.training import Outcome

Read = TypeVar("Read")


@dataclass(frozen=True)
class Answer:
    """What came back from a client, or why nothing did; ``sender`` is the node that the request went to."""

    sender: str
    packet: Packet | None = None
    problem: str | None = None


class Transport(Protocol):
    """How requests reach clients."""

    def gather(self, clients: Sequence[int], least: int) -> None:
        """Wait until that many of the clients are there, or the deadline has passed."""

    def exchange(self, requests: Mapping[int, Request], *, most: int) -> dict[int, Answer]:
        """Send every client its request and wait for the answers, until the deadline; every client has an answer.

        A reply has at most ``most`` bytes of tensors.
        """


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the server of a run knows and asks of its clients."""

    run: str  # the run's name, 16 hexadecimal digits
    names: Sequence[str]  # of the clients
    classes: int | None
    metrics: Sequence[str]
    minimum: float  # share of a cohort that must reply
    most_samples: int = wire.SAMPLES
    announced: Mapping[int, int] = field(default_factory=dict)  # by client, the samples that it said it has


class NetworkEngine:
    """Clients somewhere else, reached through a transport."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        records: Sequence[Mapping[str, Any]],
        transport: Transport,
        terms: Terms,
    ) -> None:
        self.plan, self.transport, self.terms = plan, transport, terms
        state = references(model)
        layers = {layer.name: layer for layer in Anatomy.of(model).layers}
        decided = {} if plan.rule is None else plan.rule.tau
        self.sizes = {name: _size(layers[name].vectors(state)) for name in decided if name in layers}
        self.limits = Limits.of(state, samples=terms.most_samples, announced=terms.announced)
        self.most = 8 * (numel(state) + sum(d * (d + 1 + rows) for d, rows in self.sizes.values())) + wire.HEADER
        self.records = records  # of the run: the round loop adds to them
        self.last = last_counted(records, terms.names)
        self._round = 0
        self._cohort: list[int] = []
        self._trained: dict[int, Trained] = {}
        self._waits = False  # whether the parts of this round are still with the clients
        self._counted: list[int] = []
        self._gone: dict[int, str] = {}  # who went missing in this round, and why
        self._failed: set[int] = set()  # who said so by itself in the last exchange
        self._unmeasured: set[int] = set()  # who of them refuses to be measured

    def train(self, round: int, server: State, split: Split, cohort: Sequence[int]) -> dict[int, Outcome]:
        """Everybody trains; where the split is already final, the shared parts come with the replies."""
        self._round, self._cohort, self._gone, self._counted = round, list(cohort), {}, []
        rule = self.plan.rule
        decides = self.plan.decides(round, decided=has_decided(self.records))
        measure = rule is not None and rule.measures and decides
        # parts wait for a decision, unless all numbers of what it is about go out anyway; round 0 only decides
        collect = not decides or (round > 0 and not split.cut)
        sizes = self.sizes if measure else {}
        self.transport.gather(cohort, self._least())
        requests = {
            client: self._request(wire.TRAIN, client, split, server=server, measure=measure, collect=collect)
            for client in cohort
        }
        self._trained = self._ask(
            requests,
            lambda c, p: wire.read_train(p, split, sizes, collect=collect, limits=self.limits, client=c),
        )
        self._waits = not collect
        self._check_consent()
        self._check_enough("trained", len(self._trained) + len(self._failed))
        return self._outcomes()

    def moments(self, rule: Rule) -> dict[str, Additive]:
        """The sum of what came with the replies, in the order of the cohort."""
        totals: dict[str, Additive] = {}
        for trained in self._trained.values():
            for name, value in trained.measured.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def collect(self, split: Split) -> Sums:
        """Σ n_k·(shared part) of those who sent it."""
        missing: dict[int, str] = {}
        if self._waits:
            requests = {client: self._request(wire.COLLECT, client, split) for client in self._trained}
            parts = self._ask(
                requests,
                lambda client, packet: wire.read_collect(packet, split, self._trained[client].samples, self.limits),
            )
            missing = {client: self._gone[client] for client in self._trained if client not in parts}
            if missing:
                self._check_enough("sent their part", len(parts))
        else:
            parts = {client: trained.part for client, trained in self._trained.items()}
        values: State = {}
        for part in parts.values():
            for name, tensor in part.items():
                values[name] = values[name] + tensor if name in values else tensor
        self._counted = list(parts)
        return Sums(values, float(sum(self._trained[client].samples for client in parts)), missing)

    def keep(self, split: Split) -> None:
        """The clients have kept their own tensors when they sent their parts; from now on these count."""
        self.last |= dict.fromkeys(self._counted, self._round)
        self._trained = {}

    def evaluate(self, round: int, server: State, split: Split, clients: Sequence[int]) -> dict[str, list[Score]]:
        """Counts and figures of everybody who answers; whoever went missing in this round is not asked again."""
        self._round = round
        requests = {
            client: self._request(wire.EVALUATE, client, split, server=server)
            for client in clients
            if client not in self._gone
        }
        metrics, classes = self.terms.metrics, self.terms.classes is not None
        found = self._ask(
            requests, lambda c, packet: wire.read_scores(packet, c, metrics, classes=classes, limits=self.limits)
        )
        scores: dict[str, list[Score]] = {"test": []}
        for own in found.values():
            for part, score in own.items():
                scores.setdefault(part, []).append(score)
        return scores

    def serve(self, server: State, split: Split, newcomers: Sequence[int]) -> list[Score]:
        """Nobody: a node that comes later joins the next run."""
        return []

    def hand_out(self, round: int, server: State, split: Split, clients: Sequence[int]) -> None:
        """Clients take a model home without testing it."""
        self._round = round
        requests = {c: self._request(wire.EVALUATE, c, split, server=server, score=False) for c in clients}
        self._ask(requests, lambda _, packet: wire.check_problem(packet))

    def close(self) -> None:
        """The nodes go on without us."""

    def _request(self, action: str, client: int, split: Split, **more: Any) -> Request:
        return Request(
            action,
            run=self.terms.run,
            round=self._round,
            client=client,
            classes=self.terms.classes,
            last=self.last.get(client, 0),
            masks=split.masks,
            nonce=secrets.token_hex(8),
            **more,
        )

    def _ask(self, requests: Mapping[int, Request], read: Callable[[int, Packet], Read]) -> dict[int, Read]:
        """The replies that can be used, in the order of the requests; why the others cannot is in ``_gone``."""
        answers = self.transport.exchange(requests, most=self.most) if requests else {}
        found: dict[int, Read] = {}
        self._failed = set()
        self._unmeasured = set()
        for client, request in requests.items():
            answer = answers[client]
            if answer.packet is None:
                self._gone[client] = wire.clean(answer.problem or "no reply")
                continue
            try:
                wire.check_answers(answer.packet, request)
                if not self._says_problem(client, answer.packet):
                    found[client] = read(client, answer.packet)
            except ReplyError as error:
                self._gone[client] = f"the reply of node {answer.sender} was refused: {error}"
        return found

    def _says_problem(self, client: int, packet: Packet) -> bool:
        """Whether a client says by itself that it could not do it, or would not."""
        try:
            wire.check_problem(packet)
        except ReplyError as problem:
            self._gone[client] = str(problem)
            self._failed.add(client)
            if problem.kind == wire.MEASURE:
                self._unmeasured.add(client)
            return True
        return False

    def _check_consent(self) -> None:
        """Fail if a round cannot be made because nodes refuse to be measured: no later one could."""
        if self._unmeasured and len(self._trained) < self._least():
            who = ", ".join(self.terms.names[client] for client in sorted(self._unmeasured))
            raise RunError(f"{who}: {wire.REFUSALS[wire.MEASURE]}")

    def _outcomes(self) -> dict[int, Outcome]:
        """Of the whole cohort: what they report, and why some do not."""
        outcomes = {}
        for client in self._cohort:
            done = self._trained.get(client)
            why = self._gone.get(client)
            outcomes[client] = Outcome(0 if done is None else done.samples, 0.0 if done is None else done.loss, why)
        return outcomes

    def _least(self) -> int:
        return max(1, math.ceil(self.terms.minimum * len(self._cohort) - 1e-9))

    def _check_enough(self, did: str, replies: int) -> None:
        if replies < self._least():
            raise TooFewRepliesError(
                f"{replies} of {len(self._cohort)} clients {did}, and {self._least()} are needed", self._outcomes()
            )


def last_counted(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[int, int]:
    """By client, the last round in which its part was counted."""
    last: dict[int, int] = {}
    for record in records:
        if record["round"] > 0 and "skipped" not in record:
            last |= {c: record["round"] for c in record["cohort"] if names[c] not in record["left_out"]}
    return last


def _size(vectors: Any) -> tuple[int, int]:
    return int(vectors.shape[0]), int(vectors.shape[1])
