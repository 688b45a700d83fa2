"""The trials: successive halving on validation samples, with clients, start and cohorts the same for all.

*As it is.* A candidate trains as it would in the run: what it does on its server and to its loss is most of what it is
worth, and shows within ten rounds. Candidates that train alike (equal :class:`fedfac.method.Training`) train once, and
each is judged by its own predictions.

*The trunk.* The first rounds only tell who learns fast, and what is personal had better start from something. So half
of what a choice may cost goes into rounds in which everything is shared, and candidates branch off from there, as if
they had warmed up for so long. Those that do the same while everything is shared have one trunk: FedAvg's, of which
FedPer is a branch, and FedFac+'s, with its class frequencies and its momentum. A candidate that cannot warm up (two
models, nothing shared) is trained from the start instead.

*Halving.* All candidates get a turn, the better half some more, until five or fewer are left, who get the last one
(after Jamieson and Talwalkar, AISTATS 2016; each stage costs about the same).

*Judging.* Every stage looks at further clients, drawn at random. A client that has just been trained would flatter
what is personal, one that never was would damn it. So before a client is judged, a copy of its model trains what it
would have kept from its own rounds (and a shared head, if its method does so before it predicts) for three rounds'
epochs, whether or not it was in a cohort; where nothing is shared, for as many as it would have had by then, from the
common start. Where clients keep nothing, they are judged as they would predict.
Differences are paired by client. A candidate is as good as the best one within noise if it, or one that is further
behind, is behind by one standard error at most. The simplest of those is never dropped, and is chosen in the end:
simplest is what keeps the smallest share of the model personal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from fedfac.anatomy import Anatomy
from fedfac.choosing.candidates import Candidate
from fedfac.choosing.choice import Choice, Trial
from fedfac.errors import DataError, TrainingError
from fedfac.method import PERSONAL, Method, Phase, Plan, Server, Training
from fedfac.rounds import Session
from fedfac.seeds import stream
from fedfac.switches.warmup import warmed_up

TRUNK = 0.5  # of what a choice may cost
CATCH_UP = 3  # rounds that a personal part is trained before it is judged
ALONE = (CATCH_UP, 10)  # the same where nothing is shared: as many as a client would have had, within these
FINALISTS = 5
Start = Callable[[Method], Session]
OnRound = Callable[[str, int, int, Mapping[str, Any]], None]  # candidate, cost so far and at most, record of the round
FEDAVG = (Phase(),), Server()  # how it begins: see begins_as
Tally = Mapping[int, tuple[float, float]]  # by client: (sum of what counts over its samples, samples)


def sizes(candidates: int) -> list[int]:
    """How many candidates there are in every stage.

    >>> sizes(8), sizes(9), sizes(5), sizes(1)
    ([8, 4], [9, 5], [5], [])
    """
    found = [candidates] if candidates > 1 else []
    while found and found[-1] > FINALISTS:
        found.append(math.ceil(found[-1] / 2))
    return found


def begins_as(plan: Plan) -> tuple[Any, ...] | None:
    """What a method does while everything is shared; None for one that cannot warm up, having several models.

    >>> from fedfac.methods import fedavg, fedper, fedprox
    >>> from fedfac.switches import Proximal
    >>> anatomy = Anatomy.of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> methods = fedavg(), fedper(), fedper() | Proximal(1.0), fedprox(mu=1.0)
    >>> alike, other, held, prox = (begins_as(method.plan(anatomy)) for method in methods)
    >>> alike == other, other == held, held == prox
    (True, False, True)
    """
    if plan.training.models > 1:
        return None
    return plan.training.phases, plan.training.server


@dataclass(frozen=True)
class OnTrial:
    """The method as it is tried: after the trunk, and with what a client keeps caught up before it is judged."""

    trunk: int
    alone: int
    name: ClassVar[str] = "on_trial"
    changes: ClassVar[str] = "training and prediction"
    paper: ClassVar[str] = "ours"
    wrap: ClassVar[None] = None
    is_on: ClassVar[bool] = True

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """The plan of the trial."""
        if plan.shares_nothing:
            return self._judged_by(plan, (Phase(trains=PERSONAL),) * self.alone)
        if begins_as(plan) is None:
            return plan
        tried = warmed_up(plan, self.trunk)
        if not plan.split.kept - plan.training.own:
            return tried
        refresh = plan.prediction.refresh
        prepares = tuple(phase for phase in refresh if phase.epochs == 0)
        trains = [phase for phase in refresh if phase.epochs != 0] or [Phase(trains=PERSONAL)]
        return self._judged_by(tried, (*prepares, *(replace(trains[-1], epochs=None),) * CATCH_UP))

    def _judged_by(self, plan: Plan, refresh: tuple[Phase, ...]) -> Plan:
        return replace(plan, prediction=replace(plan.prediction, refresh=refresh))


def planned(method: Method, model: nn.Module) -> Plan:
    """A method's plan for a model."""
    return method.plan(Anatomy.of(method.wrapped(model)))


