"""The golden record: the ways of running a case agree, and whatever differs from an earlier record is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import record
import spelling
import torch
from cases import CASES, SMALL, Case
from record import GoldenError, Outcome

from fedfac import methods, switches
from fedfac.comparison import parse_method

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ONE = "fedper / refresh"
WARM = "fedfac / warm-up"
FAMILIES = (("fedfac", "fedfac-static", "fedfac-plus"), ("random", "random-redrawn"))  # one builder, several names
NAMED = {"redraw"}  # options that are another method's name


def command(*arguments: object, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The script, as 'make golden' runs it."""
    script = root / "tests" / "golden" / "golden.py"
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Two cases, to plant differences in."""
    return {name: spelling.run(CASES[name], tmp_path_factory.mktemp("golden")) for name in ("fedrep", WARM)}


def problems(before: record.Outcomes, after: record.Outcomes, *allowed: dict[str, Any]) -> list[str]:
    return golden.compare(before, after, allowed, whole=True)


def test_the_small_form(tmp_path: Path) -> None:
    """Lanes, resumed runs and comparisons agree; and all is as in the baseline, where that has been recorded."""
    path = tmp_path / "small.json"
    done = command("write", path, "--small")
    assert (done.returncode, done.stderr.strip()) == (0, "")
    outcomes = record.read(path)
    assert set(outcomes) == set(SMALL)
    parts = {name.partition("/")[0] for own in outcomes.values() for name in own.tensors}
    assert parts == {"server", "personal", "composed", "model", "predictions", "adapted", "ensemble"}
    keys = {key for own in outcomes.values() for entry in own.records for key in entry}
    assert {"train_loss", "mask.fc", "test|accuracy", "validation|loss", "newcomers|adapt|loss"} <= keys
    assert {"split|fc|iterations", "served.adapt.accuracy"} <= keys
    assert not [key for key in keys if "second" in key or "timing" in key]
    assert [entry["round"] for entry in outcomes["fedfac, static @ digits"].records] == [0, 1, 2, 3]
    before = known_baseline()
    if before:
        assert golden.compare(before, outcomes, golden.changes(), whole=False) == []


def known_baseline() -> dict[str, Outcome]:
    """The small form of the baseline, if 'make golden' has recorded it on this machine."""
    try:
        path = golden.cached_baseline()
    except GoldenError:  # no repository, or one without that commit
        return {}
    return {name: own for name, own in record.read(path).items() if name in SMALL} if path.exists() else {}


def test_one_bit_of_one_tensor_is_found(outcomes: dict[str, Outcome]) -> None:
    name = "personal/1/head.weight"
    tensor = outcomes["fedrep"].tensors[name].clone()
    tensor.view(torch.int32)[0, 0] ^= 1
    assert not torch.equal(tensor, outcomes["fedrep"].tensors[name])
    spoiled = replace(outcomes["fedrep"], tensors={**outcomes["fedrep"].tensors, name: tensor})
    found = problems(outcomes, {**outcomes, "fedrep": spoiled})
    assert len(found) == 1
    case, line = found[0].split("\n    ")
    assert case == "fedrep"
    assert line.startswith(f"{name}: 1 of 24 numbers differ, by ")
    assert 0 < float(line.split()[-3]) < 1e-6


def test_the_sign_of_a_zero_is_found() -> None:
    zeros = [Outcome(records=[], added=frozenset(), tensors={"server/w": torch.tensor([zero])}) for zero in (0.0, -0.0)]
    assert record.differences(*zeros) == ["server/w: equal numbers, other bits (signs of zeros or NaNs)"]
    assert zeros[0].digests() != zeros[1].digests()


def test_other_types_and_missing_tensors_are_found() -> None:
    one = Outcome(records=[], added=frozenset(), tensors={"a": torch.zeros(2), "b": torch.zeros(2)})
    other = Outcome(
        records=[], added=frozenset(), tensors={"a": torch.zeros(2, dtype=torch.float64), "c": torch.ones(1)}
    )
    assert record.differences(one, other) == [
        "a: was torch.float32 (2,), is torch.float64 (2,)",
        "b is missing",
        "c is new",
    ]


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        ({"train_loss": 0.5}, "round 2: train_loss was "),
        ({"mask.fc": "11111111"}, "round 2: mask.fc was '"),
        ({"split|fc|iterations": None}, "round 2: split|fc|iterations is missing"),
        ({"shared_share": float("nan")}, "round 2: shared_share was "),
    ],
    ids=["value", "mask", "gone", "nan"],
)
def test_one_key_of_one_record_is_found(outcomes: dict[str, Outcome], planted: dict[str, Any], line: str) -> None:
    own = outcomes[WARM]
    changed = own.records[1] | planted
    changed = {key: value for key, value in changed.items() if value is not None}
    spoiled = replace(own, records=[own.records[0], changed, *own.records[2:]])
    found = problems(outcomes, {**outcomes, WARM: spoiled})
    assert len(found) == 1
    assert found[0].startswith(f"{WARM}\n    {line}")
    assert found[0].count("\n") == 1


def test_new_keys_are_listed_and_do_not_count(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    more = replace(outcomes["fedrep"], added=frozenset({"test|f1"}))
    assert problems(outcomes, {**outcomes, "fedrep": more}) == []
    assert "added key: test|f1\n" in capsys.readouterr().out


def test_a_case_may_be_new_but_not_missing(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    less = {name: own for name, own in outcomes.items() if name != "fedrep"}
    assert problems(less, outcomes) == []
    assert "new case: fedrep\n" in capsys.readouterr().out
    assert problems(outcomes, less) == ["fedrep\n    is missing: the case table has it no more"]
    assert problems(outcomes, less, {"cases": ["fedr*"], "why": "dropped"}) == []


def test_a_deliberate_change_that_changes_nothing_is_refused(outcomes: dict[str, Outcome]) -> None:
    assert problems(outcomes, outcomes, {"cases": ["fedr*"], "why": "dropped"}) == [
        "changes.toml: nothing differs in fedr*; take the entry away"
    ]


def test_a_deliberate_change_needs_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(golden.changes(), list)  # those of this version can be read
    path = tmp_path / "changes.toml"
    monkeypatch.setattr(golden, "CHANGES", path)
    path.write_text('[[change]]\ncases = ["fedavg"]\nwhy = " "\n')
    with pytest.raises(GoldenError, match="needs 'cases', a list of names or patterns, and 'why'"):
        golden.changes()


def test_a_file_of_other_tensors_or_of_another_machine_is_refused(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    path, other = tmp_path / "one.json", tmp_path / "other.json"
    record.write(path, outcomes)
    assert problems(outcomes, record.read(path)) == []
    record.write(other, {**outcomes, "fedrep": replace(outcomes["fedrep"], tensors={})})
    shutil.copy(path, other)
    with pytest.raises(GoldenError, match="the values of 'fedrep' are not those of its digests"):
        record.read(other)
    other.write_text(path.read_text().replace(torch.__version__, "1.0"))
    with pytest.raises(GoldenError, match="numbers differ between machines"):
        record.read(other)


def test_every_method_and_every_option_has_a_case() -> None:
    spelled: dict[str, set[str]] = {}
    for case in CASES.values():
        if isinstance(case, Case) and case.method != "given":
            name, options = parse_method(case.method)
            spelled.setdefault(name, set()).update(options, case.options)
    assert spelled.keys() == methods.METHODS.keys()
    for name in spelled:
        family = next((names for names in FAMILIES if name in names), (name,))
        covered = set[str]().union(*(spelled[other] for other in family)) | NAMED
        assert set(methods.parameters_of(name)) - covered == set(), name
    assert set(switches.parameters()) - set[str]().union(*spelled.values(), NAMED) == set()


NUDGE = """
_exact = aggregate


