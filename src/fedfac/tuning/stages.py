"""What was tried and what came out: one optuna study for each stage, in one SQLite file.

Stages (paper 5.3): Λ first, then τ with the best Λ, then κ with the best Λ and τ. A joint search is a single stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedfac.config import Config
from fedfac.errors import ConfigError, TrainingError
from fedfac.seeds import key
from fedfac.tuning import automatic
from fedfac.tuning.plan import PARAMETERS, Search, Value, with_values

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

STORAGE = "studies.sqlite"
JOINT = "joint"
_PATIENCE = 60  # seconds that a process waits for another one to end its transaction


@dataclass(frozen=True)
class Tried:
    """One value of one parameter: its (best) score on validation data, or why there is none."""

    value: Value
    score: float | None
    state: str  # "complete", "pruned", "failed" or "waiting"
    trials: int


@dataclass(frozen=True)
class Outcome:
    """What a search has found so far."""

    tables: Mapping[str, Sequence[Tried]]  # by parameter, in the order of the search
    best: Mapping[str, Value]
    chosen: Config
    finished: bool


@dataclass(frozen=True)
class Stage:
    """One study: what is searched, with everything else fixed."""

    search: Search
    name: str
    fixed: Mapping[str, Value]
    searched: Mapping[str, tuple[Value, ...]]

    @cached_property
    def study(self) -> optuna.Study:
        """The stage's study."""
        import optuna

        return optuna.create_study(
            study_name=self.name,
            storage=_storage(self.search.out / STORAGE),
            direction="maximize" if self.search.maximizes else "minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=self.search.config.train.rounds // 4),
        )

    def ask(self) -> optuna.Trial:
        """The next trial. The sampler draws from (seed, trials so far): after a kill it draws the same again."""
        from optuna.samplers import TPESampler

        drawn = key(self.search.config.train.seed, "tune", len(self.trials()))
        self.study.sampler = TPESampler(seed=drawn % 2**32)
        return self.study.ask()

    def trials(self) -> list[FrozenTrial]:
        """Every trial so far."""
        return self.study.get_trials(deepcopy=False)

    @property
    def size(self) -> int:
        """How many trials it has in the end."""
        return self.search.trials if self.name == JOINT else len(self.searched[self.name])

    def is_finished(self) -> bool:
        """Whether every trial has come to its end."""
        trials = self.trials()
        return len(trials) >= self.size and all(trial.state.is_finished() for trial in trials)

    def complete(self) -> list[tuple[dict[str, Value], float]]:
        """Values and score of every trial that was trained to its end."""
        found = [trial for trial in self.trials() if trial.state.name == "COMPLETE"]
        return [(dict(trial.params), float(trial.value)) for trial in found if trial.value is not None]

    def best(self) -> dict[str, Value]:
        """The values with the best score; those that the search names first if several are as good."""
        sign = 1 if self.search.maximizes else -1

        def rank(found: tuple[dict[str, Value], float]) -> tuple[float, list[int]]:
            values, score = found
            return -sign * score, [self.searched[name].index(value) for name, value in values.items()]

        return min(self.complete(), key=rank, default=({}, 0.0))[0]

    def table(self, name: str) -> list[Tried]:
        """The best score of every value of a parameter."""
        better = max if self.search.maximizes else min
        trials = self.trials()
        rows = []
        for value in self.searched[name]:
            own = [trial for trial in trials if value_of(trial, name) == value]
            scores = [float(t.value) for t in own if t.state.name == "COMPLETE" and t.value is not None]
            states = {trial.state.name for trial in own}
            state = next((word for name, word in _STATES.items() if name in states), "waiting")
            rows.append(Tried(value, better(scores) if scores else None, state, len(own)))
        return rows


_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def stages(search: Search) -> Iterator[Stage]:
    """The stages that can be worked on, the last of which may be unfinished; each goes on from those before it."""
    if search.mode == JOINT:
        fixed = {name: value for name, value in search.base.items() if name not in search.space}
        yield Stage(search, JOINT, fixed, search.space)
        return
    values = search.base
    for name in PARAMETERS:
        if name not in search.space:
            continue
        if name == "layers" and search.auto:
            choice = automatic.saved(search.out)
            if choice is None:
                return
            values["layers"] = choice.layer
            continue
        if name == "kappa" and decides_nothing(values):
            return
        stage = Stage(search, name, {k: v for k, v in values.items() if k != name}, {name: search.space[name]})
        yield stage
        if not stage.is_finished():
            return
        best = stage.best()
        if not best:
            raise TrainingError(f"no value of {name} trained to finite numbers; lower the learning rate: --lr")
        values |= best


def decides_nothing(values: Mapping[str, Value]) -> bool:
    """Whether κ is without effect: at τ = inf everything is personal, whatever factor analysis says."""
    return str(values.get("tau")) == "inf"


def outcome(search: Search) -> Outcome:
    """Tables and best values so far."""
    require()
    tables: dict[str, Sequence[Tried]] = {}
    best = search.base
    finished = not search.auto or automatic.saved(search.out) is not None
    if search.auto and finished:
        best["layers"] = automatic.load(search.out).layer
    for stage in stages(search):
        tables |= {name: stage.table(name) for name in stage.searched}
        best |= stage.best()
        finished = finished and stage.is_finished()
    missing = search.space.keys() - tables.keys() - ({"layers"} if search.auto else set())
    finished = finished and not (missing - ({"kappa"} if decides_nothing(best) else set()))
    return Outcome(tables, best, with_values(search.config, best), finished)


def known_score(search: Search, values: Mapping[str, Value]) -> float | None:
    """The score of these values if they have been trained: a trial is a function of its config."""
    for stage in stages(search):
        for own, score in stage.complete():
            if {**stage.fixed, **own} == dict(values):
                return score
    return None


def value_of(trial: FrozenTrial, name: str) -> Value | None:
    """The value of a parameter in a trial, also if it still waits."""
    waiting = trial.system_attrs.get("fixed_params", {})
    found: Value | None = trial.params.get(name, waiting.get(name))
    return found


def require() -> None:
    """Fail with the way out when optuna is not there."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("tuning is done with optuna, which is not installed: pip install 'fedfac[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@lru_cache(maxsize=4)
def _storage(path: Path) -> optuna.storages.RDBStorage:
    from optuna.storages import RDBStorage

    return RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": _PATIENCE}})
