"""FedFac over Flower, with real processes: a SuperLink, SuperNodes, TLS, keys. ``make test-network``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import FEATURES, NAMES, Hospitals
from torch import Tensor

import fedfac
from fedfac import methods, models
from fedfac.cli import main
from fedfac.data import partition
from fedfac.data.tables import csv_or_parquet
from fedfac.deploy.certs import write_certs
from fedfac.deploy.processes import Network, descendants, is_running
from fedfac.engine.flower.folder import Folder
from fedfac.engine.protocol import Engine
from fedfac.result import Result
from fedfac.run import RunDirectory
from fedfac.state import State, from_bytes, references

SEED = 7


def samples(hospitals: Hospitals, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a node makes of its file, written out."""
    pool = csv_or_parquet(hospitals.folder / f"{name}.csv", label="ill", classes=["no", "yes"]).pool
    n = len(torch.as_tensor(pool.targets))  # type: ignore[attr-defined]
    train, test = partition.hold_out(torch.arange(n).numpy(), 0.25, seed=SEED, client=NAMES.index(name), purpose="test")
    (x, y), (x_test, y_test) = (pool.batch(torch.from_numpy(part)) for part in (train, test))
    return x, y, x_test, y_test


def in_process(hospitals: Hospitals) -> tuple[Result, list[tuple[int, State]]]:
    """The same run in one process, and every personal state that any client ever kept in it."""
    kept: list[tuple[int, State]] = []

    def watch(inner: Engine) -> Engine:
        put = inner.store.put  # type: ignore[attr-defined]

        def keep(client: int, state: State) -> None:
            kept.append((client, state))
            put(client, state)

        inner.store.put = keep  # type: ignore[attr-defined]
        return inner

    result = fedfac.fit(
        models.build("mlp", shape=(FEATURES,), classes=2, seed=SEED, hidden=8),
        fedfac.Federation.from_arrays({name: samples(hospitals, name) for name in NAMES}, classes=2),
        method=methods.fedfac(layers=[1], tau="50%"),
        rounds=3,
        cohort=3,
        epochs=2,
        batch_size=8,
        lr=1e-2,
        seed=SEED,
        evaluate_every=3,
        device="cpu",
        stack=False,
        lanes=1,
        engine=watch,
    )
    return result, kept


def test_three_nodes_train_as_one_process_does_and_no_personal_number_is_received_as_such(hospitals: Hospitals) -> None:
    network = hospitals.network
    # strangers: no key, and a key that another network's authority has made
    write_certs(hospitals.folder / "other-keys", hosts=["127.0.0.1"], nodes=["east"])
    network.start_node("no-key", None, {"client": "east"})
    network.start_node("other-key", hospitals.folder / "other-keys" / "nodes" / "east", {"client": "east"})
    hospitals.start("clean")
    for stranger in ("no-key", "other-key"):
        network.wait(lambda name=stranger: "Exit Code: " in network.log(name), f"{stranger} was not refused")  # type: ignore[misc]
        network.end(stranger)
        assert "SuperNode ID" not in network.log(stranger), "the stranger was let in"
    run = hospitals.finish("clean", 3)

    here, kept = in_process(hospitals)
    there = run.checkpoint()
    assert there is not None
    assert run.config["names"] == list(NAMES)
    assert run.records() == here.records
    assert run.masks() == here.masks
    for name, tensor in here.server.items():
        torch.testing.assert_close(there.server[name], tensor, rtol=0, atol=1e-6)
    assert {m for masks in here.masks.values() for mask in masks.values() for m in mask} == {True, False}

    check_received(hospitals, run, kept)
    for name in NAMES:
        out = hospitals.folder / f"{name}-model"
        assert main(["deploy", "export", str(hospitals.state(name)), str(out)]) == 0
        loaded = references(fedfac.load(out).model(name))
        for tensor_name, tensor in here.state(name).items():
            torch.testing.assert_close(loaded[tensor_name], tensor, rtol=0, atol=1e-6)


