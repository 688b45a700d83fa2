"""Processes at work on a search: any number of them, started together or apart, killed or not.

A process takes a trial under the lock of the folder, and holds a lock of the trial while it trains. Both locks die
with their process, so a trial whose process was killed is taken over by another one, or when the search is started
again. A trial is a run directory and goes on where it was.

No process ever has a test sample: trials train on ``Federation.without_test``.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fedfac import evaluate, experiment
from fedfac.data import sources
from fedfac.data.federation import Federation
from fedfac.errors import TrainingError
from fedfac.records import Record
from fedfac.rounds import Session
from fedfac.tuning import automatic
from fedfac.tuning.plan import Search, load
from fedfac.tuning.stages import JOINT, Outcome, Stage, known_score, outcome, require, stages, value_of

if TYPE_CHECKING:
    import optuna

FOLDER = "trials"
WAIT = 0.2  # seconds between two looks at trials that other processes train

OnTrial = Callable[[str, int], Callable[[Record], None] | None]


def run(
    search: Search,
    *,
    processes: int = 1,
    lanes: int | None = None,
    device: str | None = None,
    on_trial: OnTrial = lambda title, finished: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Search, in this process and in ``processes - 1`` more.

    ``on_trial`` is told the title of the trial that begins here and how many are finished, and may return what is
    called after every round.
    """
    require()
    lanes = _lanes(lanes, processes)
    with _helpers(search, processes - 1, lanes, device):
        work(search, lanes=lanes, device=device, on_trial=on_trial, should_stop=should_stop)
    found = outcome(search)
    if found.finished:
        shutil.rmtree(search.out / FOLDER, ignore_errors=True)
    return found


