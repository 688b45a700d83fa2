"""The engine over a network, without the network: nodes in this process, every message through its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import loopback
import pytest
import torch
import torch.nn.functional as F
from helpers import message
from loopback import CLIENTS, SHAPE, Loopback, deployment, nodes, over_the_wire, session

import fedfac
from fedfac import methods
from fedfac.deploy.export import export
from fedfac.engine.flower import wire
from fedfac.engine.flower.engine import NetworkEngine, last_counted
from fedfac.engine.flower.folder import Folder
from fedfac.engine.flower.wire import Packet, Request
from fedfac.errors import DataError, RunError, TrainingError
from fedfac.result import Result
from fedfac.roster import Roster
from fedfac.state import references, same


def in_process(method: str, **changes: Any) -> Result:
    run = deployment(method, **changes)
    clients = {str(c): loopback.load({"client": c}) for c in range(CLIENTS)}
    train = run.config.train
    return fedfac.fit(
        run.model(SHAPE, 3),
        fedfac.Federation.from_arrays(clients, classes=3),
        method=run.method,
        rounds=train.rounds,
        cohort=train.cohort,
        epochs=train.epochs,
        batch_size=train.batch_size,
        evaluate_every=1,
        loss=F.cross_entropy,
        device="cpu",
        stack=False,
        lanes=1,
    )


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_every_method_gives_the_same_bits_as_in_process(name: str, tmp_path: Path) -> None:
    there, here = over_the_wire(deployment(name), tmp_path), in_process(name)
    assert there.records == here.records
    assert same(there.server, here.server)
    assert there.masks == here.masks
    for client in range(CLIENTS):
        export(tmp_path / str(client), tmp_path / f"model-{client}")
        loaded = fedfac.load(tmp_path / f"model-{client}")
        assert same(references(loaded.model(str(client))), references(here.model(client)))


@pytest.mark.parametrize("joint", [False, True])
def test_means_and_priors_travel_too(joint: bool, tmp_path: Path) -> None:
    """FedFac+ after its warm-up, which the rounds above do not reach."""
    change: dict[str, Any] = {"method__warmup": 1, "method__joint": joint, "train__rounds": 3}
    asked: list[str] = []

    def listen(client: int, request: Request, reply: Packet) -> Packet:
        asked.append(request.action)
        return reply

    there = over_the_wire(deployment("fedfac-plus", **change), tmp_path, listen)
    here = in_process("fedfac-plus", **change)
    assert here.records[-1]["test"]["model"] == "fine-tuned"
    assert ("collect" in asked) is not joint  # parts that go out whole need not wait for the masks
    assert there.records == here.records
    assert same(there.server, here.server)
    for client in range(CLIENTS):
        export(tmp_path / str(client), tmp_path / f"model-{client}")
        loaded = fedfac.load(tmp_path / f"model-{client}")
        assert same(references(loaded.model(str(client))), references(here.model(client)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("random-redrawn", {"hysteresis": 0.3}),  # masks go on from those of rounds that a node has not seen
        ("fedfac-static", {"joint": True, "warmup": 1, "refresh": 1}),  # decided in a round whose parts leave at once
        ("random", {"joint": True, "warmup": 1, "refresh": 1}),
    ],
)
def test_nodes_go_along_with_what_switches_make_of_a_decision(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    change = {f"method__{option}": value for option, value in options.items()} | {"train__rounds": 4}
    there, here = over_the_wire(deployment(name, **change), tmp_path), in_process(name, **change)
    assert not any(record["left_out"] for record in there.records)
    assert there.records == here.records
    assert same(there.server, here.server)
    assert there.masks == here.masks


def lose(*lost: tuple[int, str, int]) -> loopback.Meddle:
    """A network that loses the replies of (round, action, client)."""

    def meddle(client: int, request: Request, reply: Packet) -> Packet | None:
        return None if (request.round, request.action, client) in lost else reply

    return meddle


@pytest.mark.parametrize("action", ["train", "collect"])
def test_a_lost_reply_leaves_its_client_out_of_the_round_and_nothing_of_it_counts(action: str, tmp_path: Path) -> None:
    run = deployment("fedfac", train__cohort=4)
    result = over_the_wire(run, tmp_path, lose((2, action, 1)))
    assert [r["left_out"] for r in result.records] == [{}, {"1": "no reply within 1 s"}, {}]
    assert result.records[1]["not_tested"] == ["1"]
    assert "not_tested" not in result.records[2]
    # round 3 of client 1 began from what it kept in round 1, although it had kept round 2 by itself
    folder = Folder(tmp_path / "1", loopback.RUN, "1")
    assert folder.kept(3) is not None
    assert (folder.kept(1) is not None, folder.kept(2)) == (True, None)


def test_what_a_lost_part_left_behind_makes_no_difference(tmp_path: Path) -> None:
    """Whether the reply to round 2's collect or to its train was lost: client 1 goes on from round 1 either way."""
    run = deployment("fedper", train__cohort=4)
    one = over_the_wire(run, tmp_path / "a", lose((2, "train", 1)))

    def never_trained(client: int, request: Request, reply: Packet) -> Packet | None:
        if (request.round, request.action, client) == (2, "train", 1):
            (tmp_path / "b" / "1" / loopback.RUN / "1" / "kept-000002").unlink()
            return None
        return reply

    other = over_the_wire(run, tmp_path / "b", never_trained)
    assert one.records == other.records
    assert same(one.server, other.server)


