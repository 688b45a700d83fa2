"""What somebody meets who tries a table of their own for the first time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfac.cli import main
from fedfac.data import sources

QUICK = ["--rounds", "1", "--epochs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sources._note.cache_clear()  # notes are said once in a process
    rows = ["id,name,clinic,age,ill"]
    rows += [f"{i},P {i},{'north' if i % 2 else 'south'},{20 + i % 50},{'yes' if i % 3 else 'no'}" for i in range(120)]
    path = tmp_path / "elsewhere" / "patients.csv"
    path.parent.mkdir()
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_run_goes_into_runs_wherever_the_table_is(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--data", str(table), "--label", "ill", "--client", "clinic", "--drop", "id, name"]
    assert main(["run", *asked, *QUICK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "runs/patients-fedfac-1"
    assert [p.name for p in table.parent.iterdir()] == ["patients.csv"]
    assert main(["export", "runs/patients-fedfac-1", "--client", "north"]) == 0
    assert Path("runs/patients-fedfac-1/client-north.safetensors").exists()


def test_classes_are_shown_by_name(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--data", str(table), "--label", "ill", "--client", "clinic", "--drop", "id,name"]
    assert main(["data", "show", *asked]) == 0
    head = capsys.readouterr().out.split("north")[0]
    assert (
        "".join(head.split()).replace("client", "") == "yneossamplesclasses"
    )  # "no" and "yes", written downwards side by side
    assert main(["data", "show", *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class_names"] == ["no", "yes"]


def test_a_label_that_was_not_named(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--data", str(table)]) == 1
    assert "--label NAME. Its columns: id, name, clinic, age, ill." in capsys.readouterr().err


def test_a_column_that_cannot_be_an_input_says_which_flag_helps(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--data", str(table), "--label", "ill", "--client", "clinic"]) == 1
    assert "has 120 distinct texts" in (said := capsys.readouterr().err)
    assert "Leave it out (--drop; in Python drop=)" in said


def test_a_table_with_semicolons(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text(table.read_text().replace(",", ";"))
    assert main(["run", "--data", str(table), "--label", "ill"]) == 1
    assert "Its columns seem to be separated by ';': write the file with commas." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["patients.tsv", "PATIENTS.CSV"])
def test_every_table_that_is_read_can_be_named_as_data(
    table: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = table.with_name(name)
    own.write_text(table.read_text().replace(",", "\t") if name.endswith("tsv") else table.read_text())
    asked = ["--data", str(own), "--label", "ill", "--client", "clinic", "--drop", "id,name"]
    assert main(["data", "show", *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class_names"] == ["no", "yes"]


def test_a_forgotten_client_column_is_noted_once(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = ["--data", str(table), "--label", "ill", "--drop", "id,name", "--clients", "6"]
    assert main(["compare", "--methods", "fedavg,local", *asked, *QUICK, "--time-rounds", "0", "--out", "c"]) == 0
    (note,) = caplog.messages
    assert "no client column was named" in note
    assert "is cut into 6 clients at random" in note
    caplog.clear()
    sources._note.cache_clear()
    assert main(["run", *asked, "--partition", "iid", *QUICK]) == 0  # asked for, so nothing to note
    assert caplog.messages == []


def test_classes_written_as_real_numbers_are_noted(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    table.write_text(table.read_text().replace(",yes\n", ",1.0\n").replace(",no\n", ",0.0\n"))
    asked = ["--data", str(table), "--label", "ill", "--client", "clinic", "--drop", "id,name"]
    assert main(["run", *asked, *QUICK]) == 0
    (note,) = caplog.messages
    assert "the label 'ill' holds real numbers: this is regression" in note


def test_the_folder_of_a_comparison_where_a_run_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--methods", "fedavg,local", "--clients", "4", *QUICK, "--time-rounds", "0", "--out", "c"]
    assert main(["compare", *asked]) == 0
    capsys.readouterr()
    assert main(["export", "c", "--client", "0"]) == 1
    assert "c holds no run: there is no config.json in it. Name one of the runs in it: c/fedavg, c/local" in (
        capsys.readouterr().err
    )