def work(
    search: Search,
    *,
    lanes: int | None = None,
    device: str | None = None,
    on_trial: OnTrial = lambda title, finished: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train what is left to train, beside other processes that do the same, until nothing is left anywhere."""
    worker = _Worker(search, lanes, device, on_trial, should_stop)
    if search.auto:
        worker.probe()
    for stage in stages(search):
        worker.finish(stage)
        if should_stop():
            return


class _Worker:
    """One process at work."""

    def __init__(
        self,
        search: Search,
        lanes: int | None,
        device: str | None,
        on_trial: OnTrial,
        should_stop: Callable[[], bool],
    ) -> None:
        self.search, self.lanes, self.device = search, lanes, device
        self.on_trial, self.should_stop = on_trial, should_stop
        self._federation: Federation | None = None
        self._folder = search.out / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._taking = FileLock(search.out / "lock")

    @property
    def federation(self) -> Federation:
        """The clients without their test samples, loaded when the first trial needs them."""
        if self._federation is None:
            tuned = self.search.tuned
            self._federation = sources.load(tuned.data, seed=tuned.train.seed).without_test()
        return self._federation

    def probe(self) -> None:
        """Pick Λ from two rounds, unless a process has done so."""
        with self._taking:
            if automatic.saved(self.search.out) is None:
                config, space = self.search.tuned, self.search.space["layers"]
                choice = automatic.choose(
                    config, self.federation, layers=[str(s) for s in space], lanes=self.lanes, device=self.device
                )
                automatic.save(choice, self.search.out)

    def finish(self, stage: Stage) -> None:
        """Train trials of the stage until none is left, here or in another process."""
        with self._taking:
            self._enqueue(stage)
        while not self.should_stop():
            with self._taking:
                taken = self._take(stage)
            if taken is not None:
                trial, lock = taken
                try:
                    self._train(stage, trial)
                finally:
                    lock.release()  # taken once: 'with lock' would take it a second time, and give back only that
            elif stage.is_finished():
                return
            else:
                time.sleep(WAIT)  # others train; if one of them dies, its trial is ours

    def _enqueue(self, stage: Stage) -> None:
        """Every value of a stage is a trial; what an earlier stage has trained is copied from it."""
        if stage.name == JOINT:
            return
        from optuna.distributions import BaseDistribution, CategoricalDistribution
        from optuna.trial import create_trial

        study, name = stage.study, stage.name
        there = {value_of(trial, name) for trial in stage.trials()}
        for value in stage.searched[name]:
            if value in there:
                continue
            score = known_score(self.search, {**stage.fixed, name: value})
            if score is None:
                study.enqueue_trial({name: value})
            else:
                among: dict[str, BaseDistribution] = {name: CategoricalDistribution(stage.searched[name])}
                study.add_trial(create_trial(value=score, params={name: value}, distributions=among))

    def _take(self, stage: Stage) -> tuple[optuna.Trial, FileLock] | None:
        """A trial that nobody trains: one whose process died, else the next one."""
        from optuna.trial import Trial, TrialState

        trials = stage.trials()
        for found in trials:
            if found.state == TrialState.RUNNING and (lock := _free(self._lock_of(stage, found.number))):
                return Trial(stage.study, found._trial_id), lock
        more = stage.name == JOINT and len(trials) < stage.size
        if more or any(trial.state == TrialState.WAITING for trial in trials):
            trial = stage.ask()
            lock = FileLock(self._lock_of(stage, trial.number))
            lock.acquire()
            return trial, lock
        return None

    def _lock_of(self, stage: Stage, number: int) -> Path:
        return self._folder / f"{stage.name}-{number}.lock"

    def _train(self, stage: Stage, trial: optuna.Trial) -> None:
        """One trial, from its beginning or from where it was left."""
        from optuna.trial import TrialState

        study = stage.study
        own: dict[str, Any] = {name: trial.suggest_categorical(name, among) for name, among in stage.searched.items()}
        values = {**stage.fixed, **own}
        known = known_score(self.search, values)
        if known is not None:
            study.tell(trial, known)
            return
        finished = sum(t.state.is_finished() for s in stages(self.search) for t in s.trials())
        shown = self.on_trial(" ".join(f"{name}={value}" for name, value in own.items()), finished)
        folder = self._folder / f"{stage.name}-{trial.number}"
        try:
            with experiment.session(
                self.search.trial(values),
                out=folder,
                resume=(folder / "config.json").exists(),
                lanes=self.lanes,
                device=self.device,
                federation=self.federation,
            ) as session:
                for record in _rounds(session):
                    if shown is not None:
                        shown(record)
                    if stage.name == JOINT and _is_hopeless(study, trial, record):
                        study.tell(trial, state=TrialState.PRUNED)
                        break
                    if self.should_stop():
                        return  # nobody holds it now; it goes on when the search does
                else:
                    study.tell(trial, _score(session.records))
        except TrainingError:
            study.tell(trial, state=TrialState.FAIL)
        shutil.rmtree(folder, ignore_errors=True)  # its figures are in the study


def _rounds(session: Session) -> Iterator[Record]:
    """The rounds that are on disk, then those that are still to be trained."""
    yield from list(session.records)
    while not session.finished:
        yield session.step()


def _is_hopeless(study: optuna.Study, trial: optuna.Trial, record: Record) -> bool:
    """Whether the trial is below the median of the others at this round."""
    if "validation" not in record:
        return False
    known = next(t for t in study.get_trials(deepcopy=False) if t.number == trial.number).intermediate_values
    if record["round"] not in known:  # else a process that was killed has reported it
        trial.report(_figure(record), record["round"])
    return trial.should_prune()


def _figure(record: Record) -> float:
    validation = record["validation"]
    value = validation["accuracy"] if "accuracy" in validation else validation["loss"]
    return math.inf if value is None else float(value)


def _score(records: Sequence[Record]) -> float:
    """The headline on validation data: the mean over the evaluations of the last ten rounds."""
    curve = [(record["round"], _figure(record)) for record in records if "validation" in record]
    return evaluate.headline(curve, records[-1]["round"])["last"]


def _free(path: Path) -> FileLock | None:
    """The lock, if nobody holds it."""
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def _lanes(lanes: int | None, processes: int) -> int | None:
    """The cores, shared out between the processes."""
    if lanes is not None or processes == 1:
        return lanes
    return max(1, len(os.sched_getaffinity(0)) // processes if hasattr(os, "sched_getaffinity") else 1)


@contextmanager
def _helpers(search: Search, number: int, lanes: int | None, device: str | None) -> Iterator[None]:
    """More processes at work on the folder; they stop when this one does, or dies."""
    context = multiprocessing.get_context("spawn")  # a fork would copy PyTorch's threads half-way
    stop = context.Event()
    helpers = [
        context.Process(
            target=_help,
            args=(str(search.out), search.config.trust_code, lanes, device, stop, os.getpid()),
            daemon=True,
        )
        for _ in range(number)
    ]
    for helper in helpers:
        helper.start()
    try:
        yield
    finally:
        stop.set()
        for helper in helpers:
            helper.join()


def _help(out: str, trust_code: bool, lanes: int | None, device: str | None, stop: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first process decides
    require()
    search = load(Path(out), trust_code=trust_code)
    work(search, lanes=lanes, device=device, should_stop=lambda: stop.is_set() or os.getppid() != parent)
