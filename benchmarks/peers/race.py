"""The same job in fedfac, in pfl and in Flower's simulation: who is how much faster, if they compute the same.

    benchmarks/peers/setup                              # once: an environment for each peer
    python benchmarks/peers/race.py --data-dir DIR      # FEMNIST; without DIR, made-up data of its shapes

The CNN on FEMNIST, 39 of 396 writers a round, one epoch, batches of 16, Adam at 1e-3 made anew in every round, the
n_k-weighted mean. All start from the same weights and see the same clients, the same batches and (but for the eager
loop, which draws its own) the same dropout, so their training losses must agree round by round. That is checked first:
a contestant whose loss is not fedfac's, within a stated tolerance in every round, gets no time.

Contestants are processes that take turns (fedfac.bench.race); a ratio is taken within a turn. CPU only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import job as files
import torch
from watched import WATCHED_ROUND, Watched

from fedfac.bench import jobs, race
from fedfac.commands.bench import machine
from fedfac.errors import ConfigError, FedfacError, RunError, did_you_mean
from fedfac.progress import Steps

HERE = Path(__file__).parent
JOB = "femnist-cnn"
OURS = ("fedfac", "fedfac-bf16", "eager")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORKERS = max(2, CORES)
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {  # by name, the environment and the script's arguments
    "pfl": ("pfl", ()),
    "pfl-workers": ("pfl", ("--processes", str(WORKERS))),
    "pfl-workers-fused": ("pfl", ("--processes", str(WORKERS), "--fused")),
    "flower": ("flower", ()),
    "flower-fused": ("flower", ("--fused",)),
}
DEFAULT = (*OURS, "pfl", "pfl-workers", "pfl-workers-fused", "flower")
PACKAGES = {"pfl": ("pfl", "torch"), "flower": ("flwr", "ray", "torch")}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
SAME = 0.01  # how far a training loss may be from fedfac's, as a share of it: the order of sums differs
TOLERANCES = {"fedfac-bf16": 0.02, "eager": 0.02}  # these differ in more: rounding to 8 bits, draws of dropout


def main(given: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(given)
    try:
        found = compare(arguments)
    except FedfacError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if all(own["parity"]["holds"] for own in found["contestants"].values()) else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data-dir", metavar="DIR", help="folder with FEMNIST (default: made-up data of its shapes)")
    made.add_argument(
        "--contestants",
        metavar="A,B",
        help=f"beside fedfac, of {', '.join((*OURS[1:], *PEERS))} (default: all but flower-fused)",
    )
    made.add_argument("--turns", type=int, default=7, help="rounds that count (default: 7)")
    made.add_argument("--warm-up", type=int, default=2, help="rounds before them, at least 2 (default: 2)")
    for name in PACKAGES:
        default = HERE / "envs" / name / "bin" / "python"
        made.add_argument(f"--{name}", metavar="PYTHON", type=Path, default=default, help=f"of {name}'s environment")
    made.add_argument("--json", action="store_true", help="print the figures as JSON for machines")
    made.add_argument("--quiet", action="store_true", help="no progress")
    return made


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Race, then judge."""
    names = choose(arguments.contestants, arguments.turns, arguments.warm_up)
    pythons: dict[str, Path] = {name: getattr(arguments, name) for name in PACKAGES}
    versions = {name: versions_in(name, pythons[name]) for name in sorted({PEERS[n][0] for n in names if n in PEERS})}
    rounds = arguments.warm_up + arguments.turns
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedfac-peers-")))
        progress = stack.enter_context(Steps("peers", len(names) + rounds, quiet=arguments.quiet))
        files.write(jobs.build(JOB, arguments.data_dir, torch.device("cpu")), rounds, folder)
        progress.step("the job is written")
        runners = []
        for name in names:
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            runners.append(contestant(name, folder, arguments.data_dir, pythons))
            runners[-1].log, runners[-1].on_start = log, lambda name: progress.step(f"{name} has started")
        try:
            race.race(runners, arguments.turns, arguments.warm_up, lambda turn: progress.step(f"turn {turn}"))
        except RunError:
            for runner in runners:
                runner.show_log()
            raise
    return {
        "machine": machine("cpu"),
        "peers": versions,
        "job": JOB,
        "data": runners[0].data,
        "turns": arguments.turns,
        "workers": WORKERS,
        "contestants": {runner.name: judged(runner, runners) for runner in runners},
    }


def choose(asked: str | None, turns: int, warm_up: int) -> list[str]:
    """The contestants, fedfac first."""
    names = list(dict.fromkeys(["fedfac", *(asked.split(",") if asked else DEFAULT)]))
    known = (*OURS, *PEERS)
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no contestant {name!r}. {did_you_mean(name, known)}")
    if turns < 1 or warm_up < WATCHED_ROUND:
        raise ConfigError(
            f"turns is {turns} and warm-up {warm_up}; allowed: from 1 and from {WATCHED_ROUND} up "
            f"(the first round is part of the start-up, in round {WATCHED_ROUND} memory is watched)"
        )
    return names


