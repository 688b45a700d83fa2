"""fit(): the one round loop.

1 draw a cohort                     uniform, without replacement, from (seed, round)
2 train                             clients train; results stay with them
3 measure and decide                only sums reach the rule; it makes the new split
4 collect and aggregate             Σ n_k·shared, Σ n_k; sums that are not finite are not taken: the round is skipped
5 keep                              clients store what is personal
6 evaluate, record, commit          a round is wholly on disk, or not at all; after the last one newcomers are served
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedfac import evaluate
from fedfac.aggregate import (
    Sums,
    aggregate,
    check_measured,
    check_sound,
    running_mean,
    weight_of_newest,
    with_momentum,
)
from fedfac.anatomy import Anatomy
from fedfac.data.federation import Federation, are_numbers
from fedfac.disk import plain
from fedfac.engine.lanes import LaneEngine, pick_device, pick_lanes
from fedfac.engine.protocol import Engine
from fedfac.engine.store import CachedStore, Elsewhere, MemoryStore, Store
from fedfac.errors import ConfigError, TooFewRepliesError, TrainingError, UnsoundSumsError
from fedfac.method import Loss, Method, at_least_one
from fedfac.methods import as_method
from fedfac.numerics import Numerics
from fedfac.observers import Observer, told
from fedfac.preflight import (
    ALLOW,
    ALONE,
    check_cohort,
    check_fits,
    cohort_size,
    draw_cohort,
    evaluation_interval,
    hold_out_newcomers,
    is_due,
    json_like,
    tells_personal_weights,
    tested_clients,
)
from fedfac.records import TRAINING, Clock, Record, has_decided, split_record, training_record
from fedfac.result import Result
from fedfac.roster import Roster
from fedfac.rules import Decision, Memory, decide
from fedfac.run import RunDirectory, check_same_run, read_config
from fedfac.run_files import tensors_of
from fedfac.settings import Settings, divided
from fedfac.split import Split
from fedfac.state import State, check_same_tensors, state_of
from fedfac.training import Local, Outcome


def fit(
    model: nn.Module,
    federation: Federation,
    *,
    method: Method | str | None = None,
    rounds: int = 50,
    rate: float | None = None,
    cohort: int | None = None,
    cohort_of_one: bool = False,
    epochs: int = 5,
    batch_size: int = 32,
    lr: float = 1e-3,
    optimizer: str = "adam",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    evaluate_every: int | None = None,
    evaluate_from: int = 1,
    evaluate_clients: int | None = None,
    metrics: Mapping[str, evaluate.Metric] | Sequence[str] | None = None,
    newcomers: float = 0.0,
    out: str | Path | None = None,
    resume: bool = False,
    from_round: int | None = None,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    precision: str = "auto",
    layout: str = "auto",
    deterministic: bool = False,
    stack: bool | None = None,
    on_round: Callable[[Record], None] | None = None,
    observers: Sequence[Observer] = (),
    should_stop: Callable[[], bool] | None = None,
    engine: Callable[[LaneEngine], Engine] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Result:
    """Train a personalised model for every client of a federation.

    Parameters
    ----------
    model
        Any ``nn.Module``. Its present weights are the common start W⁰; the module itself is not changed.
    federation
        The clients' data.
    method
        For example ``fedfac.methods.fedfac(layers=[2], tau="50%")``, or a name such as ``"fedper"``; dynamic FedFac on
        the last hidden layer by default.
    rounds
        Communication rounds, T.
    rate, cohort
        The share of clients that train in a round, or their number. By default a tenth of them, but at
        least ten (all of them if there are fewer).
    cohort_of_one
        Allow a cohort of one client for a method that measures layers of which a part is personal. It is refused
        otherwise: the sums of one client, with its shared weights, give all its personal weights.
    epochs, batch_size, lr, optimizer, momentum, weight_decay, loss
        Local training. The paper: Adam at 1e-3, reset every round. ``loss(outputs, targets)`` is a mean.
    seed
        Everything random is a function of it.
    evaluate_every, evaluate_from, evaluate_clients, metrics
        Test every so many rounds (and after the last one; by default as often as it costs a fifth of the training
        at most, counted in samples, and in three of the last ten rounds), beginning with that round, on all clients
        or on that many of them; further figures by name (``"mse"``, ``"mae"``, ``"r2"``) or as functions of
        (outputs, targets).
    newcomers
        The share of clients that is kept out of training. After the last round all of them are served by the method's
        own rule (``result.adapt``), which costs about a round: ``"newcomers"`` in its record says how they fare.
    out, resume, from_round
        The run directory, which only its owner can read, and whether to go on with the run that is in it: after its
        last whole round, or after an earlier one, if its state is still kept (``RunDirectory.earlier_rounds``). What
        came after that one is given up.
    lanes, device
        How many clients train at a time, and where. They do not change the results (``lanes``) or only
        their rounding (``device``).
    precision, layout, deterministic, stack
        How numbers are computed, which changes their rounding and the speed: ``"fp32"``, ``"tf32"`` or ``"bf16"``;
        ``"contiguous"`` or ``"channels-last"``; whether a GPU may use kernels that add in any order; and whether the
        clients of a small fully connected model are trained as one. ``"auto"`` (for ``stack`` None) is a fixed rule.
    on_round
        Called with the record of every round.
    observers
        Followers of the whole run: :mod:`fedfac.observers` has TensorBoard, MLflow and Weights & Biases.
    should_stop
        Asked after every round; True ends the run there. It can be resumed.
    engine
        Wraps the in-process engine, for instance to watch what crosses the line to the server.
    origin
        What the command line was asked for, so that it can rebuild the run.
    """
    asked = dict(locals())  # the arguments: nothing else has a name yet
    local, settings = divided(asked, without=("model", "federation", "method", "on_round", "should_stop"))
    return Session(model, federation, as_method(method), local, settings).drive(on_round, should_stop)


class Session:
    """A run that goes on round by round: the server's state, the split, and what has been recorded.

    :func:`fit` drives one to its end; a comparison of times alternates between several.
    """

    def __init__(
        self,
        model: nn.Module,
        federation: Federation | Roster,
        method: Method,
        local: Local,
        settings: Settings,
    ) -> None:
        self.method = method
        self.federation, self.local, self.settings, self.seed = federation, local, settings, settings.seed
        at_least_one(
            rounds=settings.rounds, evaluate_every=settings.evaluate_every, evaluate_from=settings.evaluate_from
        )
        self.participants, self.newcomers = hold_out_newcomers(len(federation), settings.newcomers, self.seed)
        self.cohort = cohort_size(len(self.participants), settings.rate, settings.cohort)
        self.tested = tested_clients(self.participants, settings.evaluate_clients, self.seed)
        metrics = evaluate.named_metrics(settings.metrics, federation.classes)
        device = pick_device(settings.device)
        lanes = pick_lanes(settings.lanes, device)
        numerics = Numerics.choose(
            model,
            device,
            precision=settings.precision,
            layout=settings.layout,
            deterministic=settings.deterministic,
        )
        template = copy.deepcopy(model)
        self.template = method.wrapped(template)
        self.plan = method.plan(Anatomy.of(self.template))
        check_cohort(self.plan, self.cohort, len(self.participants), allowed=settings.cohort_of_one)
        start = state_of(self.template)
        self.evaluate_every = settings.evaluate_every or 1
        if isinstance(federation, Federation):
            check_fits(self.template, federation, local)
            self.evaluate_every = settings.evaluate_every or evaluation_interval(
                federation, self.tested, self.cohort, local.epochs
            )
        self.about = self._about(metrics)
        self.run = self._open_run(start)
        self.records: list[Record] = []
        self.masks: dict[int, Mapping[str, tuple[bool, ...]]] = {}
        self.client_table: list[dict[str, Any]] = []
        self.server = {name: t.to(device) for name, t in start.items()}
        self.split = self.plan.split_in(0)
        self.memory: Memory = {}  # what the rule remembers from round to round
        self.averaged: State = {}
        self.velocity: State = {}
        self.next_round = min(self.plan.first_decision, 1)
        self.decision: Decision | None = None  # of this round, or of the last one
        self.seconds: dict[str, float] = {}  # of the last round
        try:
            self._restore()
            self._store: Store = MemoryStore() if self.run is None else CachedStore(self.run, device)
            if isinstance(federation, Roster):
                self._store = Elsewhere()
                self.engine: Engine = federation.connect(self.template, self.plan, self.records)
            else:
                inner = LaneEngine(
                    self.template,
                    federation,
                    self.plan,
                    local,
                    self._store,
                    seed=self.seed,
                    lanes=lanes,
                    numerics=numerics,
                    stack=settings.stack,
                    metrics=metrics,
                    beside=settings.beside,
                )
                self.engine = inner if settings.engine is None else settings.engine(inner)
        except BaseException:
            if self.run is not None:
                self.run.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        if self.run is not None:
            self.run.close()

    def drive(
        self, on_round: Callable[[Record], None] | None = None, should_stop: Callable[[], bool] | None = None
    ) -> Result:
        """Go through all rounds that are left, close, and return what came out."""
        with self, told(self.settings.observers, self.about, lambda: self.finished) as tell:
            while not self.finished:
                record = self.step()
                tell(record)
                if on_round is not None:
                    on_round(record)
                if should_stop is not None and should_stop():
                    break
        return self.result()

    def go_on_from(self, other: Session) -> None:
        """Begin where ``other`` stands, which has done up to now (a warm-up) what this session would have done."""
        mine, theirs = self.server.keys(), other.server.keys()
        if self.records or not (theirs <= mine or mine <= theirs):
            raise ConfigError("a session goes on from another one of the same model, and before its own first round")
        self._take_over(other)
        self.next_round = other.next_round
        same_memory = self.plan.prediction.average == other.plan.prediction.average
        if mine == theirs and same_memory:  # with another memory the mean begins anew
            self.averaged = other.averaged

    def lend(self, others: Sequence[Session]) -> None:
        """Keep what the rules of ``others`` measure until the next round: they train alike, and decide for themselves.

        Where all have one rule, there is one decision, and nothing has to be kept.
        """
        if isinstance(self.engine, LaneEngine) and not all(self.plan.decides_as(other.plan) for other in others):
            measured = {name for o in others if (rule := o.plan.rule) and rule.measures for name in rule.tau}
            self.engine.lent = frozenset(t for name in measured for t in self.engine.layers[name].tensors)

    @property
    def _remote(self) -> bool:
        """Whether the clients keep what is personal on machines of their own."""
        return isinstance(self.federation, Roster)

    @property
    def shown(self) -> State:
        """What clients predict with: the server's state, or its mean over rounds."""
        return {**self.server, **self.averaged} if self.averaged else self.server

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.next_round > self.settings.rounds

    def step(self, *, like: Session | None = None) -> Record:
        """One round; number 0 is the static methods' decision before the first one. Returns its record.

        ``like`` is a session that trains as this one does (equal :class:`fedfac.method.Training`) and has just done
        this round: then only the predictions are made here, and decisions by another rule (:meth:`lend`).
        """
        number = self.next_round
        clock = Clock()
        if self.plan.warmup and number == self.plan.warmup + 1:
            self.split = self.plan.split
        before, remembered = self.split, self.memory
        record: Record = {"round": number}
        self.decision = None
        try:
            if like is None:
                self._advance(number, record, clock)
            else:
                self._repeat(number, record, clock, like)
        except (TooFewRepliesError, UnsoundSumsError) as skip:
            if number == 0:
                raise TrainingError(f"the one decision before the first round cannot be made: {skip}") from skip
            if like is not None and "skipped" not in like.records[-1]:
                raise TrainingError(f"round {number} cannot be decided as it was trained: {skip}") from skip
            self._undecide(before, remembered)
            if isinstance(skip, TooFewRepliesError):
                record |= training_record(skip.outcomes, self.federation.names)
            record["skipped"] = str(skip)
        record["shared_share"] = self.split.shared_share
        record["split"] = split_record(self.split, before, self.decision)
        test = number > 0 and self._is_due(number) and "skipped" not in record
        if test:
            scores = self.engine.evaluate(number, self.shown, self.split, self.tested)
            record |= {part: evaluate.summary(own, self.plan.evaluates(number)) for part, own in scores.items()}
            self.client_table = plain(evaluate.table(scores["test"], self.federation.names))
            absent = set(self.tested) - {score.client for score in scores["test"]}
            if absent:
                record["not_tested"] = [self.federation.names[client] for client in sorted(absent)]
            if number == self.settings.rounds and self.newcomers:
                record |= self._serve()
            clock.lap("evaluate")
        record = plain(record)  # a loss that is not finite is None, here as in the file
        if self.run is not None:
            self.run.commit(
                record,
                self.server,
                self.split,
                scores={} if self.decision is None else self.decision.scores,
                clients=self.client_table if test else None,
                timing=clock.seconds,
                memory=self.memory,
                averaged=self.averaged,
                velocity=self.velocity,
                put_off=like is not None and not test,
            )
        self.records.append(record)
        self.seconds = clock.seconds
        self.masks[number] = self.split.masks
        self.next_round = number + 1
        return record | {"seconds": sum(clock.seconds.values()), "timing": clock.seconds}

    def _advance(self, number: int, record: Record, clock: Clock) -> None:
        """Train, decide where the plan says so, aggregate; all but the evaluation."""
        before, rule = self.split, self.plan.rule
        if number > 0 or (rule is not None and rule.measures):
            size = len(self.participants) if number == 0 and self.plan.probe_all else self.cohort
            cohort = draw_cohort(self.participants, size, self.seed, number)
            outcomes = self.engine.train(number, self.server, self.split, cohort)
            record |= training_record(outcomes, self.federation.names)
            self._check_any_finite(number, outcomes)
            self._check_several(number, outcomes)
            clock.lap("train")
        self._decide(number, clock, self.engine)
        if number > 0:
            total = self.engine.collect(self.split)
            record["left_out"] |= {self.federation.names[client]: why for client, why in total.missing.items()}
            self._take(total, before, number)
            self.engine.keep(self.split)
            clock.lap("aggregate")

    def _take(self, total: Sums, before: Split, number: int) -> None:
        """The server's step: all of it, or none if a number of it is not finite."""
        step = self.plan.training.server
        server = aggregate(self.server, total, self.split, before=before, rate=step.rate)
        velocity = self.velocity
        if step.momentum:
            server, velocity = with_momentum(
                self.server,
                server,
                velocity,
                momentum=step.momentum,
                moved=[name for name, _ in self.template.named_parameters()],
                split=self.split,
                before=before,
            )
            check_sound("the server's step with momentum", velocity)
            check_sound("the server's state after its step with momentum", server)
        averaged = self._averaged(server, number)
        self.server, self.velocity, self.averaged = server, velocity, averaged

    def _undecide(self, before: Split, remembered: Memory) -> None:
        """Undo the decision of a round that is skipped. One that is made once stands: nodes have acted on it."""
        if self.decision is None or self.plan.every_round:
            self.split, self.memory, self.decision = before, remembered, None

    def _decides(self, number: int) -> bool:
        """Whether the rule is asked in this round."""
        return self.plan.decides(number, decided=has_decided(self.records))

    def _decide(self, number: int, clock: Clock, engine: Engine) -> None:
        """The rule's decision about the clients that have just trained in an engine, if it is asked in this round."""
        rule = self.plan.rule
        if rule is None or not self._decides(number):
            return
        sums = engine.moments(rule) if rule.measures else {}
        check_measured(sums)
        clock.lap("moments")
        self.decision = decide(rule, self.split, sums, seed=self.seed, round=number, memory=self.memory)
        self.split, self.memory = self.decision.split, self.decision.memory
        clock.lap("decide")

    def _averaged(self, server: State, number: int) -> State:
        """The mean over rounds with this one in it, if the method predicts with one."""
        if not self.plan.prediction.average:
            return self.averaged
        averaged = running_mean(self.averaged, server, weight_of_newest(self.plan.prediction.average, number))
        check_sound("the mean over rounds", averaged)
        return averaged

    def _repeat(self, number: int, record: Record, clock: Clock, like: Session) -> None:
        """What ``like`` has come to in this round, as if it had been done here; another rule is asked for itself."""
        done, seconds = like.records[-1], like.seconds
        if done["round"] != number or like.plan.training != self.plan.training:
            raise ConfigError(f"{self.method.name} cannot repeat round {done['round']} of {like.method.name}")
        record |= {key: done[key] for key in TRAINING if key in done}
        together = self.plan.decides_as(like.plan)
        if together:
            self.split, self.memory = self.plan.split_in(number, like.split.masks), like.memory
            self.decision = like.decision
        if "skipped" in done:
            raise UnsoundSumsError(done["skipped"])
        if not together:
            self._decide(number, clock, like.engine)
        self._take_over(like)
        if number > 0:
            self.averaged = self._averaged(self.server, number)
            kept = sorted(self.split.kept)
            for client in record["cohort"] if kept else ():
                if self.federation.names[client] not in record["left_out"]:
                    own = like.trained(client)
                    # what this method keeps beyond that is not trained: it is where all began
                    self._store.put(client, {name: own.get(name, self.server[name]) for name in kept})
        clock.seconds = {**{step: seconds[step] for step in seconds if step != "evaluate"}, **clock.seconds}

    def _take_over(self, other: Session) -> None:
        self.server = {name: other.server.get(name, tensor) for name, tensor in self.server.items()}
        self.velocity = other.velocity

    def trained(self, client: int) -> State:
        """What a client keeps of its last training, by reference."""
        return self._store.get(client) or {}

    def _serve(self) -> Record:
        """How newcomers fare that adapt; an ensemble, for which personal parts would leave, is not made unasked."""
        scores = self.engine.serve(self.shown, self.split, self.newcomers)
        return {"newcomers": {"adapt": evaluate.summary(scores, self.plan.adapts(self.split))}} if scores else {}

    def result(self) -> Result:
        """What has come out so far; call it when the session is closed."""
        return Result(
            template=self.template,
            server={name: t.cpu() for name, t in self.shown.items()},
            split=self.split,
            store=self._store if self.run is None or self._remote else RunDirectory.read(self.run.path),
            names=self.federation.names,
            records=self.records,
            masks=self.masks,
            clients=self.client_table,
            path=None if self.run is None else self.run.path,
            finished=self.finished,
            plan=self.plan,
            local=self.local,
            seed=self.seed,
            federation=self.federation if isinstance(self.federation, Federation) else None,
            newcomers=self.newcomers,
        )

    def _check_any_finite(self, number: int, outcomes: Mapping[int, Outcome]) -> None:
        if all(o.problem for o in outcomes.values()):
            if self.run is not None:
                self.run.rollback()
            problems = sorted({str(o.problem) for o in outcomes.values()})
            raise TrainingError(
                f"round {number}: no client of the cohort trained to finite numbers ({'; '.join(problems)}). "
                "Lower the learning rate or look at the data; the last good round is saved."
            )

    def _check_several(self, number: int, outcomes: Mapping[int, Outcome]) -> None:
        """A cohort that has shrunk to one client is not measured either."""
        good = [client for client, outcome in outcomes.items() if outcome.problem is None]
        alone = len(good) == 1 and self._decides(number) and tells_personal_weights(self.plan)
        if alone and not self.settings.cohort_of_one:
            name = self.federation.names[good[0]]
            raise UnsoundSumsError(f"only client {name} of the cohort is left, and {ALONE}. {ALLOW}")

    def _restore(self) -> None:
        saved = None if self.run is None else self.run.checkpoint()
        if self.run is None or saved is None:
            return
        self.server = {name: t.to(self.server[name].device) for name, t in saved.server.items()}
        self.averaged = {name: t.to(self.server[name].device) for name, t in saved.averaged.items()}
        self.velocity = {name: t.to(self.server[name].device) for name, t in saved.velocity.items()}
        self.split, self.memory = self.plan.split_in(saved.round, saved.masks), saved.memory
        self.records, self.masks = self.run.records(), dict(self.run.masks())
        self.client_table = self.run.clients()
        self.next_round = saved.round + 1

    def _is_due(self, number: int) -> bool:
        settings = self.settings
        return is_due(
            number,
            rounds=settings.rounds,
            every=self.evaluate_every,
            first=settings.evaluate_from,
            by_default=settings.evaluate_every is None,
        )

    def _about(self, metrics: Mapping[str, evaluate.Metric]) -> dict[str, Any]:
        """What makes this run this run: it can be gone on with only if all of it is the same."""
        return {
            "method": self.method.describe(),
            "local": self.local.describe(),
            "cohort": self.cohort,
            "seed": self.seed,
            "evaluate_every": self.evaluate_every,
            "evaluate_from": self.settings.evaluate_from,
            "evaluate_clients": self.settings.evaluate_clients,
            "metrics": list(metrics),
            "newcomers": self.settings.newcomers,
            "clients": len(self.federation),
            "data": self.federation.fingerprint,
        }

    def _open_run(self, start: State) -> RunDirectory | None:
        from fedfac import __version__

        settings = self.settings
        if settings.out is None:
            if settings.resume:
                raise ConfigError("resume=True needs out=, the folder of the run to go on with")
            return None
        if settings.from_round is not None and not settings.resume:
            raise ConfigError(f"from_round={settings.from_round} goes with resume=True: it goes back in a run")
        config = {
            "version": __version__,
            "rounds": settings.rounds,
            "settings": self.about,
            "tensors": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in start.items()},
            "split": self.plan.split.to_json(),
            "resolved": self.method.resolved(self.plan, self.local.epochs),
            "names": None if are_numbers(self.federation.names) else list(self.federation.names),
            "origin": settings.origin,
        }
        if settings.choice is not None:
            config["choice"] = dict(settings.choice)
        if isinstance(self.federation, Roster):
            config["remote"] = dict(self.federation.about)
        if not settings.resume:
            return RunDirectory.create(settings.out, json_like(config), partition=self.federation.partition_json())
        found = read_config(settings.out)
        check_same_tensors(start, tensors_of(found))
        check_same_run(Path(settings.out), found["settings"], json_like(self.about))
        return RunDirectory.resume(settings.out, rounds=settings.rounds, from_round=settings.from_round)
