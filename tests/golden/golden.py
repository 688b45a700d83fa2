"""The golden record: what every method comes to, bit by bit, before and after a change of the code.

    make golden                                   # this code against the baseline, about three minutes
    python tests/golden/golden.py write FILE      # train all cases, and write down what they come to
    python tests/golden/golden.py check FILE      # train all cases, and say what differs from FILE

A case is also run in ways that must make no difference: with two lanes, stopped after a round and resumed, as one of a
comparison or by itself.

Without FILE, ``check`` compares with the commit that ``BASELINE`` names. That commit's code is run by its own case
table on this machine, because kernels differ between machines; the result is kept in ``.golden``. A deliberate change
is a commit of its own and has an entry with its reason in ``changes.toml``, until the baseline is moved past it. An
entry for what has not changed is an error too.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests"), str(ROOT / "src")]  # the code beside this file, whatever is installed

import record  # noqa: E402
import torch  # noqa: E402
from record import GoldenError, Outcome  # noqa: E402

CACHE = ROOT / ".golden"
CHANGES = HERE / "changes.toml"
Pick = Callable[[str], bool]


def main(given: Sequence[str] | None = None) -> int:
    """Write or check; 1 if anything differs."""
    arguments = parser().parse_args(given)
    torch.set_num_threads(1)
    try:
        pick = _pick(arguments)
        if arguments.command == "write":
            outcomes, problems = train(pick)
            record.write(arguments.file, outcomes)
            print(f"{len(outcomes)} cases in {arguments.file}")
        else:
            before = record.read(arguments.file or baseline())
            outcomes, problems = train(pick)
            before = {name: own for name, own in before.items() if pick(name)}
            problems += compare(before, outcomes, changes(), whole=not (arguments.small or arguments.only))
    except GoldenError as error:
        problems = [f"error: {error}"]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="what every method comes to, bit by bit", allow_abbrev=False)
    made.add_argument("command", choices=["write", "check"])
    made.add_argument("file", type=Path, nargs="?", help="NAME.json; NAME.safetensors is beside it")
    made.add_argument("--only", metavar="CASE", action="append", help="a case, or a pattern such as 'fedper*'")
    made.add_argument("--small", action="store_true", help="only the cases that 'make test' trains")
    return made


def train(pick: Pick) -> tuple[dict[str, Outcome], list[str]]:
    """What the picked cases come to, and where a way makes a difference that must make none."""
    import spelling
    from cases import CASES

    import fedfac

    if not Path(str(fedfac.__file__)).is_relative_to(ROOT):
        raise GoldenError(f"fedfac was imported from {fedfac.__file__}, not from {ROOT}")
    outcomes: dict[str, Outcome] = {}
    problems = []
    for name, case in CASES.items():
        if not pick(name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = spelling.run(case, Path(folder))
        for way in spelling.ways(case):
            with tempfile.TemporaryDirectory() as folder:
                lines = record.differences(outcomes[name], spelling.run(case, Path(folder), way))
            if lines:
                problems.append(record.shown(f"{name}, {way}", lines))
    if not outcomes:
        raise GoldenError("no case has such a name")
    return outcomes, problems


def compare(
    before: record.Outcomes, after: record.Outcomes, allowed: Sequence[dict[str, Any]], *, whole: bool
) -> list[str]:
    """What differs beside the deliberate changes; of ``whole`` records all these must differ. A summary is printed."""
    found = {name: _difference(before.get(name), after.get(name)) for name in [*before, *after]}
    new = sorted(after.keys() - before.keys())
    excused = {name for name in found for change in allowed if _is_of(name, change) and found[name]}
    problems = [
        record.shown(name, lines) for name, lines in found.items() if lines and name not in excused and name not in new
    ]
    problems += [
        f"changes.toml: nothing differs in {' or '.join(change['cases'])}; take the entry away"
        for change in allowed
        if whole and not any(_is_of(name, change) for name in excused)
    ]
    added = sorted({key for name in after.keys() & before.keys() for key in after[name].added - before[name].added})
    same = sum(not lines for lines in found.values())
    print(f"{same} cases are equal, {len(problems)} problems, {len(excused)} deliberate changes, {len(new)} new cases")
    print("".join(f"new case: {name}\n" for name in new) + "".join(f"added key: {key}\n" for key in added), end="")
    return problems


def changes() -> list[dict[str, Any]]:
    """The deliberate changes since the baseline: patterns of cases, and a reason."""
    found: list[dict[str, Any]] = tomllib.loads(CHANGES.read_text()).get("change", [])
    for change in found:
        if not change.get("cases") or not str(change.get("why", "")).strip():
            raise GoldenError(f"changes.toml: {change} needs 'cases', a list of names or patterns, and 'why'")
    return found


def baseline() -> Path:
    """The record of the baseline commit on this machine; it is made if it is not there."""
    path = cached_baseline()
    if not path.exists():
        commit = baseline_commit()
        print(f"recording the baseline {commit[:12]}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            check_out(commit, root)
            if not _is_in(commit):
                shutil.copytree(HERE, root / "tests" / "golden", dirs_exist_ok=True)
            command = [sys.executable, str(root / "tests" / "golden" / "golden.py"), "write", str(path)]
            if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode:
                path.unlink(missing_ok=True)
                raise GoldenError(f"the baseline {commit[:12]} could not be recorded: see above")
    return path


def check_out(commit: str, folder: Path) -> None:
    """The code and the tests of a commit, in a folder of their own."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "src", "tests"))) as tar:
        tar.extractall(folder, filter="data")


def cached_baseline() -> Path:
    """Where the baseline's record is, or will be: by commit, machine, and the case table if the commit has none."""
    commit = baseline_commit()
    told = json.dumps([record.FORMAT, record.machine()])
    if not _is_in(commit):
        told += "".join(path.read_text() for path in sorted(HERE.glob("*.py")))
    return CACHE / f"{commit[:12]}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.json"


def baseline_commit() -> str:
    """The commit that the code is compared with."""
    return (HERE / "BASELINE").read_text().strip()


def _is_in(commit: str) -> bool:
    """Whether a commit has a golden record of its own."""
    return bool(_git("ls-tree", "--name-only", commit, "--", "tests/golden/golden.py"))


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise GoldenError(f"git {arguments[0]} failed: {done.stderr.decode().strip()}")
    return done.stdout


def _pick(arguments: argparse.Namespace) -> Pick:
    if arguments.command == "write" and arguments.file is None:
        raise GoldenError("write needs the name of a file")
    if arguments.small:
        from cases import SMALL

        return SMALL.__contains__
    patterns: Iterable[str] = arguments.only or ["*"]
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _difference(before: Outcome | None, after: Outcome | None) -> list[str]:
    if before is None or after is None:
        return ["is new" if before is None else "is missing: the case table has it no more"]
    return record.differences(before, after)


def _is_of(name: str, change: dict[str, Any]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in change["cases"])


if __name__ == "__main__":
    sys.exit(main())
