"""Methods × settings × seeds as one job that can be stopped, killed, and gone on with.

All methods of one setting and seed have the same partition, the same start and the same cohorts: each of those is a
function of the seed alone. A cell of the grid is an ordinary run directory. Methods that train alike and only decide or
predict in different ways (FedAvg and FedAvg+, FedPer with and without a refresh, FedFac+ with this or that Λ) are
trained once. A cell that fails is noted and the others go on; running the comparison again trains the missing cells
only.
"""

from __future__ import annotations

import itertools
import json
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import nn

from fedfac import evaluate, experiment, methods
from fedfac.anatomy import Anatomy
from fedfac.config import TYPED_SECTIONS, Config, merged
from fedfac.disk import private_folder
from fedfac.errors import ConfigError, RunError, did_you_mean
from fedfac.limits import read_json
from fedfac.methods import check_name, options_of
from fedfac.options import value_of
from fedfac.preflight import json_like
from fedfac.records import Record
from fedfac.rounds import Session
from fedfac.run import RunDirectory, atomic_write, check_same_run
from fedfac.words import file_stem

PLAN = "comparison.json"
TIMES = "times.json"
FAILED = "failed.txt"
ALONE = "alone"  # the seed that a comparison began with, if it was one: its runs are in folders without a number
LOWER_IS_BETTER = frozenset({"loss", "std", "mse", "mae", "time", "newcomers_loss"})


MOST_CELLS = 10_000


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """[compare] in a config file."""

    methods: list[str] = []
    seeds: list[int] | None = None
    vary: dict[str, list[str | int | float | bool]] = {}
    time_rounds: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is written down of a comparison."""

    methods: list[str]
    seeds: list[int]
    vary: dict[str, list[str | int | float | bool]]
    time_rounds: int
    tables: dict[str, dict[str, Any]]
    alone: int | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    setting: str
    method: str
    seed: int
    config: Config
    folder: Path


@dataclass(frozen=True)
class Comparison:
    """A planned grid in a folder."""

    out: Path
    cells: tuple[Cell, ...]
    time_rounds: int = 0  # how many rounds of every method are timed

    @property
    def settings(self) -> list[str]:
        """The labels of the settings, in order."""
        return list(dict.fromkeys(cell.setting for cell in self.cells))

    @property
    def methods(self) -> list[str]:
        """The labels of the methods, in order."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    def of(self, setting: str, method: str) -> list[Cell]:
        """The cells of one method in one setting, a cell per seed."""
        return [cell for cell in self.cells if (cell.setting, cell.method) == (setting, method)]


def plan(
    out: Path,
    *,
    methods: Sequence[str],
    tables: Mapping[str, Any],
    seeds: Sequence[int] = (0,),
    vary: Mapping[str, Sequence[Any]] | None = None,
    time_rounds: int = 0,
    trust_code: bool = False,
) -> Comparison:
    """Check every cell, then write down what is compared.

    To a comparison that is already there methods and seeds can be added; the runs that it has must be the same.
    """
    wanted = json_like(
        {
            "methods": list(methods),
            "seeds": list(seeds),
            "vary": dict(vary or {}),
            "time_rounds": time_rounds,
            "tables": dict(tables),
        }
    )
    there = _read_plan(out) if is_comparison(out) else None
    if there is not None:
        wanted["methods"] = together(there["methods"], methods)
        wanted["seeds"] = together(there["seeds"], seeds)
    wanted[ALONE] = _alone(wanted if there is None else there)
    comparison = _expand(out, wanted, trust_code=trust_code)
    if there is not None:
        # options that only new methods have may be new in the tables: what counts is that the runs stay what they are
        old = [c for c in comparison.cells if c.method in there["methods"] and c.seed in there["seeds"]]
        allowed = ("methods", "seeds", "tables") if old == list(load(out).cells) else ("methods", "seeds")
        check_same_run(out, there | {key: wanted[key] for key in (*allowed, ALONE)}, wanted)
    for cell in {(c.setting, c.method): c for c in comparison.cells}.values():
        experiment.build(cell.config)  # unknown layers, impossible partitions: fail before anything is written
    if there is None and out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is not empty and holds no comparison: choose another folder")
    if wanted != there:
        private_folder(out)
        atomic_write(out / PLAN, json.dumps(wanted, indent=1) + "\n")
    return comparison