def versions_in(name: str, python: Path) -> dict[str, str]:
    """What a peer's environment has. PyTorch must be ours: else it is PyTorch that would be compared."""
    ask = f"from importlib.metadata import version\nfor name in {PACKAGES[name]}: print(name, version(name))"
    try:
        said = subprocess.run([python, "-c", ask], env=clean(os.environ), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"{python} is no Python with {', '.join(PACKAGES[name])}. Run benchmarks/peers/setup, "
            f"say where there is one (--{name} PYTHON), or leave {name} out (--contestants)"
        ) from error
    found = dict(line.split() for line in said.stdout.splitlines())
    theirs, ours = (torch_version.partition("+")[0] for torch_version in (found["torch"], version("torch")))
    if theirs != ours:
        raise ConfigError(
            f"the environment of {name} has torch {theirs}, fedfac's has {ours}: times would compare those. "
            f"Install torch=={ours} there"
        )
    return found


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """A peer's environment: nothing of ours on its path, of no other cluster, nothing sent home."""
    ours = ("PYTHONPATH", "PFL_WORKER", "RAY_ADDRESS")
    return {name: value for name, value in environment.items() if not name.startswith(ours)} | QUIET


def contestant(name: str, folder: Path, data_dir: str | None, pythons: Mapping[str, Path]) -> Watched:
    """One of ours, or a peer in its own environment."""
    if name in OURS:
        return Watched(name, race.worker(JOB, name, "cpu", data_dir).command)
    home, options = PEERS[name]
    command = [str(pythons[home]), str(HERE / f"{home}_peer.py"), str(folder), *options]
    return Watched(name, command, clean(os.environ))


def judged(runner: race.Runner, runners: Sequence[race.Runner]) -> dict[str, Any]:
    """Parity first; figures only for those that have it."""
    found: dict[str, Any] = {"parity": parity(runner, runners[0])}
    if found["parity"]["holds"]:
        found |= {
            "over": {ours.name: race.ratio(runner, ours) for ours in runners if ours.name in OURS},
            "seconds": statistics.median(runner.seconds),
            "start_up_and_first_round": runner.start_up,
            "peak_mb": runner.peak_mb,
            "loss": runner.losses[-1],
        }
    return found


def parity(runner: race.Runner, ours: race.Runner) -> dict[str, Any]:
    """Whether it computed what fedfac did: the training losses of all rounds, warm-up included."""
    allowed = TOLERANCES.get(runner.name, SAME)
    pairs = list(zip(runner.losses, ours.losses, strict=True))
    shares = [abs(own - wanted) / wanted if math.isfinite(own) else math.inf for own, wanted in pairs]
    worst = shares.index(max(shares))
    return {
        "holds": shares[worst] <= allowed,
        "away": shares[worst],
        "allowed": allowed,
        "round": worst + 1,
        "loss": pairs[worst][0],
        "wanted": pairs[worst][1],
    }


def show(found: Mapping[str, Any]) -> None:
    """A table in Markdown: parity, then times as multiples of ours."""
    contestants = found["contestants"]
    ours = [name for name in OURS if name in contestants and contestants[name]["parity"]["holds"]]
    columns = ["loss off by", *(f"time / {name}" for name in ours), "s a round", "start-up + first, s", "peak MB"]
    print(f"{found['job']}: {found['data']}, {found['turns']} turns; {packages(found)}\n")
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name, own in contestants.items():
        parity = own["parity"]
        cells = [f"{parity['away']:.2%} {'≤' if parity['holds'] else '>'} {parity['allowed']:.0%}"]
        if parity["holds"]:
            cells += ["{median:.2f} ({low:.2f}–{high:.2f})".format(**own["over"][other]) for other in ours]
            cells += [f"{own['seconds']:.3g}", f"{own['start_up_and_first_round']:.1f}", f"{own['peak_mb']:.0f}"]
        else:
            cells += ["no time"] * (len(columns) - 1)
        print(f"| {name} | {' | '.join(cells)} |")
    for name, own in contestants.items():
        parity = own["parity"]
        if not parity["holds"]:
            print(
                f"\n{name} gets no time: its loss in round {parity['round']} is {parity['loss']:.4f}, "
                f"fedfac's {parity['wanted']:.4f}"
            )


def packages(found: Mapping[str, Any]) -> str:
    """Versions, cores and workers, in one line."""
    versions = [f"{name} {number}" for own in found["peers"].values() for name, number in own.items()]
    workers = [f"{found['workers']} pfl workers"] if "pfl" in found["peers"] else []
    return ", ".join(dict.fromkeys([*versions, f"{found['machine']['cores']} cores", *workers]))


if __name__ == "__main__":
    sys.exit(main())
