"""The command line, as a person and as a machine use it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedfac
from fedfac.cli import COMMANDS, main

QUICK = ["--clients", "6", "--rounds", "3", "--cohort", "3", "--epochs", "1"]
COMMAND = [sys.executable, "-m", "fedfac"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys; from fedfac.cli import main; main(['--help']); "
        "print([m in sys.modules for m in ('torch', 'rich')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[False, False]\n")
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = call(capsys, command, "--help")
    assert status == 0
    assert "--json" in out or "ACTION" in out  # an action has flags of its own


def test_run_inspect_resume_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "run", *QUICK, "--layers", "3", "--tau", "50%", "--out", "here")
    assert status == 0
    assert "fedfac" in out
    assert "in here" in out
    assert "round 3/3" in err
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", err)
    status, out, _ = call(capsys, "inspect", "here")
    assert status == 0
    assert "fc1: 32 of 64 elements shared" in out
    assert "kept their side" in out
    assert "worst first" in out
    status, out, _ = call(capsys, "inspect", "here", "--json")
    facts = json.loads(out)
    assert facts["layers"]["fc1"]["mask"].count("1") == 32
    assert len(facts["clients"]) == 6
    assert [c["accuracy"] for c in facts["clients"]] == sorted(c["accuracy"] for c in facts["clients"])
    status, out, _ = call(capsys, "resume", "here", "--rounds", "4", "--json", "--quiet")
    assert json.loads(out)["rounds"] == 4
    result = fedfac.load("here")
    assert result.finished
    assert result.accuracy == json.loads(out)["test"]["accuracy"]


def test_the_default_folder_is_new_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        status, out, _ = call(capsys, "run", *QUICK, "--method", "fedavg", "--json", "--quiet")
        assert status == 0
        assert json.loads(out)["path"] == f"runs/digits-fedavg-{number}"


def test_a_config_file_says_the_same_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text(
        '[data]\nclients = 6\n[method]\nname = "fedfac"\nlayers = [2]\ntau = "25%"\n'
        "[train]\nrounds = 9\ncohort = 3\nepochs = 1\n"
    )
    call(capsys, "run", "--config", "a.toml", "--rounds", "3", "--out", "file", "--quiet")
    call(capsys, "run", *QUICK, "--layers", "2", "--tau", "25%", "--out", "flags", "--quiet")
    assert Path("file/metrics.jsonl").read_bytes() == Path("flags/metrics.jsonl").read_bytes()


def test_compare_prints_a_table_and_resume_goes_on_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "compare",
        "--methods",
        "fedavg,local,fedfac",
        *QUICK,
        "--layers",
        "3",
        "--out",
        "c",
        "--json",
        "--quiet",
    ]
    status, out, _ = call(capsys, *arguments)
    assert status == 0
    assert list(json.loads(out)["settings"][0]["methods"]) == ["fedavg", "local", "fedfac"]
    for again in (arguments, ["resume", "c", "--json", "--quiet"]):
        assert json.loads(call(capsys, *again)[1]) == json.loads(out)
    status, _, err = call(capsys, "compare", "--methods", "fedavg", *QUICK, "--out", "c")
    assert status == 1
    assert "c holds another run: tables.method was {'layers': [3]}, now None." in err
    status, out, err = call(capsys, "resume", "c")
    assert status == 0
    assert "worst decile" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], "there is no command 'rum'. Did you mean 'run'"),
        (["run", "--tua", "3"], "there is no flag --tua. Did you mean '--tau'"),
        (["run", "--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
        (["run", "--method", "fedfak"], "there is no method 'fedfak'. Did you mean 'fedfac'"),
        (
            ["run", "--method", "fedper:warmup=2:prior=1"],
            "Here, give the name 'fedper' and its options by themselves: warmup=2, prior=1",
        ),
        (["run", "--method", "atuo"], "there is no method 'atuo'. Did you mean 'auto'?"),
        (["run", "--method", "fedavg", "--tau", "50%"], "method 'fedavg' has no option 'tau'"),
        (
            ["run", "--data", "digit"],
            "there is no data set 'digit', and no such CSV file, parquet file or folder. Did you mean 'digits'?",
        ),
        (["run", "--model", "cn"], "there is no model 'cn'. Did you mean 'cnn'?"),
        (["run", "--partition", "dirichle"], "there is no partition 'dirichle'. Did you mean 'dirichlet'"),
        (["run", "--clients", "2000"], "1797 samples cannot be dealt out to 2000 clients"),
        (["run", "--alpha", "0"], "alpha is 0.0"),
        (["run", "--layers", "9"], "its layers are 1 conv1, 2 conv2, 3 fc1, 4 fc2"),
        (["run", "--test-share", "1"], "a share of 1.0 cannot be held out for test"),
        (["run", "--config", "none.toml"], "there is no config file none.toml"),
        (["compare", "--methods", "fedavg,fedavg"], "each once"),
        (["compare", "--methods", "fedavg,fedper2"], "there is no method 'fedper2'"),
        (["compare", "--methods", "fedavg,local", "--tau", "1"], "none of the methods has an option 'tau'"),
        (["compare", "--methods", "fedavg,fedfac", "--layers", "zz"], "no layer 'zz'"),
        (["resume", "nowhere"], "nowhere holds no run"),
        (["inspect", "nowhere"], "nowhere holds no run"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing_behind(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status, out, err = call(capsys, *arguments)
    assert status in (1, 2)
    assert words in err
    assert "Traceback" not in err
    assert not out
    assert [p.name for p in Path().iterdir()] == []


def test_a_run_from_python_cannot_be_resumed_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from fedfac.conformance import small_federation, small_model

    fedfac.fit(small_model(), small_federation(), rounds=1, epochs=1, out="mine")
    status, _, err = call(capsys, "resume", "mine")
    assert status == 1
    assert "call fedfac.fit(...) again with the same arguments and resume=True" in err
    assert call(capsys, "inspect", "mine")[0] == 0


def test_control_c_saves_and_says_how_to_go_on() -> None:
    long = [*COMMAND, "run", "--clients", "6", "--rounds", "100000", "--cohort", "3", "--epochs", "1", "--out", "long"]
    process = subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: Path("long/metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this round" in err
    assert "go on with: fedfac resume long" in err
    assert "accuracy" in out
    done = len(Path("long/metrics.jsonl").read_text().splitlines())
    assert done >= 1
    assert main(["resume", "long", "--rounds", str(done + 1), "--quiet"]) == 0


@pytest.mark.parametrize("surroundings", [{}, {"FORCE_COLOR": "1"}, {"CI": "true", "TERM": "dumb"}])
def test_a_log_gets_plain_lines_and_no_control_characters(
    surroundings: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    arguments = ["compare", "--methods", "fedavg,fedfac", *QUICK, "--time-rounds", "0", "--out", "c", "--json"]
    status, out, err = call(capsys, *arguments)
    assert status == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out + err)
    assert "round 6/6" in err


def test_on_a_terminal_there_is_a_live_bar() -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", *QUICK, "--out", "bar"],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait(timeout=60) == 0
    process.communicate()
    os.close(leader)
    text = shown.decode()
    assert "3/3" in text
    assert "accuracy" in text
    assert "shared 50%" in text


def _wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