def together(there: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """The methods (or seeds) that are there, and those that are new.

    >>> together(["fedavg", "fedfac"], ["fedfac", "fedper"])
    ['fedavg', 'fedfac', 'fedper']
    """
    return [*there, *(one for one in more if one not in there)]


def load(out: Path, *, trust_code: bool = False) -> Comparison:
    """The comparison in a folder."""
    return _expand(out, _read_plan(out), trust_code=trust_code)


def is_comparison(out: Path) -> bool:
    """Whether a folder holds a comparison."""
    return (out / PLAN).exists()


def is_finished(cell: Cell) -> bool:
    """Whether all rounds of a cell are done."""
    return rounds_done(cell) >= cell.config.train.rounds


def rounds_done(cell: Cell) -> int:
    """The last whole round of a cell."""
    if not (cell.folder / "config.json").exists():
        return 0
    directory = RunDirectory.read(cell.folder)
    try:
        return max((r["round"] for r in directory.records()), default=0)
    finally:
        directory.close()


def groups(comparison: Comparison) -> list[list[Cell]]:
    """The cells that are not finished; those that train alike, and have come equally far, train as one."""
    found: list[tuple[Any, list[Cell]]] = []
    models: dict[tuple[str, int], nn.Module] = {}  # of a setting and seed all cells have the same
    for cell in comparison.cells:
        done = rounds_done(cell)
        if done >= cell.config.train.rounds:
            continue
        key = (cell.setting, cell.seed)
        if key not in models:
            models[key] = experiment.build(cell.config)[0]
        method = methods.build(cell.config.method_name, cell.config.method_options)
        training = method.plan(Anatomy.of(method.wrapped(models[key]))).training
        for (*where, known), cells in found:
            if where == [*key, done] and known == training:
                cells.append(cell)
                break
        else:
            found.append(((*key, done, training), [cell]))
    return [cells for _, cells in found]


def train(
    comparison: Comparison,
    *,
    lanes: int | None = None,
    device: str | None = None,
    on_cells: Callable[[Sequence[Cell]], Callable[[Record], None] | None] = lambda cells: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[Path, str]:
    """Train every cell that is not finished. Returns what went wrong, by cell folder.

    Methods that train alike are trained once (equal :class:`fedfac.method.Training`), and take turns in one set of
    lanes: every one of them becomes the run that it would have become by itself, bit by bit. ``on_cells`` is told about
    every such group, and gives what is to be called with the records of its cells, the one that trains first.
    """
    failed: dict[Path, str] = {}
    for group in groups(comparison):
        on_round = on_cells(group)
        with ExitStack() as stack:
            under_way: list[tuple[Cell, Session]] = []
            for cell in group:
                with _noted(cell, failed):
                    resume = (cell.folder / "config.json").exists()
                    shared: dict[str, Any] = {}  # they take turns: one set of lanes will do
                    if under_way:
                        first = under_way[0][1]
                        shared = {"federation": first.federation, "beside": first.engine}
                    session = experiment.session(
                        cell.config, out=cell.folder, resume=resume, lanes=lanes, device=device, **shared
                    )
                    under_way.append((cell, stack.enter_context(session)))
            under_way = _unfinished(under_way, failed)  # another process may have been faster
            for _, session in under_way:
                session.lend([other for _, other in under_way])
            while under_way and not should_stop():
                trains: Session | None = None
                for cell, session in under_way:
                    with _noted(cell, failed):
                        record = session.step(like=trains)
                        trains = session if trains is None else trains
                        if on_round is not None:
                            on_round(record)
                under_way = _unfinished(under_way, failed)
        if should_stop():
            break
    return failed


def _unfinished(sessions: Sequence[tuple[Cell, Session]], failed: Mapping[Path, str]) -> list[tuple[Cell, Session]]:
    """Those that have rounds to train."""
    return [(cell, session) for cell, session in sessions if cell.folder not in failed and not session.finished]


@contextmanager
def _noted(cell: Cell, failed: dict[Path, str]) -> Iterator[None]:
    """An error inside is the cell's own: it must not take the others with it."""
    try:
        yield
    except Exception as error:
        failed[cell.folder] = f"{type(error).__name__}: {error}"
        if cell.folder.is_dir():
            atomic_write(cell.folder / FAILED, traceback.format_exc())


def figures(cell: Cell) -> dict[str, Any]:
    """What a finished (or unfinished) cell has to show; empty before its first evaluation."""
    if not (cell.folder / "config.json").exists():
        return {}
    directory = RunDirectory.read(cell.folder)
    try:
        records = directory.records()
    finally:
        directory.close()
    tested = [r for r in records if "test" in r]
    if not tested:
        return {}
    shown: dict[str, Any] = {key: value for key, value in tested[-1]["test"].items() if value is not None}
    if "accuracy" in shown:
        shown = evaluate.headline_of(records) | shown
        held = evaluate.headline_of(records, "validation")
        if held:
            shown["validation"] = held["last"]
    newcomers = tested[-1].get("newcomers", {}).get("adapt", {})
    wanted = ("accuracy", "worst_decile") if "accuracy" in newcomers else ("loss",)
    return shown | {f"newcomers_{key}": newcomers[key] for key in wanted if key in newcomers}


def take_times(comparison: Comparison, *, lanes: int | None = None, device: str | None = None) -> dict[str, float]:
    """Seconds a round of every method relative to FedAvg's (or to the first method's), in the first setting.

    The result is kept in the folder.
    """
    rounds = comparison.time_rounds
    known = times(comparison)
    if not rounds or known.keys() >= set(comparison.methods):
        return known
    configs = {name: comparison.of(comparison.settings[0], name)[0].config for name in comparison.methods}
    seconds = seconds_a_round(configs, rounds, lanes=lanes, device=device)
    base = "fedavg" if "fedavg" in seconds else next(iter(seconds))
    ratios = {name: value / seconds[base] for name, value in seconds.items()}
    atomic_write(comparison.out / TIMES, json.dumps(ratios, indent=1) + "\n")
    return ratios


def seconds_a_round(
    configs: Mapping[str, Config], rounds: int, *, lanes: int | None = None, device: str | None = None
) -> dict[str, float]:
    """The median time of a round of each of these runs, without its evaluation.

    They take turns, round by round, so that whatever else the machine does hits all of them alike; the first round
    warms up.
    """
    sessions: dict[str, Session] = {}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    try:
        for name, config in configs.items():
            sessions[name] = experiment.session(
                config,
                lanes=lanes,
                device=device,
                rounds=rounds + 2,  # the last one would be evaluated, and newcomers served
                evaluate_every=rounds + 3,
            )
        for number in range(rounds + 1):
            for name, session in sessions.items():
                timing = session.step()["timing"]
                while session.next_round <= number + 1:  # a static method's round 0
                    timing = session.step()["timing"]
                if number > 0:
                    seconds[name].append(sum(timing.values()))
    finally:
        for session in sessions.values():
            session.__exit__(None, None, None)
    return {name: statistics.median(values) for name, values in seconds.items()}


def times(comparison: Comparison) -> dict[str, float]:
    """The times that were taken, if any."""
    path = comparison.out / TIMES
    if not path.exists():
        return {}
    return {str(name): float(value) for name, value in json.loads(path.read_text()).items()}


def parse_method(text: str) -> tuple[str, dict[str, str]]:
    """``"fedprox:mu=0.1:server_rate=1"`` as a name and its options, still as text.

    >>> parse_method("fedprox:mu=0.1")
    ('fedprox', {'mu': '0.1'})
    """
    name, *pairs = text.split(":")
    options = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"{pair!r} in {text!r} is not an option: write method:option=value:option=value")
        options[key] = value
    check_name(name)
    return name, options


def known_options(labels: Sequence[str]) -> set[str]:
    """Every option that at least one of the methods has."""
    return {option for label in labels for option in options_of(parse_method(label)[0])}


def _expand(out: Path, wanted: Mapping[str, Any], *, trust_code: bool = False) -> Comparison:
    labels, seeds, tables = wanted["methods"], wanted["seeds"], wanted["tables"]
    if not labels or len(set(labels)) != len(labels):
        raise ConfigError(f"methods is {','.join(labels)!r}; give at least one method, each once")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds is {seeds}; give at least one seed, each once")
    common = {key: value for key, value in tables.get("method", {}).items() if key != "name"}
    known = known_options(labels)
    for option in common.keys() - known:
        raise ConfigError(f"none of the methods has an option {option!r}. {did_you_mean(option, sorted(known))}")
    settings = list(itertools.islice(_settings(wanted["vary"]), MOST_CELLS + 1))
    alone = _alone(wanted)
    number = len(settings) * len(labels) * len(seeds)
    if number > MOST_CELLS:
        raise ConfigError(f"methods × settings × seeds are more than {MOST_CELLS} runs: vary less at a time")
    cells = []
    for (setting, overrides), label, seed in itertools.product(settings, labels, seeds):
        name, own = parse_method(label)
        mine = options_of(name)
        options = {key: value for key, value in common.items() if methods.takes(name, key)}
        options |= {key: value_of(name, key, value, mine) for key, value in own.items()}
        asked = merged(merged(tables, overrides), {"train": {"seed": seed}})
        config = Config.from_dict({**asked, "method": {"name": name, **options}}, trust_code=trust_code)
        parts = [setting] if len(settings) > 1 else []
        if alone is None:
            parts += [label, f"seed-{seed}"]
        else:
            parts.append(label if seed == alone else f"{label}.seed-{seed}")
        cells.append(Cell(setting, label, seed, config, out.joinpath(*(_slug(part) for part in parts))))
    return Comparison(out, tuple(cells), wanted["time_rounds"])


def _settings(vary: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Every combination of the values that vary, with its label."""
    places = {key: section for section, kind in TYPED_SECTIONS.items() for key in _keys(section, kind)}
    places["model"] = "model"
    for key in vary:
        if key not in places:
            raise ConfigError(f"there is nothing called {key!r} to vary. {did_you_mean(key, places)}")
        if key == "seed":
            raise ConfigError("seeds are given by seeds, not by vary")
    for values in itertools.product(*vary.values()):
        overrides: dict[str, dict[str, Any]] = {}
        for key, value in zip(vary, values, strict=True):
            overrides.setdefault(places[key], {})["name" if key == places[key] else key] = value
        yield " ".join(f"{k}={v}" for k, v in zip(vary, values, strict=True)), overrides


def _keys(section: str, kind: type[Any]) -> list[str]:
    return [section if name == "name" else name for name in kind.__dataclass_fields__]


def _read_plan(out: Path) -> dict[str, Any]:
    found = read_json(out / PLAN, Plan, what="a comparison", error=RunError)
    plan: dict[str, Any] = msgspec.to_builtins(found)
    return plan


def _alone(plan: Mapping[str, Any]) -> int | None:
    """The seed whose runs have no number in their folders; earlier versions, which added none, do not say."""
    seeds = plan["seeds"]
    alone: int | None = plan.get(ALONE, seeds[0] if len(seeds) == 1 else None)
    return alone


def _slug(label: str) -> str:
    return file_stem(label, 200)
