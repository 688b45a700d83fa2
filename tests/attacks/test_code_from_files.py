"""Attack: a file names a function of somebody else's. Reading it must not run it, unless the user says so.

The function's module is on disk where Python finds it, as an installed package would be; importing it writes one
marker, and calling it another.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfac
from fedfac import exported
from fedfac.cli import main
from fedfac.errors import ConfigError
from fedfac.split import Split
from fedfac.state import state_of, to_bytes

EVIL = """
import pathlib
pathlib.Path("imported").write_text("code ran")
def build(*, shape, classes, hidden=4):
    pathlib.Path("called").write_text("code ran")
    import math
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))
"""
NAME = "evil_networks:build"
QUICK = ["--clients", "6", "--rounds", "1", "--cohort", "2", "--epochs", "1", "--quiet"]
TOML = f"""
[data]
clients = 6
[model]
name = "{NAME}"
[method]
name = "fedavg"
[train]
rounds = 1
cohort = 2
epochs = 1
"""
REFUSED = (NAME, "evil_networks", "--trust-code", "trust_code=True")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that Python imports from."""
    (tmp_path / "evil_networks.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("evil_networks", None)


def call(*arguments: str) -> tuple[int, str]:
    """The command in this process, which imports anew; its status and everything it printed."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(list(arguments))
    return status, said.getvalue()


def ran() -> bool:
    """Whether the attacker's code ran; forgets it."""
    markers = [Path(name) for name in ("imported", "called") if Path(name).exists()]
    for marker in markers:
        marker.unlink()
    sys.modules.pop("evil_networks", None)
    return bool(markers)


def refused(*arguments: str) -> None:
    """Without the user's word it says what would run and how to allow it, and nothing has run."""
    status, said = call(*arguments)
    assert (status, ran()) == (1, False), said
    assert "Traceback" not in said
    for word in REFUSED:
        assert word in said
    status, said = call(*arguments, "--trust-code")
    assert status == 0, said
    assert ran()


def test_a_name_that_the_user_types_is_his_own_word_but_its_run_directory_is_a_file() -> None:
    status, said = call("run", "--model", NAME, "--method", "fedavg", *QUICK, "--out", "r")
    assert (status, ran()) == (0, True), said
    assert call("report", "r")[0] == 0  # builds no model
    assert call("inspect", "r")[0] == 0
    assert not ran()
    refused("export", "r", "--client", "0")
    refused("resume", "r", "--rounds", "2")
    with pytest.raises(ConfigError) as caught:
        fedfac.load("r")
    assert not ran()
    assert all(word in str(caught.value) for word in REFUSED)
    assert fedfac.load("r", trust_code=True).model(0)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert ran()


def test_newcomers_of_a_run() -> None:
    arguments = ["--newcomers", "0.5", "--clients", "6", "--rounds", "1", "--epochs", "1", "--quiet", "--out", "r"]
    assert call("run", "--model", NAME, "--method", "fedavg", *arguments)[0] == 0
    assert ran()
    refused("newcomers", "r", "--quiet")


def test_a_config_that_names_code() -> None:
    Path("c.toml").write_text(TOML)
    assert call("run", "--config", "c.toml", "--quiet", "--model", "mlp", "--out", "other")[0] == 0
    assert call("data", "show", "--config", "c.toml")[0] == 0  # needs no model
    assert not ran()
    refused("run", "--config", "c.toml", "--quiet")
    refused("run", "--config", "c.toml", "--quiet", "--method", "auto", "--rounds", "10")


def test_a_comparison_whose_config_names_code() -> None:
    Path("c.toml").write_text(TOML)
    refused("compare", "--config", "c.toml", "--methods", "fedavg", "--quiet", "--out", "c", "--time-rounds", "0")
    for run in Path("c").glob("*/config.json"):  # back to where nothing is trained
        shutil.rmtree(run.parent)
    refused("resume", "c", "--quiet")
    varied = f'[compare]\nmethods = ["fedavg"]\nvary = {{ model = ["{NAME}"] }}\n'
    Path("v.toml").write_text(TOML.replace(f'name = "{NAME}"\n', "", 1) + varied)
    refused("compare", "--config", "v.toml", "--quiet", "--out", "v", "--time-rounds", "0")


def test_a_search_whose_config_names_code() -> None:
    pytest.importorskip("optuna")
    Path("t.toml").write_text(TOML.replace('"fedavg"', '"fedfac"'))
    refused("tune", "--config", "t.toml", "--quiet", "--parameters", "tau", "--try-tau", "50%", "--out", "s")


def test_an_exported_folder() -> None:
    model = _exported(NAME)
    with pytest.raises(ConfigError) as caught:
        fedfac.load("folder")
    assert not ran()
    assert all(word in str(caught.value) for word in REFUSED)
    assert fedfac.load("folder", model).names == ["anna"]  # the user's own model needs nobody's word
    assert not ran()
    assert fedfac.load("folder", trust_code=True).names == ["anna"]
    assert ran()


@pytest.mark.parametrize(
    "name", ["torch.hub:load", "os:system", "subprocess:call", "evil_networks:pathlib.os", ":", "a:"]
)
def test_an_exported_folder_with_a_function_of_an_installed_package(name: str) -> None:
    _exported(name, hidden=None, repo_or_dir=".", model="build", source="local", command="touch called")
    Path("hubconf.py").write_text(EVIL)
    with pytest.raises(ConfigError, match="trust_code=True"):
        fedfac.load("folder")
    assert not ran()


def _exported(name: str, **options: Any) -> nn.Module:
    """A folder as 'fedfac deploy export' writes it, for a model of that name."""
    model: nn.Module = importlib.import_module("evil_networks").build(shape=(1, 2, 2), classes=3)
    ran()
    state = state_of(model)
    folder = Path("folder")
    folder.mkdir()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    config = {
        "format": exported.FORMAT,
        "client": "anna",
        "model": {"name": name, **{k: v for k, v in options.items() if v is not None}},
        "method": {"name": "fedavg"},
        "shape": [1, 2, 2],
        "classes": 3,
        "split": Split(shapes).to_json(),
    }
    (folder / exported.WEIGHTS).write_bytes(to_bytes(state))
    (folder / exported.CONFIG).write_text(json.dumps(config))
    return model


def test_a_process_of_its_own() -> None:
    _exported("torch.hub:load", repo_or_dir=".", model="build", source="local")
    Path("hubconf.py").write_text(EVIL)
    program = "import fedfac, sys; fedfac.load('folder', trust_code='yes' in sys.argv)"
    for word, status in (("no", 1), ("yes", 0)):
        done = subprocess.run(
            [sys.executable, "-c", program, word], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )
        assert (done.returncode, ran()) == (status, word == "yes")
