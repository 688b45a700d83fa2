"""Options that are left to the network or to the run: what they came to is on record, and is what people are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import message
from torch import nn

import fedfac
from fedfac import methods
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError, RunError
from fedfac.methods import METHODS
from fedfac.records import method_used
from fedfac.report import facts
from fedfac.run import read_config

EPOCHS = 2


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("name", "options", "resolved"),
    [
        ("fedfac-plus", {}, {"proximal": 0.01}),
        ("fedfac-plus", {"proximal": 0.5}, {}),
        ("lg-fedavg", {}, {"local_layers": 1}),
        ("fedavg+", {}, {"refresh": EPOCHS}),
        ("fedavg+", {"refresh": 7}, {}),
        ("fedprox+", {}, {"refresh": EPOCHS}),
        ("fedrep", {}, {"head_epochs": EPOCHS}),
        ("fedbabu", {}, {"refresh": EPOCHS}),
        ("ditto", {}, {"personal_epochs": EPOCHS}),
        ("apfl", {}, {"personal_epochs": EPOCHS}),
        ("fedper", {"proximal": 0.01}, {}),
        ("fedper", {"proximal": None, "refresh": None}, {"proximal": 0.01, "refresh": EPOCHS}),
    ],
)
def test_a_run_records_what_was_left_open(
    tmp_path: Path, name: str, options: dict[str, float], resolved: dict[str, float]
) -> None:
    method = methods.build(name, options)
    fedfac.fit(plain_model(), small_federation(), method=method, rounds=1, epochs=EPOCHS, out=tmp_path / "r")
    config = read_config(tmp_path / "r")
    assert config["resolved"] == resolved
    assert method_used(config) == {**config["settings"]["method"], **resolved}
    assert all(config["settings"]["method"][option] is None for option in resolved)  # as asked: resuming compares that


@pytest.mark.parametrize("name", list(METHODS))
def test_no_option_of_a_method_stays_open(tmp_path: Path, name: str) -> None:
    fedfac.fit(small_model(), small_federation(), method=methods.build(name), rounds=1, epochs=1, out=tmp_path / "r")
    assert None not in method_used(read_config(tmp_path / "r")).values()


def test_the_network_decides_and_people_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, mu in ((plain_model(), "0.01"), (small_model(), "0")):  # the second one normalises
        out = tmp_path / mu
        fedfac.fit(model, small_federation(), method=methods.fedfac_plus(), rounds=1, epochs=1, out=out)
        assert main(["inspect", str(out)]) == 0
        assert f" proximal={mu}," in capsys.readouterr().out.replace("\n", " ")
        (run,) = facts.gather([out])["runs"]
        assert dict(run["options"])["proximal"] == mu


def test_a_run_of_an_earlier_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    out = tmp_path / "r"
    settings: dict[str, Any] = {"method": methods.fedfac_plus(), "epochs": 1, "out": out}
    fedfac.fit(plain_model(), small_federation(), rounds=1, **settings)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "format": 1, "version": "0.1.0"}))
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "lock"}
    said = message(RunError, lambda: fedfac.fit(plain_model(), small_federation(), rounds=2, resume=True, **settings))
    assert "was written in run format 1" in said
    assert "Use the version that wrote it (0.1.0), or train it again" in said
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "lock"} == before


def test_options_that_have_another_name_now_are_told() -> None:
    said = message(ConfigError, lambda: methods.build("fedper", {"refresh_epochs": 3}))
    assert said == "method 'fedper' has no option 'refresh_epochs'. It is called 'refresh' since version 0.2"