def test_below_the_minimum_a_round_is_skipped_and_changes_nothing(tmp_path: Path) -> None:
    run = deployment("fedfac", train__cohort=4)
    lost = lose(*[(2, "train", client) for client in (0, 1, 3)])
    result = over_the_wire(run, tmp_path, lost, out=tmp_path / "run")
    skipped = result.records[1]
    assert skipped["skipped"] == "1 of 4 clients trained, and 2 are needed"
    assert sorted(skipped["left_out"]) == ["0", "1", "3"]
    assert "test" not in skipped
    assert result.masks[2] == result.masks[1]
    assert result.records[2]["round"] == 3
    assert result.records[2]["left_out"] == {}
    assert last_counted(result.records, result.names) == dict.fromkeys(range(4), 3)


def test_too_few_parts_skip_the_round_too_and_the_split_stays(tmp_path: Path) -> None:
    run = deployment("fedfac", train__cohort=4, train__rounds=2)
    result = over_the_wire(run, tmp_path, lose(*[(2, "collect", client) for client in (0, 1, 3)]))
    assert result.records[1]["skipped"] == "1 of 4 clients sent their part, and 2 are needed"
    assert result.masks[2] == result.masks[1]


@pytest.mark.parametrize("method", ["fedfac-static", "random"])
@pytest.mark.parametrize("action", ["train", "collect"])
def test_one_decision_after_a_warm_up_outlives_a_round_that_is_skipped(
    method: str, action: str, tmp_path: Path
) -> None:
    """It is made in the next round, or it stands where nodes have let parts go for it."""
    run = deployment(method, method__warmup=1, train__rounds=5)
    result = over_the_wire(run, tmp_path, lose((2, action, 0), (2, action, 1), (2, action, 3)))
    assert ["skipped" in record for record in result.records] == [False, True, False, False, False]
    assert not any(record["left_out"] for record in result.records if record["round"] > 2)
    decided = [record["round"] for record in result.records if "tau" in record["split"].get("fc1", {})]
    assert decided == [2 if action == "collect" else 3]
    assert {sum(result.masks[number]["fc1"]) for number in (3, 4, 5)} == {5}
    assert result.masks[3] == result.masks[4] == result.masks[5]


def test_a_decision_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    lost = lose(*[(0, "train", client) for client in range(4)])
    text = message(TrainingError, lambda: over_the_wire(deployment("fedfac-static"), tmp_path, lost))
    assert text == ("the one decision before the first round cannot be made: 0 of 3 clients trained, and 2 are needed")


