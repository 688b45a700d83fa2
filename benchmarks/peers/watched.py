"""A contestant with a family: its processes' memory, its log, and its end.

Memory is the sum of the processes' PSS (proportional set size: a page that n processes share counts 1/n in each), from
Linux's /proc; elsewhere it is what the first process says of itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedfac.bench.race import Runner

PROC = Path("/proc")
WATCHED_ROUND = 2  # not the first, whose time is that of starting up, and not one that counts
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_END = 30.0


@dataclass
class Watched(Runner):
    """A contestant; ``on_start`` is told when its first round is over."""

    on_start: Callable[[str], None] = lambda name: None
    memory_mb: float = 0.0

    def open(self, stack: ExitStack) -> None:
        super().open(stack)
        stack.callback(self._end)

    def turn(self) -> None:
        if len(self.seconds) + 1 == WATCHED_ROUND:
            with most_memory(self._process.pid) as found:
                super().turn()
            self.memory_mb = max(found)
        else:
            super().turn()
        if len(self.seconds) == 1:
            self.on_start(self.name)
        self.peak_mb = self.memory_mb or self.peak_mb

    def show_log(self) -> None:
        """The last of what it said, for people who want to know why it failed."""
        if self.log is not None:
            last = Path(self.log.name).read_text(errors="replace").splitlines()[-20:]
            print(f"--- {self.name}:", *last, sep="\n", file=sys.stderr)

    def _end(self) -> None:
        """Let it end by itself (frameworks have processes to take down); after a while, end them all."""
        family = processes(self._process.pid)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            for process in family:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@contextmanager
def most_memory(process: int) -> Iterator[list[float]]:
    """Inside, the memory of a process and its descendants is looked at again and again; MB."""
    seen = [0.0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            seen.append(sum(pss_mb(one) for one in processes(process)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def processes(first: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # it may be gone by now
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = [first]
    for process in found:
        found += children.get(process, [])
    return found


def pss_mb(process: int) -> float:
    """The proportional set size of one process, 0 if there is no such process (any more)."""
    with suppress(OSError):
        for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
