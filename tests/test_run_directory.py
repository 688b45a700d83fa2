"""The run directory: whole rounds, damage, locks, other configs."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rundirs import client_row, new_directory

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ModelError, RunError
from fedfac.run import RunDirectory
from fedfac.split import Split
from fedfac.state import references, same


def run(out: Path, **settings: Any) -> fedfac.Result:
    arguments: dict[str, Any] = {
        "model": small_model(),
        "federation": small_federation(),
        "method": methods.fedfac(layers=[1]),
        "rounds": 3,
        "cohort": 3,
        "epochs": 1,
        "batch_size": 8,
    }
    arguments |= settings
    return fedfac.fit(arguments.pop("model"), arguments.pop("federation"), out=out, **arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(out, rounds=2)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix not in (".sqlite-shm", ".sqlite-wal")}


def test_a_run_directory_holds_config_metrics_splits_and_states(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    saved = RunDirectory.read(finished)
    assert saved.records() == lines
    assert saved.masks().keys() == {1, 2}
    assert len(saved.scores()[2]["0"]) == 6
    assert len(saved.clients()) == 5
    config = json.loads((finished / "config.json").read_text())
    assert config["settings"]["method"]["layers"] == [1]
    partition = json.loads((finished / "partition.json").read_text())
    assert partition["fingerprint"] == config["settings"]["data"]
    samples = [i for client in partition["clients"].values() for part in client.values() for i in part]
    assert sorted(samples) == list(range(len(samples)))


def test_loading_gives_the_models_back(finished: Path) -> None:
    loaded = fedfac.load(finished, small_model())
    again = fedfac.fit(
        small_model(),
        small_federation(),
        method=methods.fedfac(layers=[1]),
        rounds=2,
        cohort=3,
        epochs=1,
        batch_size=8,
    )
    assert loaded.records == again.records
    assert loaded.splits == again.splits
    assert loaded.accuracy == again.accuracy
    for client in range(5):
        assert same(references(loaded.model(client)), references(again.model(client)))
    assert not loaded.model(0).training
    assert loaded.metrics.column("round").to_pylist() == [1, 2]
    with pytest.raises(fedfac.FedfacError, match="there is no client 9; the federation has 5"):
        loaded.model(9)
    with pytest.raises(fedfac.FedfacError, match="there is no client 'x'"):
        loaded.model("x")


def test_a_longer_run_is_the_same_as_one_that_was_never_stopped(copy: Path, tmp_path: Path) -> None:
    longer = run(copy, rounds=4, resume=True)
    straight = run(tmp_path / "straight", rounds=4)
    assert (copy / "metrics.jsonl").read_bytes() == (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert same(longer.server, straight.server)
    assert json.loads((copy / "config.json").read_text())["rounds"] == 4


def test_resuming_a_finished_run_changes_nothing(copy: Path) -> None:
    before = contents(copy)
    result = run(copy, rounds=2, resume=True)
    assert result.finished
    assert contents(copy) == before


def test_stopping_early_can_be_resumed(tmp_path: Path) -> None:
    stopped = run(tmp_path / "a", rounds=4, should_stop=lambda: True)
    assert not stopped.finished
    assert [r["round"] for r in stopped.records] == [1]
    run(tmp_path / "a", rounds=4, resume=True)
    run(tmp_path / "b", rounds=4)
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()


def test_a_folder_that_holds_a_run_is_not_overwritten(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(RunError, match=r"already holds a run: go on with 'fedfac resume"):
        run(copy)
    assert contents(copy) == before


def test_a_folder_with_other_things_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"is not empty \(thesis.tex\)"):
        run(tmp_path / "run")
    with pytest.raises(RunError, match="is a file"):
        run(tmp_path / "run" / "thesis.tex")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_resuming_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run: there is no config.json"):
        run(tmp_path, resume=True)
    with pytest.raises(fedfac.FedfacError, match="needs out="):
        fedfac.fit(small_model(), small_federation(), resume=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": methods.fedfac(layers=[2])}, "another run: method.layers was [1], now [2]. Resume"),
        ({"seed": 7}, "seed was 0, now 7"),
        ({"batch_size": 4}, "another run: local.batch_size was 8, now 4. Resume"),
        ({"cohort": 2}, "cohort was 3, now 2"),
        ({"federation": small_federation(seed=1)}, "data was"),
        ({"federation": small_federation(clients=6)}, "clients was 5, now 6"),
    ],
)
def test_another_config_is_refused_and_named(copy: Path, settings: dict[str, Any], words: str) -> None:
    before = contents(copy)
    with pytest.raises(RunError) as caught:
        run(copy, resume=True, **settings)
    assert "holds another run" in str(caught.value)
    assert words in str(caught.value)
    assert contents(copy) == before


def test_another_model_is_refused(copy: Path) -> None:
    before = contents(copy)
    other = torch.nn.Sequential()
    other.add_module("flat", torch.nn.Flatten())
    other.add_module("only", torch.nn.Linear(72, 3))
    with pytest.raises(ModelError, match="no parameters in common with the checkpoint"):
        run(copy, resume=True, model=other, method=methods.fedavg())
    wider = small_model()
    wider[4] = torch.nn.Linear(96, 9)  # type: ignore[operator]
    wider[7] = torch.nn.Linear(9, 3)  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"4.bias is \(9,\) in the model and \(8,\) in the checkpoint"):
        run(copy, resume=True, model=wider)
    assert contents(copy) == before


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_state_is_refused(copy: Path, share: float) -> None:
    file = copy / "state.sqlite"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    before = contents(copy)
    with pytest.raises(RunError, match=r"state.sqlite is damaged"):
        run(copy, rounds=4, resume=True)
    assert contents(copy) == before


def test_flipped_bits_in_any_tensor_are_noticed(copy: Path) -> None:
    for table, key in (("server", "0"), ("memory", "0"), ("personal", "client")):
        damaged = copy.with_name(table)
        shutil.copytree(copy, damaged)
        with sqlite3.connect(damaged / "state.sqlite") as db:
            data = bytearray(db.execute(f"SELECT data FROM {table}").fetchone()[0])
            data[-3] ^= 1
            db.execute(f"UPDATE {table} SET data = ? WHERE {key} = (SELECT min({key}) FROM {table})", (bytes(data),))
        with pytest.raises(RunError, match="does not match its checksum"):
            run(damaged, rounds=4, resume=True)


def test_what_the_rule_remembers_is_part_of_the_round(finished: Path) -> None:
    saved = RunDirectory.read(finished).checkpoint()
    assert saved is not None
    assert saved.memory.keys() == {"0/communality"}
    assert saved.memory["0/communality"].tolist() == pytest.approx(
        RunDirectory.read(finished).scores()[2]["0"], abs=1e-6
    )


def test_a_run_of_a_version_without_memory_goes_on(copy: Path) -> None:
    with sqlite3.connect(copy / "state.sqlite") as db:
        db.execute("DROP TABLE memory")
    assert run(copy, rounds=3, resume=True).finished
    saved = RunDirectory.read(copy).checkpoint()
    assert saved is not None
    assert saved.memory.keys() == {"0/communality"}


def test_a_rule_without_memory_leaves_none(tmp_path: Path) -> None:
    run(tmp_path / "run", method=methods.fedavg(), rounds=1)
    saved = RunDirectory.read(tmp_path / "run").checkpoint()
    assert saved is not None
    assert saved.memory == {}


def test_a_changed_record_is_noticed(copy: Path) -> None:
    with sqlite3.connect(copy / "state.sqlite") as db:
        db.execute("UPDATE rounds SET masks = replace(masks, '1', '0') WHERE round = 2")
    with pytest.raises(RunError, match="the record of round 2 does not match its checksum"):
        run(copy, rounds=4, resume=True)


def test_a_damaged_config_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text('{"format": 1, "sett')
    with pytest.raises(RunError, match=r"config.json cannot be read"):
        run(copy, resume=True)


def test_a_run_of_another_format_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"format": 99, "version": "9.9"}))
    with pytest.raises(RunError, match=r"run format 99; this version of fedfac reads format \d+\b.*\(9.9\)"):
        run(copy, resume=True)


def test_metrics_that_lost_their_tail_are_written_anew(copy: Path) -> None:
    whole = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(whole[:-7])
    run(copy, rounds=2, resume=True)
    assert (copy / "metrics.jsonl").read_bytes() == whole


def test_metrics_that_were_changed_are_not_overwritten(copy: Path) -> None:
    (copy / "metrics.jsonl").write_text("my notes\n")
    with pytest.raises(RunError, match=r"does not say what state.sqlite says"):
        run(copy, rounds=4, resume=True)
    assert (copy / "metrics.jsonl").read_text() == "my notes\n"


HOLD = """
import sys, time
from pathlib import Path
from fedfac.run import RunDirectory
run = RunDirectory.resume(Path(sys.argv[1]), rounds=2)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(copy: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(copy)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="another process is writing to"):
            run(copy, rounds=4, resume=True)
        assert RunDirectory.read(copy).records()  # looking is allowed
    finally:
        holder.kill()
        holder.communicate()
    assert run(copy, rounds=3, resume=True).finished