def judging(plan: Plan, epochs: int) -> float:
    """What it costs to judge a cohort's worth of clients, in rounds."""
    return sum(epochs if phase.epochs is None else phase.epochs for phase in plan.prediction.refresh) / epochs


def beginnings(methods: Sequence[Method], model: nn.Module) -> list[Any]:
    """The trunks that these methods need; None stands for one that is trained from the start by itself."""
    found: list[Any] = []
    for method in methods:
        plan = planned(method, model)
        begins = begins_as(plan)
        if not plan.shares_nothing and (begins is None or begins not in found):
            found.append(begins)
    return found


def turns_cost(methods: Sequence[Method], model: nn.Module, *, epochs: int) -> int:
    """What one turn in every stage costs at most, in rounds."""
    tried = [method | OnTrial(trunk=1, alone=ALONE[0]) for method in methods]
    plans = [planned(method, model) for method in tried]
    families: list[Training] = []
    for plan in plans:
        if not plan.shares_nothing and plan.training not in families:
            families.append(plan.training)
    judged = sorted((judging(plan, epochs) for plan in plans), reverse=True)
    return math.ceil(sum(min(size, len(families)) + sum(judged[:size]) for size in sizes(len(methods))))


@dataclass(eq=False)
class _Entrant:
    """A candidate in its trial."""

    candidate: Candidate
    session: Session
    opened: ExitStack  # closes the session
    place: int  # in the short list
    tally: dict[int, tuple[float, float]] = field(default_factory=dict)
    failed: str | None = None

    @property
    def label(self) -> str:
        return self.candidate.label

    @property
    def rounds(self) -> int:
        return self.session.next_round - 1

    @property
    def simplicity(self) -> tuple[float, int]:
        """What is personal, the less the simpler; then the order of the short list."""
        return 1 - self.session.split.shared_share, self.place

    @property
    def score(self) -> float:
        """Over all samples; more is better."""
        return sum(s for s, _ in self.tally.values()) / sum(n for _, n in self.tally.values())


def paired(best: Tally, other: Tally) -> tuple[float, float]:
    """How far ``other`` is behind over all samples, and the standard error of that over clients.

    >>> paired({0: (9, 10), 1: (8, 10)}, {0: (8, 10), 1: (7, 10)})
    (0.1, 0.0)
    """
    samples = sum(n for _, n in best.values())
    gaps = {client: best[client][0] - other[client][0] for client in best}
    mean = sum(gaps.values()) / samples
    if len(gaps) < 2:
        return mean, math.inf  # one client cannot tell how much clients differ
    squares = sum((gap - mean * best[client][1]) ** 2 for client, gap in gaps.items())
    return mean, math.sqrt(squares * len(gaps) / (len(gaps) - 1)) / samples


