"""Old code against new: each process runs the code that it is named after, and what is slower or different is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedfac.bench import race

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import old_new  # noqa: E402
from golden import check_out  # noqa: E402
from record import GoldenError  # noqa: E402


def head(folder: Path) -> None:
    """The last commit's code."""
    try:
        check_out("HEAD", folder)
    except GoldenError as error:
        pytest.skip(str(error))


def test_each_process_runs_its_own_code_and_the_race_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head(tmp_path)
    ask = "import fedfac.bench.worker; print(fedfac.bench.worker.__file__)"
    for root in (tmp_path, ROOT):
        command = [sys.executable, "-P", "-c", ask]
        said = subprocess.run(command, env=old_new.environment(root), capture_output=True, text=True, check=True)
        assert Path(said.stdout.strip()).resolve().is_relative_to(root.resolve())
    asked = ["digits-mlp", "--commit", "HEAD", "--contestants", "fedfac", "--turns", "1", "--warm-up", "1"]
    assert old_new.main([*asked, "--allowed", "0", "--quiet", "--json"]) == 1  # nothing is infinitely fast
    (found,) = json.loads(capsys.readouterr().out)["races"]
    assert (found["job"], found["contestant"], found["turns"], found["holds"]) == ("digits-mlp", "fedfac", 1, False)
    assert found["ratio"] == found["seconds"]["new"] / found["seconds"]["old"] > 0


@pytest.mark.parametrize(
    ("seconds", "loss", "holds"),
    [([2.0, 2.06, 9.0], 1.0, True), ([2.0, 2.07, 2.0], 1.0, True), ([2.1] * 3, 1.0, False)],
)
def test_the_ratio_is_that_of_the_medians(seconds: list[float], loss: float, holds: bool) -> None:
    old = race.Runner("old", [], seconds=[2.0, 2.0, 2.0], losses=[1.0])
    new = race.Runner("new", [], seconds=seconds, losses=[loss])
    assert old_new.judged(old, new, 1.03)["holds"] is holds


def test_other_losses_are_no_race() -> None:
    old = race.Runner("old", [], seconds=[2.0, 2.0], losses=[1.0, 0.5])
    new = race.Runner("new", [], seconds=[1.0, 1.0], losses=[1.0, 0.5000001])
    found = old_new.judged(old, new, 1.03)
    assert (found["ratio"], found["same_losses"], found["holds"]) == (0.5, False, False)
    told = {"commit": "0123456789abcdef", "allowed": 1.03, "machine": {"cores": 2}}
    own = {"job": "digits-mlp", "contestant": "fedfac", **found}
    assert old_new.table({**told, "races": [own]}).endswith("| DIFFERENT | MISSED |")


def test_a_commit_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert old_new.main(["--commit", "nowhere", "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("error: git archive failed: ")
