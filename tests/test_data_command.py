"""``fedfac data show``: the clients that ``fedfac run`` would train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedfac import cli, experiment
from fedfac.commands import data
from fedfac.config import Config
from fedfac.data import sources
from fedfac.data.federation import Federation


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "data", "look at the data")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = call(capsys, "data", "show", "--json", *arguments)
    assert (status, err) == (0, "")
    facts: dict[str, Any] = json.loads(out)
    return facts


def test_it_shows_a_map_and_a_line_of_facts(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "data", "show", "--clients", "50", "--alpha", "0.1")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0].split() == ["client", *"0123456789", "samples", "classes"]
    assert len(lines) == 1 + 40 + 3
    assert lines[-2] == "40 of 50 clients shown, evenly chosen"
    assert lines[-1].startswith("50 clients, 1,750 samples, 10 classes; a client has 35 to 35 samples (median 35) of ")
    assert lines[-1].endswith(" classes on average")


def test_the_facts_are_those_of_the_federation_that_run_trains(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, "--clients", "7", "--alpha", "0.5", "--seed", "3", "--validation-share", "0.2")
    tables = {"data": {"clients": 7, "alpha": 0.5, "validation_share": 0.2}, "train": {"seed": 3}}
    _, federation, _ = experiment.build(Config.from_dict(tables))
    assert facts["fingerprint"] == federation.fingerprint
    for number, row in enumerate(facts["counts"]):
        client = federation.client(number)
        parts = (client.train, client.test, client.validation)
        assert all(len(part) for part in parts)
        labels = torch.cat([client.pool.batch(part)[1] for part in parts])
        assert row == [int((labels == k).sum()) for k in range(10)]
        assert facts["sizes"][number] == len(labels)
    counts = np.array(facts["counts"])
    assert facts["clients"] == len(counts) == len(facts["names"]) == 7
    assert facts["samples"] == counts.sum()
    assert facts["classes_per_client"] == (counts > 0).sum() / 7
    assert (facts["smallest"], facts["median"], facts["largest"]) == (256, 256, 256)


def test_a_config_file_may_describe_a_comparison_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("it.toml").write_text('[data]\nclients = 5\npartition = "iid"\n[compare]\nmethods = ["fedavg"]\n')
    assert facts_of(capsys, "--config", "it.toml")["clients"] == 5
    assert facts_of(capsys, "--config", "it.toml", "--clients", "6")["clients"] == 6


def test_it_draws(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "data", "show", "--clients", "5", "--png", "chart.png")
    assert status == 0
    assert out.endswith("drawn in chart.png\n")
    with Image.open("chart.png") as image:
        assert image.format == "PNG"
    assert facts_of(capsys, "--clients", "5", "--png", "other.png")["png"] == "other.png"
    assert Path("other.png").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["data"], 2, "action"),
        (["data", "shwo"], 2, "invalid choice: 'shwo'"),
        (["data", "show", "--clinets", "3"], 2, "there is no flag --clinets. Did you mean '--clients'"),
        (["data", "show", "--clients", "3", "--png", "chart.pdf"], 1, "error: the picture is to go to chart.pdf"),
        (["data", "show", "--clients", "3", "--png", "no/chart.png"], 1, "error: the picture cannot be written"),
        (["data", "show", "--clients", "2000"], 1, "error: 1797 samples cannot be dealt out to 2000 clients"),
        (["data", "show", "--partition", "idd"], 1, "there is no partition 'idd'. Did you mean 'iid'?"),
    ],
)
def test_errors_say_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, text: str
) -> None:
    done, out, err = call(capsys, *arguments)
    assert (done, out) == (status, "")
    assert text in err


def use(monkeypatch: pytest.MonkeyPatch, federation: Federation) -> None:
    monkeypatch.setattr(sources, "load", lambda config, *, seed: federation)


def test_data_without_classes_is_shown_by_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = {name: (torch.zeros(n, 2), torch.zeros(n)) for name, n in (("a", 10), ("b", 5), ("c", 1))}
    use(monkeypatch, Federation.from_arrays(clients))
    status, out, _ = call(capsys, "data", "show", "--png", "chart.png")
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == "     a  10  " + "█" * 60
    assert lines[1] == "     b   5  " + "█" * 30
    assert lines[-2] == "3 clients, 16 samples, no classes; a client has 1 to 10 samples (median 5)"
    assert Path("chart.png").exists()
    facts = facts_of(capsys)
    assert facts["classes"] is facts["counts"] is facts["classes_per_client"] is None
    assert facts["sizes"] == [10, 5, 1]


def test_a_target_of_several_labels_counts_them_all() -> None:
    targets = torch.tensor([[0, 1, 1], [2, 2, 2]])
    facts = data.gather(Federation.from_arrays([(torch.zeros(2, 3), targets)], classes=4, test_share=0.5))
    assert (facts["sizes"], facts["counts"]) == ([2], [[1, 2, 3, 0]])


def test_large_clients_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CHUNK", 7)
    labels = torch.arange(50) % 3
    facts = data.gather(Federation.from_arrays([(torch.zeros(50, 1), labels)], classes=3))
    assert facts["counts"] == [[17, 17, 16]]


def test_lazy_clients_are_made_one_at_a_time() -> None:
    made = []

    def load(number: int) -> tuple[Any, Any, Any, Any]:
        made.append(number)
        labels = torch.full((number + 1,), number)
        return torch.zeros(number + 1, 1), labels, torch.zeros(1, 1), labels[:1]

    facts = data.gather(Federation.lazy(3, load, classes=3))
    assert made == [0, 1, 2]
    assert facts["counts"] == [[2, 0, 0], [0, 3, 0], [0, 0, 4]]
