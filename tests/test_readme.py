"""The README's program and commands run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fedfac.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    result = names["result"]
    assert result.accuracy > 0.6  # type: ignore[attr-defined]
    assert Path("runs/regions/metrics.jsonl").exists()


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("fedfac ")]
    assert len(commands) >= 4
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
    rounds = [json.loads(line)["round"] for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 13))  # ten, and two more
    assert "fedper" in Path("runs/three/report.html").read_text()


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
