"""Contestants take turns, round by round; what is reported are ratios within one run.

Absolute times mean little on a machine that others use as well. Every contestant is a process (:mod:`worker`), which
waits while another one runs. The first rounds are warm-up. A ratio is taken within one turn, of rounds that ran right
after each other; reported are its median and quartiles over the turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import IO, Any

from fedfac.errors import RunError


@dataclass
class Runner:
    """A contestant's process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    log: IO[str] | None = None  # for what it says besides its answers; ours by default
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    start_up: float = 0.0  # from the process's start to the end of its first round
    first: float = 0.0
    data: str = ""

    def open(self, stack: ExitStack) -> None:
        """Start it; it is ended with the stack."""
        self._began = perf_counter()
        self._process = stack.enter_context(
            subprocess.Popen(
                list(self.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                env=None if self.environment is None else dict(self.environment),
            )
        )
        stack.callback(self._process.kill)
        self.data = str(self._read().get("data", ""))

    def turn(self) -> None:
        """One round."""
        stdin = self._process.stdin
        if stdin is None:
            raise RunError(f"{self.name} takes no input")
        stdin.write("go\n")
        stdin.flush()
        found = self._read()
        if not self.seconds:
            self.start_up = perf_counter() - self._began
        self.seconds.append(found["seconds"])
        self.losses.append(found["loss"])
        self.peak_mb = found["peak_mb"]

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RunError(f"the process of {self.name!r} ended with status {self._process.wait()}: see above")
        return dict(json.loads(line))


def worker(job: str, contestant: str, device: str, data_dir: str | None) -> Runner:
    """One of fedfac's own contestants."""
    command = [sys.executable, "-m", "fedfac.bench.worker", job, contestant, device, data_dir or ""]
    return Runner(contestant, command)


def race(runners: Sequence[Runner], turns: int, warm_up: int, on_turn: Callable[[int], None]) -> None:
    """Let every runner do ``warm_up + turns`` rounds, in turns."""
    with ExitStack() as stack:
        for runner in runners:  # started one after the other, first round included: start-up is timed undisturbed
            runner.open(stack)
            runner.turn()
        for turn in range(1, warm_up + turns):
            for runner in runners:
                runner.turn()
            on_turn(turn)
    for runner in runners:
        runner.first = runner.seconds[0]
        runner.seconds = runner.seconds[warm_up:]


def ratio(a: Runner, b: Runner) -> dict[str, float]:
    """Median and quartiles of a's time over b's, turn by turn.

    >>> ratio(Runner("a", [], seconds=[1.0, 2.0, 4.0]), Runner("b", [], seconds=[2.0, 2.0, 2.0]))["median"]
    1.0
    """
    values = [x / y for x, y in zip(a.seconds, b.seconds, strict=True)]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}
