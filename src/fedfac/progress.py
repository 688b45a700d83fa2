"""Progress for people: a live bar on a terminal, plain lines elsewhere (no control characters in a log)."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


def is_live(console: Console) -> bool:
    """Whether a bar can be drawn over and over: a real terminal that obeys, whatever FORCE_COLOR says in a CI job."""
    return console.file.isatty() and not console.is_dumb_terminal


def plain(console: Console, text: str) -> None:
    """A line without any control character. No emoji: an interrupt could hit the import of their table."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


class RoundProgress:
    """Shows rounds, loss, accuracy, share of elements shared, and the time left, on standard error."""

    def __init__(self, title: str, rounds: int, *, done: int = 0, quiet: bool = False, console: Console | None = None):
        self.title, self.rounds, self.quiet = title, rounds, quiet
        self.console = console or Console(file=sys.stderr)
        self._accuracy = "-"
        self._offset, self._each = 0, 1
        self._round, self._seen, self._figures = -1, 0, ""  # the last one shown, and how many have done it
        self._last_line = monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if not quiet and is_live(self.console):
            self._bar = Progress(
                TextColumn("{task.description:<16}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task(title, total=rounds, completed=done, figures="")

    def begin(self, title: str, done: int, offset: int, rounds: int | None = None, each: int = 1) -> None:
        """From now on rounds of ``title`` are shown; its round 1 is round ``offset + each`` of the whole.

        ``rounds`` says how many the whole has, where that was not known before; ``each`` how many take turns, round by
        round: figures are those of the first of them.
        """
        self.title, self._offset, self._accuracy, self._each, self._round = title, offset, "-", each, -1
        self.rounds = self.rounds if rounds is None else rounds
        if self._bar is not None:
            self._bar.update(self._task, description=title, completed=done, total=self.rounds, figures="")

    def __enter__(self) -> RoundProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        """Show one round's record."""
        if self.quiet:
            return
        self._seen = self._seen + 1 if record["round"] == self._round else 1
        self._round = record["round"]
        if self._seen == 1:
            self._figures = self._of(record)
        done = self._offset + max(self._each * (self._round - 1) + self._seen, 0)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=self._figures)
        elif done == self.rounds or monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = monotonic()
            self.say(f"{self.title}: round {done}/{self.rounds}  {self._figures}")

    def _of(self, record: dict[str, Any]) -> str:
        shown = next((record[part] for part in ("test", "validation") if "accuracy" in record.get(part, {})), None)
        if shown is not None:
            self._accuracy = f"{shown['accuracy']:.3f}"
        loss = record.get("train_loss")
        figures = f"loss {'-' if loss is None else f'{loss:.3f}'}  accuracy {self._accuracy}"
        figures += f"  shared {record['shared_share']:.0%}"
        if record.get("left_out"):
            without = ", ".join(f"{name} ({why})" for name, why in record["left_out"].items())
            self.say(f"{self.title}: round {record['round']} without {without}")
        if record.get("skipped"):
            self.say(f"{self.title}: round {record['round']} was skipped: {record['skipped']}")
        return figures

    def say(self, text: str) -> None:
        """A line beside the bar."""
        if not self.quiet:
            plain(self.console, text)


class Steps:
    """Progress over a number of steps that have names."""

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self._console = Console(file=sys.stderr)
        self._quiet, self._total, self._done = quiet, total, 0
        self._bar: Progress | None = None
        if not quiet and is_live(self._console):
            self._bar = Progress(console=self._console)
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, name: str) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=name)
        elif not self._quiet:
            plain(self._console, f"{self._done}/{self._total} {name}")
