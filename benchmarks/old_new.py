"""Is this code as fast as that of an earlier commit? Both take turns, round by round, in one run.

    python benchmarks/old_new.py                          # against the commit that tests/golden/BASELINE names
    python benchmarks/old_new.py digits-mlp --commit HEAD~5 --turns 100

The jobs and contestants are those of ``fedfac bench``; every contestant is a process of its own, which waits while the
other one runs. The ratio is that of the median rounds, new over old; beside it are the quartiles of the ratios within
the turns. A ratio above ``--allowed`` ends the command with status 1, and so do training losses that are not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "golden"))

from golden import baseline_commit, check_out  # noqa: E402
from record import GoldenError  # noqa: E402

from fedfac.bench import race  # noqa: E402
from fedfac.commands.bench import machine  # noqa: E402
from fedfac.errors import FedfacError  # noqa: E402
from fedfac.progress import Steps  # noqa: E402

JOBS = ("femnist-cnn", "digits-mlp")
CONTESTANTS = ("fedfac", "dynamic")


def main(given: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(given)
    try:
        found = compare(arguments)
    except (FedfacError, GoldenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if arguments.json else table(found))
    return 0 if all(own["holds"] for own in found["races"]) else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("jobs", nargs="*", metavar="JOB", help=f"of 'fedfac bench' (default: {', '.join(JOBS)})")
    made.add_argument("--commit", help="the old code (default: the golden record's baseline)")
    made.add_argument("--contestants", default=",".join(CONTESTANTS), metavar="A,B", help="of 'fedfac bench'")
    made.add_argument("--turns", type=int, default=25, help="rounds of each that count (default: 25)")
    made.add_argument("--warm-up", type=int, default=2, help="rounds before them (default: 2)")
    made.add_argument("--allowed", type=float, default=1.03, help="how much slower the new code may be (default: 1.03)")
    made.add_argument("--data-dir", default="", metavar="DIR", help="folder with the real data (default: made-up data)")
    made.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    made.add_argument("--json", action="store_true", help="print the figures as JSON for machines")
    made.add_argument("--quiet", action="store_true", help="no progress")
    return made


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """A race of two for every job and contestant."""
    commit = arguments.commit or baseline_commit()
    pairs = [(job, name) for job in arguments.jobs or JOBS for name in arguments.contestants.split(",")]
    turns = len(pairs) * (arguments.warm_up + arguments.turns - 1)
    with tempfile.TemporaryDirectory() as folder, Steps("old and new", turns, quiet=arguments.quiet) as progress:
        check_out(commit, Path(folder))
        races = []
        for job, name in pairs:
            label = f"{job}, {name}"
            command = [job, name, arguments.device, arguments.data_dir]
            old, new = worker("old", Path(folder), command), worker("new", ROOT, command)
            race.race([old, new], arguments.turns, arguments.warm_up, partial(_step, progress, label))
            races.append({"job": job, "contestant": name, **judged(old, new, arguments.allowed)})
    return {"machine": machine(arguments.device), "commit": commit, "allowed": arguments.allowed, "races": races}


def _step(progress: Steps, label: str, turn: int) -> None:
    progress.step(f"{label}: turn {turn}")


def worker(name: str, root: Path, command: Sequence[str]) -> race.Runner:
    """A contestant by the code in a folder."""
    return race.Runner(name, [sys.executable, "-P", "-m", "fedfac.bench.worker", *command], environment(root))


def environment(root: Path) -> dict[str, str]:
    """In which ``import fedfac`` finds the code of that folder, whatever is installed."""
    return {**os.environ, "PYTHONPATH": str(root / "src")}


def judged(old: race.Runner, new: race.Runner, allowed: float) -> dict[str, Any]:
    """The ratio of the medians, and whether the two have done the same."""
    ratio = statistics.median(new.seconds) / statistics.median(old.seconds)
    same = old.losses == new.losses
    return {
        "ratio": ratio,
        "within_turns": race.ratio(new, old),
        "seconds": {"old": statistics.median(old.seconds), "new": statistics.median(new.seconds)},
        "peak_mb": {"old": old.peak_mb, "new": new.peak_mb},
        "same_losses": same,
        "data": new.data,
        "turns": len(new.seconds),
        "holds": same and ratio <= allowed,
    }


def table(found: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"New code over {found['commit'][:12]}, allowed {found['allowed']}; {found['machine']['cores']} cores",
        "",
        "| job | contestant | new / old | within turns | s a round, old | peak MB, old and new | losses | |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for own in found["races"]:
        spread, memory = own["within_turns"], own["peak_mb"]
        cells = [
            own["job"],
            own["contestant"],
            f"{own['ratio']:.3f}",
            f"{spread['median']:.3f} ({spread['low']:.3f}–{spread['high']:.3f})",
            f"{own['seconds']['old']:.3g}",
            f"{memory['old']:.0f}, {memory['new']:.0f}",
            "equal" if own["same_losses"] else "DIFFERENT",
            "holds" if own["holds"] else "MISSED",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