def aggregate(*given: Any, **named: Any) -> Any:
    state = _exact(*given, **named)
    return state | {"fc.bias": torch.nextafter(state["fc.bias"], torch.tensor(torch.inf))}
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="the baseline is a commit")
def test_changed_code_is_told_from_the_baseline_commit(tmp_path: Path) -> None:
    """A repository of one case: a commit, then an edit by which some numbers of the server are an ulp greater."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    there = tmp_path / "tests" / "golden"
    shutil.copytree(HERE, there, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "loopback.py", tmp_path / "tests")
    (there / "changes.toml").write_text("")
    with (there / "cases.py").open("a") as file:
        file.write(f"\nCASES = {{{ONE!r}: CASES[{ONE!r}]}}\n")

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *name, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "baseline")
    (there / "BASELINE").write_text(git("rev-parse", "HEAD") + "\n")
    code = tmp_path / "src" / "fedfac" / "aggregate.py"
    code.write_text(code.read_text().replace("import torch\n", "import torch\nfrom typing import Any\n", 1) + NUDGE)
    done = command("check", root=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1].split(",")[:2]) == (1, ["0 cases are equal", " 1 problems"])
    lines = done.stderr.strip().split("\n    ")
    assert lines[0] == ONE
    assert lines[1].startswith("round 1: test|loss was ")
    assert list((tmp_path / ".golden").glob("*.json"))
