"""fedfac doctor tells what is there and what to do about what is not."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import fedfac
from fedfac.cli import main
from fedfac.commands import doctor

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> tuple[str, ...]:
    return tuple(re.match(r"[A-Za-z0-9_.-]+", requirement)[0] for requirement in requirements)  # type: ignore[index]


def test_the_packages_are_those_of_the_project() -> None:
    assert names(PROJECT["dependencies"]) == doctor.CORE
    for extra, packages in PROJECT["optional-dependencies"].items():
        if extra not in ("dev", "docs"):
            assert doctor.EXTRAS[extra][1] == names(packages), extra


def test_a_whole_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fedfac"] == fedfac.__version__
    assert {"name": "torch", "version": str(torch.__version__)} in facts["packages"]
    assert facts["device"]["used"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert facts["extras"].keys() == doctor.EXTRAS.keys()
    assert main(["doctor"]) == 0
    assert f"fedfac {fedfac.__version__}" in capsys.readouterr().out


def test_what_is_missing_comes_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = doctor.version_of
    gone = {"onnxscript", "flwr", "pyarrow"}
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package in gone else known(package))
    monkeypatch.setenv("FEDFAC_DATA", "/nowhere")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "training needs pyarrow: pip install pyarrow" in out
    assert "pip install 'fedfac[export]' (missing: onnxscript)" in out
    assert "pip install 'fedfac[flower]' (missing: flwr)" in out
    assert "FEDFAC_DATA is /nowhere, which is no folder" in out