def check_received(hospitals: Hospitals, run: RunDirectory, kept: list[tuple[int, State]]) -> None:
    """Every message that the server process got: no sample and no personal number, weighted or not, as such.

    The moments tell the numbers all the same (tests/attacks): the nodes have agreed to that, ``share-weights``.
    """
    folder = hospitals.folder / "clean-received"
    abouts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    types = [about["type"] for about in abouts]
    assert {t: types.count(t) for t in types} == {
        "query.hello": 3,
        "train.train": 9,
        "train.collect": 9,
        "evaluate.evaluate": 3,
    }
    assert {about["from"] for about in abouts} == {str(number) for number in hospitals.numbers.values()}
    parts = [from_bytes(path.read_bytes()) for path in sorted(folder.glob("*.tensors.state"))]
    assert len(parts) == len(abouts)
    names = {name for part in parts for name in part}
    assert names == {"sums/fc1/total", "sums/fc1/products", *(f"part/{n}" for n in run.checkpoint().server)}  # type: ignore[union-attr]
    received = torch.cat([t.double().flatten() for part in parts for t in part.values()])

    split = fedfac.Split.from_json(run.config["split"])
    hidden = []
    for number, (client, state) in enumerate(kept):
        personal = split.with_masks(run.masks()[1 + number // 3]).personal(state)
        values = torch.cat([t.double().flatten() for t in personal.values()])
        hidden += [values, values * len(samples(hospitals, NAMES[client])[1])]
    assert sum(len(h) for h in hidden) > 200
    for name in NAMES:
        x, _, x_test, _ = samples(hospitals, name)
        raw = [line.split(",")[:-1] for line in (hospitals.folder / f"{name}.csv").read_text().splitlines()[1:]]
        hidden += [x.double().flatten(), x_test.double().flatten(), torch.tensor([[float(v) for v in r] for r in raw])]
    values = torch.cat([h.double().flatten() for h in hidden])
    values = values[(values != 0) & (values != 1)]
    assert not bool(torch.isin(values, received).any())
    plain = " ".join(json.dumps(about) for about in abouts)
    assert not any(f"{value:.9f}" in plain for value in values.tolist())


def test_a_run_outlives_a_killed_node_a_liar_and_a_killed_server(hospitals: Hospitals) -> None:
    network = hospitals.network
    number = network.register(network.keys / "nodes" / "liar.pub")
    (hospitals.folder / "liar.csv").write_bytes((hospitals.folder / "east.csv").read_bytes())
    hospitals.start_node("liar", garbage=True)
    settings = {"deploy__clients": 4, "deploy__deadline": 60.0, "train__cohort": 4}
    hospitals.start("dirty", **settings)

    # kill -9 of a SuperNode, and of everything that it has started, in the middle of round 2
    hospitals.wait_for_round("dirty", 1)
    run_name = RunDirectory.read(hospitals.folder / "dirty").config["remote"]["run"]
    west = Folder(hospitals.state("west"), run_name, "west")
    asked = network.log("west").count("Receiving: train.train")
    network.wait(lambda: network.log("west").count("Receiving: train.train") > asked, "west was not asked", "west")
    network.end("west", kill=True)
    before = west.kept(1)
    assert before is not None
    hospitals.wait_for_round("dirty", 2)

    # kill -9 of the server: the SuperLink and the ServerApp below it, in the middle of round 3
    asked = network.log("east").count("Receiving: train.train")
    network.wait(lambda: network.log("east").count("Receiving: train.train") > asked, "east was not asked", "east")
    network.end("superlink", kill=True)
    network.end("run", kill=True)
    whole = hospitals.records("dirty")
    assert (west.kept(2), fedfac.state.same(west.kept(1) or {}, before)) == (None, True)
    network.start_link()
    hospitals.start("dirty", **settings)
    hospitals.restart_node("west")
    run = hospitals.finish("dirty", 3)

    records = run.records()
    assert records[: len(whole)] == whole
    assert [r["round"] for r in records] == [1, 2, 3]
    refused = f"the reply of node {number} was refused: it cannot be read (RunError)"
    assert [r["left_out"].get("liar") for r in records] == [refused] * 3
    assert [sorted(set(r["left_out"]) - {"liar"}) for r in records] == [[], ["west"], []]
    assert records[-1]["not_tested"] == ["liar"]
    assert records[-1]["test"]["clients"] == 3
    assert "going on after round" in network.log("run")
    kept = [p.name for p in west.path.glob("kept-*")]
    assert sorted(kept) == ["kept-000001", "kept-000003"], "round 3 did not begin from what round 1 had left"


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """What a node has started ends with it, also if nobody ever answers it."""
    write_certs(tmp_path / "keys", hosts=["127.0.0.1"], nodes=["a"])
    with Network(tmp_path, tmp_path / "keys") as network:
        network.start_node("a", tmp_path / "keys" / "nodes" / "a", {"client": "a"})
        pid = network.processes["a"].pid
        network.wait(lambda: bool(descendants(pid)), "the node starts nothing", "a")
        family = [pid, *descendants(pid)]
    assert len(family) > 1
    assert not [pid for pid in family if is_running(pid)]


def test_the_trial_trains_refuses_a_stranger_and_ends_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["deploy", "try", "--nodes", "2", "--rounds", "1", "--dir", "trial", "--quiet", "--json"]
    assert main(command) == 0
    came = json.loads(capsys.readouterr().out)
    assert came["stranger_refused"] is True
    assert came["result"]["rounds"] == [1, 1]
    assert came["result"]["test"]["clients"] == 2
    assert came["result"]["layers"]["fc1"]["shared"] == 100
    assert came["result"]["method"]["name"] == "fedfac-plus"


def test_nodes_that_are_not_asked_refuse_to_be_measured_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trial"
    command = ["deploy", "try", "--nodes", "2", "--rounds", "1", "--method", "fedfac", "--dir", str(folder), "--quiet"]
    assert main(command) == 1
    assert "2 of 2 nodes refuse this run (0, 1): its owner has not agreed to be measured" in capsys.readouterr().err
    assert not (folder / "run").exists()
    assert not list(folder.glob("node-*/*/*/kept-*"))
