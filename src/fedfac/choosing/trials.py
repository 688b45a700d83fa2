"""The trials: successive halving on validation samples, with clients, start and cohorts the same for all.

*The trunk.* The first rounds only tell who learns fast. So two fifths of what a choice may cost go into rounds of
FedAvg, once for all, and candidates branch off from there, as if they had warmed up for so long. A candidate that does
not train as FedAvg does (other phases, two models) is trained from the start instead.

*Halving.* All candidates get a turn, the better half some more, until four or fewer are left, who get the last one
(after Jamieson and Talwalkar, AISTATS 2016; each stage costs about the same).

*Judging.* Every stage looks at further clients, drawn at random. A client that has just been trained would flatter
what is personal, one that never was would damn it. So before a client is judged, a copy of its model trains its
personal part (and a shared head, if its method does so before it predicts) for three rounds' epochs, whether or not it
was in a cohort; where nothing is shared, for as many as it would have had by then, from the common start.
Differences are paired by client. A candidate is as good as the best one within noise if it, or one that is further
behind, is behind by one standard error at most. The simplest of those is never dropped, and is chosen in the end:
simplest is what keeps the smallest share of the model personal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fedfac.anatomy import Anatomy
from fedfac.choosing.candidates import Candidate
from fedfac.choosing.choice import Choice, Trial
from fedfac.errors import DataError, TrainingError
from fedfac.method import PERSONAL, Method, Phase, Plan
from fedfac.methods.averaging import let_go
from fedfac.rounds import Session
from fedfac.seeds import stream

TRUNK = 0.4  # of what a choice may cost
CATCH_UP = 3  # rounds that a personal part is trained before it is judged
ALONE = (CATCH_UP, 10)  # the same where nothing is shared: as many as a client would have had, within these
TURN = 1 + CATCH_UP  # what a candidate's turn costs, in rounds
FINALISTS = 4
Start = Callable[[Method], Session]
OnRound = Callable[[str, int, int, Mapping[str, Any]], None]  # candidate, cost so far and at most, record of the round
Tally = Mapping[int, tuple[float, float]]  # by client: (sum of what counts over its samples, samples)


def stages(candidates: int, rounds: float) -> list[tuple[int, int]]:
    """(How many candidates, how many turns each) of every stage; one turn at least.

    A turn is a round, and a cohort's worth of clients judged.

    >>> stages(8, 64), stages(6, 10), stages(1, 10)
    ([(8, 1), (4, 2)], [(6, 1), (3, 1)], [])
    """
    sizes = [candidates] if candidates > 1 else []
    while sizes and sizes[-1] > FINALISTS:
        sizes.append(math.ceil(sizes[-1] / 2))
    return [(size, max(1, int(rounds / (TURN * len(sizes) * size)))) for size in sizes]


def cost_of(plan: Sequence[tuple[int, int]]) -> int:
    """What stages cost at most, in rounds, if no candidate is trained from the start."""
    return sum(TURN * size * turns for size, turns in plan)


def is_plain(method: Method, plan: Plan) -> bool:
    """Whether a method's clients train as FedAvg's do, so that it can branch off from FedAvg."""
    trains = tuple(phase for phase in let_go(method, plan).phases if phase.epochs != 0)  # the others only prepare
    return trains == (Phase(),) and method.server_rate == 1


def branches_off(method: Method, model: nn.Module) -> bool:
    """Whether a method can go on from FedAvg's state: it trains as FedAvg does, and has all its tensors."""
    wrapped = Anatomy.of(method.wrap(model)) if method.wrap is not None else Anatomy.of(model)
    return is_plain(method, method.plan(wrapped)) and wrapped.shapes.keys() >= Anatomy.of(model).shapes.keys()


def shares_nothing(plan: Plan) -> bool:
    """Whether every client is by itself."""
    return plan.split.shared_share == 0 and plan.rule is None


