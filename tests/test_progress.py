"""Progress: how many rounds of the whole are done, whoever has done them."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fedfac import progress
from fedfac.progress import RoundProgress
from fedfac.records import Record


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)  # every one
    return io.StringIO()


def record(round: int, accuracy: float) -> Record:
    return {"round": round, "train_loss": 1 / (round + 1), "shared_share": 0.5, "test": {"accuracy": accuracy}}


def shown(lines: io.StringIO) -> list[tuple[int, str]]:
    found = re.findall(r"round (\d+)/12 .* accuracy ([\d.]+)", lines.getvalue())
    return [(int(done), accuracy) for done, accuracy in found]


def test_rounds_of_one_run_are_counted(lines: io.StringIO) -> None:
    with RoundProgress("run", 12, console=Console(file=lines)) as told:
        for number in range(4):  # round 0 is a decision
            told(record(number, number / 4))
    assert shown(lines) == [(0, "0.000"), (1, "0.250"), (2, "0.500"), (3, "0.750")]


def test_those_that_take_turns_are_counted_one_by_one_with_the_figures_of_the_first(lines: io.StringIO) -> None:
    """While the others predict, the one that trains waits: a comparison must not seem to be done, or dead."""
    with RoundProgress("compare", 12, console=Console(file=lines)) as told:
        told.begin("one and 2 that train alike", done=6, offset=0, each=3)
        for number in (3, 4):
            for accuracy in (0.5, 0.6, 0.7):
                told(record(number, accuracy))
    assert shown(lines) == [(7, "0.500"), (8, "0.500"), (9, "0.500"), (10, "0.500"), (11, "0.500"), (12, "0.500")]
    assert lines.getvalue().count("one and 2 that train alike") == 6