def test_a_start_that_was_killed_before_it_had_a_config_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / "state.sqlite").write_bytes(b"half")
    assert run(tmp_path / "run", rounds=1).finished


# --- rounds that are put off -----------------------------------------------------------------------------------------


def commit(directory: RunDirectory, number: int, **options: Any) -> None:
    directory.put(0, {"own": torch.full((2,), float(number))})
    if number == 2:
        directory.put(1, {"own": torch.full((2,), 20.0)})
    directory.commit(
        {"round": number},
        {"w": torch.full((3,), float(number))},
        Split({"w": (3,)}),
        scores={},
        clients=[client_row("a")] if number == 2 else None,
        timing={"train": number / 4},
        averaged={"w": torch.full((3,), number / 2)},
        velocity={"w": torch.full((3,), number / 8)},
        **options,
    )


def test_rounds_that_are_put_off_come_with_the_next_one_or_not_at_all(tmp_path: Path) -> None:
    directory = new_directory(tmp_path / "run")
    commit(directory, 1)
    commit(directory, 2, put_off=True)
    commit(directory, 3, put_off=True)
    on_disk = RunDirectory.read(tmp_path / "run")
    directory._wait()
    assert [record["round"] for record in on_disk.records()] == [1]  # what a kill would leave
    for client, value in ((0, 3.0), (1, 20.0)):  # but the run itself sees them
        own = directory.get(client)
        assert own is not None
        assert own["own"].tolist() == [value] * 2
    commit(directory, 4)
    directory.close()
    found = RunDirectory.read(tmp_path / "run")
    assert [record["round"] for record in found.records()] == [1, 2, 3, 4]
    assert found.clients() == [client_row("a")]
    last = found.checkpoint()
    assert last is not None
    assert last.round == 4
    assert [float(state["w"][0]) for state in (last.server, last.averaged, last.velocity)] == [4, 2, 0.5]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    assert len((tmp_path / "run/timing.jsonl").read_text().splitlines()) == 4
    RunDirectory.resume(tmp_path / "run", rounds=9).close()