def stand_in(method: Method, *, trunk: int, alone: int) -> Method:
    """The method as it is tried: after the trunk, and with its personal part caught up before it is judged."""

    def plan(anatomy: Any) -> Plan:
        asked = method.plan(anatomy)
        if not is_plain(method, asked):
            return asked
        if shares_nothing(asked):
            return replace(asked, refresh=(Phase(trains=PERSONAL),) * alone)
        counts = tuple(phase for phase in asked.refresh if phase.epochs == 0)  # they train nothing
        anew = asked.split.anew  # then the refresh is all there is: nothing has to be caught up with
        trained = tuple(p for p in asked.refresh if p.epochs != 0 and (anew or p.trains != PERSONAL or p.beside))
        if asked.split.kept - asked.own or any(phase.beside for phase in trained):
            trained = (replace(trained[-1], epochs=None) if trained else Phase(trains=PERSONAL),) * CATCH_UP
        return replace(let_go(method, asked), warmup=trunk, probe_all=False, refresh=(*counts, *trained))

    return replace(method, plan=plan, server_momentum=0.0)  # few rounds cannot show what it is worth


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
        self._most = budget  # what it will cost, as far as that is known
        self.rows: dict[str, Trial] = {}
        self._open = ExitStack()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def grow(self, method: Method, on_record: Callable[[int, Mapping[str, Any]], None]) -> Session:
        """The trunk: rounds that all have in common."""
        self.trunk = self._open.enter_context(self._start(method))
        while self.trunk.next_round <= self.trunk_rounds:
            on_record(self.trunk.next_round, self._step("all alike", self.trunk))
        return self.trunk

    def decide(self, candidates: Sequence[Candidate], layers: Mapping[str, float]) -> Choice:
        """Halve until one is left."""
        alive = [self._enter(candidate, place) for place, candidate in enumerate(candidates)]
        metric = "loss" if self.trunk.federation.classes is None else "accuracy"
        plan = stages(len(alive), self.budget - self.cost)
        self._most = max(self.budget, round(self.cost) + cost_of(plan))
        reached, order, seen = self.trunk_rounds, self._order(), 0
        for number, (_, turns) in enumerate(plan):
            reached += turns
            panel = order[seen : seen + turns * self.trunk.cohort]
            seen += len(panel)
            if len(panel) < turns * self.trunk.cohort:  # all have had their turn: everybody again
                panel, seen = order, 0
            for entrant in alive:
                self._try(entrant, reached, panel)
            left = self._without_failed(alive)
            left = self._ranked(left, plan[number + 1][0] if number + 1 < len(plan) else 1, metric)
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
            self.on_round(label, spent, max(spent + 1, self._most), record)
        return record

    def _order(self) -> list[int]:
        """Everybody, in the order in which clients are judged."""
        everybody = self.trunk.participants
        places = stream(self.trunk.seed, "judged").permutation(len(everybody)).tolist()
        return [everybody[place] for place in places]

    def _enter(self, candidate: Candidate, place: int) -> _Entrant:
        visits = round(self.trunk_rounds * self.trunk.cohort / len(self.trunk.participants))
        alone = max(ALONE[0], min(ALONE[1], visits))
        tried = stand_in(candidate.method, trunk=self.trunk_rounds, alone=alone)
        opened = self._open.enter_context(ExitStack())
        session = opened.enter_context(self._start(tried))
        plain = is_plain(candidate.method, session.plan) and session.server.keys() >= self.trunk.server.keys()
        if plain and not shares_nothing(session.plan):
            session.go_on_from(self.trunk)
        return _Entrant(candidate, session, opened, place)

    def _try(self, entrant: _Entrant, to: int, panel: Sequence[int]) -> None:
        """Train up to a round, then judge on some clients."""
        session = entrant.session
        try:
            while session.next_round <= to:
                if shares_nothing(session.plan):
                    session.next_round = to + 1  # nobody hears of anybody: what a client is judged by is all there is
                else:
                    self._step(entrant.label, session)
        except TrainingError as error:
            entrant.failed = str(error)
            return
        scores = session.engine.evaluate(to, session.shown, session.split, sorted(panel))
        refreshed = sum(session.local.epochs if p.epochs is None else p.epochs for p in session.plan.refresh)
        self.cost += len(panel) * refreshed / (session.cohort * session.local.epochs)
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


def _personal(row: Trial) -> str:
    return f"{row.personal:.0%}" if row.personal else "nothing"