def garbled(change: Any) -> loopback.Meddle:
    """Client 1's replies of round 2 arrive changed."""

    def meddle(client: int, request: Request, reply: Packet) -> Packet | None:
        return change(reply) if (request.round, client) == (2, 1) else reply

    return meddle


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: Packet({**p.values, "samples": 0}, p.tensors), "Expected `int` >= 1 - at `$.samples`"),
        (
            lambda p: Packet({**p.values, "loss": float("nan")}, p.tensors),
            "38 - at `$.loss`",
        ),
        (lambda p: Packet(p.values, {k: t / 0 for k, t in p.tensors.items()}), "its sums of layer fc1 are not finite"),
        (lambda p: Packet({}), "Object missing required field `samples`"),
    ],
)
def test_garbage_is_refused_with_its_senders_number_and_the_round_goes_on(
    change: Any, why: str, tmp_path: Path
) -> None:
    result = over_the_wire(deployment("fedfac", train__cohort=4), tmp_path, garbled(change))
    (left_out,) = result.records[1]["left_out"].items()
    name, text = left_out
    assert name == "1"
    assert text.startswith("the reply of node n1 was refused: ")
    assert text.endswith(why)
    assert [r["left_out"] for r in result.records[::2]] == [{}, {}]
    assert all(bool(torch.isfinite(t).all()) for t in result.server.values())


def test_a_server_that_is_killed_between_collect_and_commit_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    run = deployment("fedfac")
    straight = over_the_wire(run, tmp_path / "straight")
    there = Loopback(nodes(run, tmp_path / "nodes", **{"share-weights": True}))
    with session(run, there, out=tmp_path / "run") as first:
        first.step()
        first._advance(2, {"round": 2}, _Clockless())  # type: ignore[arg-type]  # clients kept; nothing is committed
    again = session(run, there, out=tmp_path / "run", resume=True)
    assert again.next_round == 2
    result = again.drive()
    assert result.records == straight.records
    assert same(result.server, straight.server)


class _Clockless:
    def lap(self, step: str) -> None:
        pass


def test_no_personal_number_and_no_sample_is_in_what_the_server_receives(tmp_path: Path) -> None:
    run = deployment("random-redrawn", train__cohort=4)  # by element, and nothing is measured
    there = Loopback(nodes(run, tmp_path))
    result = session(run, there).drive()
    received = torch.cat([t.double().flatten() for packet in there.received for t in packet.tensors.values()])
    hidden = []
    for client in range(CLIENTS):
        own = Folder(tmp_path / str(client), loopback.RUN, str(client)).kept(3)
        assert own is not None
        personal = torch.cat([t.double().flatten() for t in result.split.personal(own).values()])
        x = torch.cat([t.double().flatten() for t in loopback.load({"client": client})[::2]])
        hidden += [personal, personal * loopback.load({"client": client})[1].numel(), x]
    values = torch.cat(hidden)
    values = values[(values != 0) & (values != 1)]
    assert len(values) > 500
    assert not bool(torch.isin(values, received).any())


def test_a_server_cannot_ask_for_one_half_of_the_elements_and_then_for_the_other(tmp_path: Path) -> None:
    run = deployment("fedfac")
    node = nodes(run, tmp_path, **{"share-weights": True})[0]
    there = session(run, Loopback([node]))
    masks = {"fc1": (True, False) * 5}
    request = Request(wire.TRAIN, run=loopback.RUN, round=1, classes=3, masks=masks, server=there.server, measure=True)
    assert "samples" in node.answer(request).values
    collect = Request(wire.COLLECT, run=loopback.RUN, round=1, classes=3, masks=masks)
    first = node.answer(collect)
    assert same(node.answer(collect).tensors, first.tensors)
    other = node.answer(replace(collect, masks={"fc1": (False, True) * 5}))
    assert (other.values["kind"], other.tensors) == (wire.MASKS, {})