def test_closing_writes_what_was_put_off(tmp_path: Path) -> None:
    directory = new_directory(tmp_path / "run")
    for number in (1, 2):
        commit(directory, number, put_off=True)
    directory.close()
    assert [record["round"] for record in RunDirectory.read(tmp_path / "run").records()] == [1, 2]


def test_no_round_is_written_after_one_that_could_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = new_directory(tmp_path / "run")
    commit(directory, 1)
    directory.flush()
    with monkeypatch.context() as full:
        full.setattr(RunDirectory, "_begin", lambda self: (_ for _ in ()).throw(OSError("no space left")))
        commit(directory, 2)
        with pytest.raises(OSError, match="no space left"):  # noqa: PT012 (the writer may be busy at the first one)
            commit(directory, 3)
            directory.flush()
    directory.close()
    assert [record["round"] for record in RunDirectory.read(tmp_path / "run").records()] == [1]


READER = """
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1])) as db:
    print(db.execute("SELECT count(*) FROM rounds").fetchone()[0])
"""


def test_a_reader_of_a_resumed_run_does_not_take_its_log_away(tmp_path: Path) -> None:
    """A run that was killed leaves a log. Resumed, it holds SQLite's locks on it: whoever reads is not the last one."""
    directory = new_directory(tmp_path / "run")
    for number in (1, 2):
        commit(directory, number)
        directory.flush()
    killed, again = tmp_path / "killed", tmp_path / "killed again"
    shutil.copytree(tmp_path / "run", killed)  # between two rounds: what a kill leaves
    directory.close()
    assert (killed / "state.sqlite-wal").stat().st_size
    resumed = RunDirectory.resume(killed, rounds=9)
    for number in (3, 4):
        reader = subprocess.run(
            [sys.executable, "-c", READER, str(killed / "state.sqlite")], capture_output=True, text=True, check=True
        )
        assert reader.stdout == f"{number - 1}\n"
        commit(resumed, number)
        resumed.flush()
    shutil.copytree(killed, again)
    resumed.close()
    for folder in (killed, again):
        assert [record["round"] for record in RunDirectory.read(folder).records()] == [1, 2, 3, 4]
        RunDirectory.resume(folder, rounds=9).close()