class Trials:
    """Trains candidates side by side and decides."""

    def __init__(self, start: Start, *, budget: int, trunk: int, on_round: OnRound | None = None) -> None:
        self._start, self.budget, self.trunk_rounds, self.on_round = start, budget, trunk, on_round
        self.cost = 0.0
        self.rows: dict[str, Trial] = {}
        self._trunks: list[tuple[Any, Session]] = []  # how it begins, and where that has led
        self._open = ExitStack()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def grow(self, method: Method, rounds: int, on_record: Callable[[int, Mapping[str, Any]], None]) -> None:
        """The first trunk: rounds that all candidates have in common that begin as FedAvg does, if there are such."""
        self.trunk = self._open.enter_context(self._start(method))
        while self.trunk.next_round <= rounds:
            on_record(self.trunk.next_round, self._step("all alike", self.trunk))
        if rounds == self.trunk_rounds:
            self._trunks.append((FEDAVG, self.trunk))

    def decide(self, candidates: Sequence[Candidate], layers: Mapping[str, float]) -> Choice:
        """Halve until one is left."""
        alive = self._without_failed([self._enter(candidate, place) for place, candidate in enumerate(candidates)])
        metric = "loss" if self.trunk.federation.classes is None else "accuracy"
        plan = sizes(len(alive))
        reached, order, seen = self.trunk_rounds, self._order(), 0
        for number in range(len(plan)):
            share = (self.budget - self.cost) / (len(plan) - number)
            turns = max(1, int(share / self._turn(alive)))
            reached += turns
            judged = min(turns * self.trunk.cohort, len(order))
            panel = [order[place % len(order)] for place in range(seen, seen + judged)]  # then the first ones again
            seen += judged
            for family in _families(alive):
                self._train(family, reached)
            for entrant in alive:
                self._judge(entrant, reached, panel)
            left = self._without_failed(alive)
            left = self._ranked(left, plan[number + 1] if number + 1 < len(plan) else 1, metric)
            for entrant in alive:
                if entrant not in left:
                    entrant.opened.close()  # its personal states, and a GPU's graphs, take memory
            alive = left
        chosen = alive[0]
        if not plan:
            self.rows[chosen.label] = Trial(chosen.label, None, None, None, chosen.rounds, None, "the only candidate")
        return Choice(
            chosen.candidate.method,
            chosen.candidate.asked,
            self._reason(chosen),
            [self.rows[candidate.label] for candidate in candidates],
            metric,
            round(self.cost),
            layers,
        )

    def _step(self, label: str, session: Session) -> Mapping[str, Any]:
        """One round, paid for."""
        record = session.step()
        self.cost += record["round"] > 0
        if self.on_round is not None:
            spent = round(self.cost)
            self.on_round(label, spent, max(spent + 1, self.budget), record)
        return record

    def _order(self) -> list[int]:
        """Everybody, in the order in which clients are judged."""
        everybody = self.trunk.participants
        places = stream(self.trunk.seed, "judged").permutation(len(everybody)).tolist()
        return [everybody[place] for place in places]

    def _enter(self, candidate: Candidate, place: int) -> _Entrant:
        """A candidate at the end of its trunk, which is grown if nobody has begun like that yet."""
        visits = round(self.trunk_rounds * self.trunk.cohort / len(self.trunk.participants))
        alone = max(ALONE[0], min(ALONE[1], visits))
        tried = candidate.method | OnTrial(trunk=self.trunk_rounds, alone=alone)
        opened = self._open.enter_context(ExitStack())
        session = opened.enter_context(self._start(tried))
        entrant = _Entrant(candidate, session, opened, place)
        begins = begins_as(session.plan)
        if begins is not None and not session.plan.shares_nothing:
            for known, trunk in self._trunks:
                if known == begins:
                    session.go_on_from(trunk)
                    return entrant
            self._train([entrant], self.trunk_rounds)
            if entrant.failed is None:
                self._trunks.append((begins, session))
        return entrant

    def _turn(self, entrants: Sequence[_Entrant]) -> float:
        """What a turn of these costs, in rounds: a round of every training, and a cohort's worth of clients judged."""
        trained = sum(not family[0].session.plan.shares_nothing for family in _families(entrants))
        return trained + sum(judging(e.session.plan, e.session.local.epochs) for e in entrants)

    def _train(self, family: Sequence[_Entrant], to: int) -> None:
        """Train candidates that train alike up to a round: the first of them, and the others as it did."""
        first = family[0].session
        if first.plan.shares_nothing:
            for entrant in family:
                entrant.session.next_round = to + 1  # nobody hears of anybody: what a client is judged by is all
            return
        first.lend([entrant.session for entrant in family])
        try:
            while first.next_round <= to:
                self._step(family[0].label, first)
                for entrant in family[1:]:
                    entrant.session.step(like=first)
        except TrainingError as error:
            for entrant in family:
                entrant.failed = str(error)

    def _judge(self, entrant: _Entrant, round: int, panel: Sequence[int]) -> None:
        """Look at some clients."""
        session = entrant.session
        if entrant.failed is not None:
            return
        scores = session.engine.evaluate(round, session.shown, session.split, sorted(panel))
        self.cost += len(panel) / session.cohort * judging(session.plan, session.local.epochs)
        for score in scores.get("validation", []):
            if score.samples:
                value = -score.loss * score.samples if score.correct is None else float(score.correct)
                entrant.tally[score.client] = (value, float(score.samples))
        if not entrant.tally:
            raise DataError(
                f"none of the {len(panel)} clients that were drawn to be judged has validation samples, and a choice "
                "looks at nothing else: raise --validation-share, or cut the data into fewer clients"
            )
        if not math.isfinite(entrant.score):
            entrant.failed = "its validation loss is not finite"

    def _without_failed(self, entrants: Sequence[_Entrant]) -> list[_Entrant]:
        for entrant in entrants:
            if entrant.failed is not None:
                why = f"failed: {entrant.failed}"
                self.rows[entrant.label] = Trial(entrant.label, None, None, None, entrant.rounds, None, why)
        left = [entrant for entrant in entrants if entrant.failed is None]
        if not left:
            raise TrainingError(f"no candidate could be trained. The first one: {entrants[0].failed}")
        return left

    def _ranked(self, entrants: Sequence[_Entrant], keep: int, metric: str) -> list[_Entrant]:
        """Those that go on: the best by figure, and the simplest of those that are as good within noise."""
        order = sorted(entrants, key=lambda entrant: (-entrant.score, entrant.simplicity))
        gaps = {entrant.label: paired(order[0].tally, entrant.tally) for entrant in order}
        within = [gaps[entrant.label][0] <= gaps[entrant.label][1] for entrant in order]
        as_good = order[: len(order) - within[::-1].index(True)]  # the best one is within noise of itself
        simplest = min(as_good, key=lambda entrant: entrant.simplicity)
        going = [simplest, *(e for e in order if e is not simplest)][:keep]
        for entrant in order:
            behind, error = gaps[entrant.label]
            verdict = f"dropped after {entrant.rounds} rounds"
            if entrant in going:
                verdict = "chosen" if keep == 1 else "goes on"
            elif keep == 1:
                verdict = "as good within noise" if entrant in as_good else "not as good"
            self.rows[entrant.label] = Trial(
                entrant.label,
                -entrant.score if metric == "loss" else entrant.score,
                behind,
                error if math.isfinite(error) else None,
                entrant.rounds,
                entrant.simplicity[0],
                verdict,
            )
        return going

    def _reason(self, chosen: _Entrant) -> str:
        """One sentence."""
        mine = self.rows[chosen.label]
        others = [r for r in self.rows.values() if r.behind is not None and r.label != mine.label]
        others = [row for row in others if row.rounds == mine.rounds]
        if not others:
            return f"{chosen.label} is the only candidate that is left."
        first = min(others, key=lambda row: row.behind or 0)
        if mine.behind:
            noise = "one client cannot tell" if mine.error is None else f"standard error over clients {mine.error:.3f}"
            less = f": {_personal(mine)} of it is personal, of the other {_personal(first)}"
            return (
                f"{first.label} is ahead of {mine.label} by {mine.behind:.3f} on validation samples, which is within "
                f"noise ({noise}), and {mine.label} is simpler{'' if mine.personal == first.personal else less}."
            )
        error = "" if first.error is None else f" (standard error over clients {first.error:.3f})"
        return f"{mine.label} does best on validation samples; {first.label} is next, {first.behind:.3f} behind{error}."


def _families(entrants: Sequence[_Entrant]) -> list[list[_Entrant]]:
    """The candidates by what they train; those that have come equally far."""
    found: list[list[_Entrant]] = []
    for entrant in entrants:
        alike = [
            family
            for family in found
            if family[0].session.plan.training == entrant.session.plan.training and family[0].rounds == entrant.rounds
        ]
        if alike:
            alike[0].append(entrant)
        else:
            found.append([entrant])
    return found


def _personal(row: Trial) -> str:
    share = row.personal or 0.0
    return f"{share:.0%}" if share >= 0.005 else "hardly anything" if share else "nothing"