@pytest.mark.parametrize("method", ["variance", "fedfac", "fedfac-static"])
def test_a_run_that_nodes_refuse_ends_in_its_first_round_and_says_why(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = deployment(method)
    text = message(RunError, lambda: session(run, Loopback(nodes(run, tmp_path))).drive())
    who = "0, 2, 3" if method == "fedfac-static" else "0, 1, 3"  # the cohort of the first round, 0 or 1
    assert text.startswith(f"{who}: its owner has not agreed to be measured")
    assert "(fedfac-plus with schedule='dynamic' and joint=True, fedper)" in text
    assert text.endswith("--node-config 'share-weights=true'")
    assert f"refused (method {method!r}, layers fc1)" in caplog.text


def test_an_error_on_a_node_is_told_by_its_kind_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = nodes(deployment("fedavg"), tmp_path, data="loopback:nothing")[0]
    reply = node.answer(Request(wire.HELLO))
    assert reply.values == {"problem": "it failed with a ConfigError; its own log says why"}
    assert "'loopback:nothing' cannot be imported" in caplog.text


def test_a_lost_personal_state_is_not_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = deployment("fedper", train__cohort=4)

    def burn(client: int, request: Request, reply: Packet) -> Packet | None:
        if (request.round, request.action, client) == (1, "evaluate", 2):
            (kept,) = tmp_path.glob(f"*/2/{loopback.RUN}/2/kept-000001")
            kept.rename(kept.with_name("burnt"))
        return reply

    result = session(run, Loopback(nodes(run, tmp_path / "lost"), burn)).drive()
    assert result.records[1]["left_out"] == {"2": "it failed with a RunError; its own log says why"}
    assert "--node-config 'begin-anew=true'" in caplog.text
    anew = session(run, Loopback(nodes(run, tmp_path / "anew", **{"begin-anew": True}), burn)).drive()
    assert anew.records[1]["left_out"] == {}


def test_a_run_over_a_network_says_where_the_models_are(tmp_path: Path) -> None:
    run = deployment("fedper")
    result = over_the_wire(run, tmp_path / "nodes", out=tmp_path / "run")
    for here in (result, fedfac.load(tmp_path / "run", run.model(SHAPE, 3))):
        assert same(here.server, result.server)
        assert message(RunError, lambda it=here: it.model("1")) == (  # type: ignore[misc]
            "the personal part of client 1 is on its node, and only 'fedfac deploy export' there gives its model; "
            "here is what is shared: result.server"
        )
    shared = over_the_wire(deployment("fedavg"), tmp_path / "more")
    assert same(references(shared.model("1")), shared.server)
    assert "fedfac deploy export" in message(RunError, lambda: fedfac.load(tmp_path / "run"))
    with pytest.raises(RunError, match="'flwr run' its app again"):
        fedfac.experiment.config_of(tmp_path / "run")
    assert "say which one" in message(RunError, lambda: export_all(tmp_path / "nodes"))
    assert "has no model of any run" in message(RunError, lambda: export(tmp_path, tmp_path / "out"))


def export_all(folder: Path) -> None:
    """Two clients in one folder: the newest run has both."""
    mixed = folder / "mixed" / loopback.RUN
    mixed.mkdir(parents=True)
    for client in ("0", "1"):
        (folder / client / loopback.RUN / client).rename(mixed / client)
    export(folder / "mixed", folder / "out")


def test_a_roster_has_clients_and_no_two_of_one_name() -> None:
    def roster(*names: str) -> Roster:
        return Roster(names, 2, "", lambda *_: None, {})  # type: ignore[arg-type]

    assert message(DataError, roster) == "a roster needs at least one client; this one has none"
    text = message(DataError, lambda: roster("a", "b", "a"))
    assert text == "two clients have the name 'a': give each a name of its own"


def test_a_node_that_is_kept_out_of_training_is_not_asked_for_anything(tmp_path: Path) -> None:
    run = deployment("fedper", train__cohort=2)
    asked: set[int] = set()

    def watch(client: int, request: Request, reply: Packet) -> Packet:
        asked.add(client)
        return reply

    there = session(run, Loopback(nodes(run, tmp_path), watch), newcomers=0.25)
    result = there.drive()
    assert result.finished
    assert not any("newcomers" in record for record in result.records)
    assert asked == set(range(CLIENTS)) - set(there.newcomers) != set(range(CLIENTS))


def test_clients_that_are_not_tested_get_the_last_model_too(tmp_path: Path) -> None:
    run = deployment("fedper")
    there = session(run, Loopback(nodes(run, tmp_path)), evaluate_clients=1)
    result = there.drive()
    rest = [client for client in range(CLIENTS) if client not in there.tested]
    assert len(rest) == 3
    assert isinstance(there.engine, NetworkEngine)
    there.engine.hand_out(3, there.server, there.split, rest)
    for client in range(CLIENTS):
        config = export(tmp_path / str(client), tmp_path / f"model-{client}")
        assert config["round"] == 3
    assert [row["client"] for row in result.clients] == [str(there.tested[0])]
