"""The bench: its contestants do the same work, and its ratios are ratios."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from helpers import message

from fedfac.bench import contestants, jobs, race
from fedfac.cli import main
from fedfac.data.federation import Federation
from fedfac.errors import ConfigError, RunError
from fedfac.numerics import CPU
from fedfac.preflight import evaluation_interval


def test_contestants_do_the_same_work() -> None:
    """No dropout in the MLP: the loop written by hand and ours see the same losses round by round."""
    job = jobs.digits()
    ours, loop = (contestants.build(name, job, CPU) for name in ("fedfac", "eager"))
    for number in (1, 2):
        assert ours(number) == pytest.approx(loop(number), abs=1e-5)
    limit = contestants.build("limit", job, CPU)
    assert limit(1) > limit(2) > 0


def test_ratios_are_taken_turn_by_turn() -> None:
    a, b = race.Runner("a", [], seconds=[1.0, 8.0, 3.0]), race.Runner("b", [], seconds=[2.0, 8.0, 2.0])
    assert race.ratio(a, b) == {"median": 1.0, "low": 0.75, "high": 1.25}
    one = race.Runner("a", [], seconds=[3.0])
    assert race.ratio(one, race.Runner("b", [], seconds=[2.0])) == {"median": 1.5, "low": 1.5, "high": 1.5}


def test_the_command_races_real_processes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "bench",
        "digits-mlp",
        "--contestants",
        "fedfac,eager",
        "--turns",
        "1",
        "--warm-up",
        "1",
        "--device",
        "cpu",
    ]
    assert main([*asked, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = found["jobs"]["digits-mlp"]["contestants"]
    assert own["fedfac"]["loss"] == pytest.approx(own["eager"]["loss"], abs=1e-4)
    assert own["fedfac"]["over"]["eager"]["median"] > 0
    for figures in own.values():  # one contains the other, however busy the machine is; a later round may take longer
        assert figures["start_up_and_first_round"] > figures["first_round"] > 0
    assert found["machine"]["torch"]


def test_what_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "digits-mpl"]) == 1
    assert capsys.readouterr().err == "error: there is no job 'digits-mpl'. Did you mean 'digits-mlp'?\n"
    assert main(["bench", "--contestants", "egaer"]) == 1
    assert "there is no contestant 'egaer'. Did you mean 'eager'?" in capsys.readouterr().err
    assert main(["bench", "--turns", "0"]) == 1
    assert "turns is 0 and warm-up 2; both are at least 1" in capsys.readouterr().err
    assert message(ConfigError, lambda: jobs.build("x", None, CPU)).startswith("there is no job 'x'. Known:")


def test_a_contestant_that_dies_is_said() -> None:
    broken = race.Runner("broken", [sys.executable, "-c", "raise SystemExit(3)"])
    text = message(RunError, lambda: race.race([broken], 1, 1, lambda turn: None))
    assert text == "the process of 'broken' ended with status 3: see above"


@pytest.mark.parametrize(
    ("clients", "cohort", "epochs", "wanted"), [(100, 10, 5, 1), (396, 39, 1, 5), (10, 10, 1, 1), (5000, 10, 1, 10)]
)
def test_evaluation_costs_a_fifth_of_training_at_most(clients: int, cohort: int, epochs: int, wanted: int) -> None:
    """Every client has 8 training and 2 test samples; a tenth of the rounds is the least."""
    arrays = [(np.zeros((8, 2)), np.zeros(8), np.zeros((2, 2)), np.zeros(2))] * clients
    interval = evaluation_interval(Federation.from_arrays(arrays), range(clients), cohort, epochs)
    assert interval == wanted
    assert clients * 2 / (interval * 3 * epochs * cohort * 8) <= 0.2 + 1e-9 or interval == 10
