"""What a server that lies can get out of a node: the node is real, and so is every byte of the requests."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import loopback
import pytest
import torch
from filelock import FileLock
from helpers import message
from loopback import CLASSES, RUN, SHAPE, deployment, nodes
from torch import Tensor

from fedfac.deploy.export import export
from fedfac.engine.flower.folder import Folder
from fedfac.engine.flower.node import Node
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import COLLECT, EVALUATE, HELLO, TRAIN, Packet, Request
from fedfac.errors import ConfigError
from fedfac.state import State, same, state_of

CONSENT: dict[str, Any] = {"share-weights": True}


def victim(tmp_path: Path, method: str, config: dict[str, Any] | None = None, **changes: Any) -> tuple[Node, State]:
    """A node, and the state with which a server of this method begins."""
    run = deployment(method, **changes)
    template, _ = run.plan(run.model(SHAPE, CLASSES))
    return nodes(run, tmp_path, **(config or {}))[0], state_of(template)


def ask(node: Node, action: str, round: int, server: State, **more: Any) -> Packet:
    """Send a request as bytes, and read the reply from bytes."""
    request = Request(action, run=RUN, round=round, classes=CLASSES, server=server, **more)
    return Packet.unpack(*node.answer(Request.read(Packet.unpack(*request.packet().pack()))).pack())


def half(elements: int, first: bool = True) -> dict[str, tuple[bool, ...]]:
    return {"fc1": (first, not first) * (elements // 2)}


def refused(reply: Packet) -> str:
    """By its kind, and nothing else has left."""
    assert reply.tensors == {}
    assert reply.values.keys() == {"problem", "kind"}, reply.values
    return str(reply.values["kind"])


# ---------------------------------------------------------------- moments and shared rows


def personal_rows(node: Node, server: State, elements: int) -> tuple[Tensor, Tensor]:
    """The attack: least squares of one client's moments on its shared rows; and what the client really keeps."""
    masks = half(elements)
    measured = ask(node, TRAIN, 1, server, masks=masks, measure=True)
    part = ask(node, COLLECT, 1, {}, masks=masks)
    fan_in = server["fc1.weight"].shape[1]
    shared = (part.tensors["part/fc1.weight"] / part.values["samples"]).reshape(-1, fan_in)
    gram = measured.tensors["sums/fc1/products"]
    if gram.ndim == 1:
        triangle, gram = gram, torch.zeros(elements, elements, dtype=torch.float64)
        gram[tuple(torch.triu_indices(elements, elements))] = triangle
        gram = gram + gram.triu(1).T
    mask = torch.tensor(masks["fc1"])
    stolen = torch.linalg.lstsq(shared, gram[mask][:, ~mask], driver="gelsd").solution.T
    kept = Folder(node.config.folder, RUN, node.config.name).kept(1)
    assert kept is not None
    return stolen, kept["fc1.weight"].double()[~mask]


def test_moments_and_shared_rows_give_every_personal_weight_if_the_owner_agrees(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedfac", CONSENT, model__hidden=40)
    stolen, kept = personal_rows(node, server, 40)
    assert kept.shape == (20, 12)
    torch.testing.assert_close(stolen, kept, rtol=0, atol=1e-9)


def test_the_leak_is_graded_fewer_shared_rows_than_weights_give_a_projection(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedfac", CONSENT)
    stolen, kept = personal_rows(node, server, 10)  # five shared rows, twelve weights each
    likeness = torch.cosine_similarity(stolen, kept)
    assert bool((likeness > 0.3).all())
    assert not torch.allclose(stolen, kept, atol=1e-3)


MEASURED: list[tuple[str, dict[str, Any]]] = [
    ("fedfac", {}),
    ("fedfac", {"method__warmup": 2}),
    ("fedfac-static", {}),
    ("fedfac-static", {"method__warmup": 2}),
    ("fedfac-plus", {"method__joint": False}),
    ("fedfac-plus", {"method__schedule": "static"}),
    ("variance", {}),
]


@pytest.mark.parametrize(("method", "changes"), MEASURED)
def test_a_node_is_not_measured_without_its_owners_word(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    node, server = victim(tmp_path, method, **changes)
    assert node.answer(Request(HELLO)).values["refuses"] == "measure"
    for number in (0, 1, 2, 3):
        masks = {} if number <= changes.get("method__warmup", 0) else half(10)
        for flags in ({"measure": True}, {"measure": True, "collect": True}, {"collect": True}, {}):
            assert refused(ask(node, TRAIN, number, server, masks=masks, **flags)) == "measure"
    assert not list(tmp_path.rglob("held-*")) + list(tmp_path.rglob("kept-*"))


@pytest.mark.parametrize("method", ["fedfac-plus", "fedper", "fedavg", "random", "random-redrawn", "all-personal"])
def test_methods_that_measure_nothing_personal_are_not_refused(method: str, tmp_path: Path) -> None:
    node, _ = victim(tmp_path, method)
    assert "refuses" not in node.answer(Request(HELLO)).values


def test_what_is_shared_whole_is_measured_only_where_it_leaves_in_the_same_reply(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedfac-plus")
    masks = half(10)
    assert refused(ask(node, TRAIN, 1, server, masks=masks, measure=True)) == "measure"
    reply = ask(node, TRAIN, 1, server, masks=masks, measure=True, collect=True)
    assert {"sums/fc1/products", "part/fc1.weight"} <= reply.tensors.keys()
    assert reply.tensors["part/fc1.weight"].shape == (10, 12)


@pytest.mark.parametrize("value", ["false", "no", 1, "true"])
def test_an_owners_word_is_true_or_false_and_nothing_else(value: Any) -> None:
    text = message(ConfigError, lambda: NodeConfig.read({"client": "a", "share-weights": value}, 0))
    assert text.startswith(f"share-weights in the node's config is {value!r}; it is true or false")


# ---------------------------------------------------------------- masks of the server's choice

ALL, NONE = (True,) * 10, (False,) * 10


@pytest.mark.parametrize("method", ["random", "all-personal"])
def test_masks_that_a_node_can_compute_must_be_those(method: str, tmp_path: Path) -> None:
    node, server = victim(tmp_path, method)
    for mask in (ALL, half(10)["fc1"], half(10, first=False)["fc1"]):
        reply = ask(node, TRAIN, 1, server, masks={"fc1": mask}, collect=True)
        assert refused(reply) == "masks"
    assert "problem" in ask(node, TRAIN, 1, server, masks={"fc1": ALL[:-1]}, collect=True).values
    assert "problem" in ask(node, TRAIN, 1, server, masks={"fc2": ALL}, collect=True).values


def test_a_redrawn_split_is_drawn_again_by_the_node(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "random-redrawn")
    ask(node, TRAIN, 1, server, masks={"fc1": ALL})
    for mask in (ALL, half(10)["fc1"]):
        assert refused(ask(node, COLLECT, 1, {}, masks={"fc1": mask})) == "masks"


def test_no_more_elements_are_shared_than_tau_says(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedfac", CONSENT)
    ask(node, TRAIN, 1, server, masks={"fc1": ALL}, measure=True)
    for mask in (ALL, (True,) * 6 + (False,) * 4):
        assert refused(ask(node, COLLECT, 1, {}, masks={"fc1": mask})) == "masks"
    assert "samples" in ask(node, COLLECT, 1, {}, masks=half(10)).values
    personal, server = victim(tmp_path / "inf", "fedfac", CONSENT, method__tau="inf")
    ask(personal, TRAIN, 1, server, masks={"fc1": ALL}, measure=True)
    assert refused(ask(personal, COLLECT, 1, {}, masks={"fc1": (True, *NONE[1:])})) == "masks"


def test_masks_of_a_static_method_do_not_change_once_they_were_used(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedfac-static", CONSENT)
    assert "samples" in ask(node, TRAIN, 1, server, masks=half(10), collect=True).values
    assert refused(ask(node, TRAIN, 2, server, masks=half(10, first=False), collect=True)) == "masks"
    assert "samples" in ask(node, TRAIN, 3, server, masks=half(10), collect=True, last=1).values


# ---------------------------------------------------------------- rounds


def test_an_older_round_in_between_does_not_give_the_other_half_of_a_layer(tmp_path: Path) -> None:
    """Training round 3 made the node forget for which masks round 4 had left, but not what it had held of round 4."""
    node, server = victim(tmp_path, "fedfac", CONSENT)
    ask(node, TRAIN, 4, server, masks=half(10), measure=True)
    assert "part/fc1.weight" in ask(node, COLLECT, 4, {}, masks=half(10)).tensors
    assert refused(ask(node, TRAIN, 3, server, masks=half(10), measure=True)) == "round"
    other = ask(node, COLLECT, 4, {}, masks=half(10, first=False))
    assert refused(other) == "masks"


def test_a_round_is_trained_again_for_the_same_request_only(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedper")
    first = ask(node, TRAIN, 2, server, collect=True)
    again = ask(node, TRAIN, 2, server, collect=True, nonce="ab")
    assert same(again.tensors, first.tensors)
    assert again.values == first.values
    crafted = {name: tensor + 1 for name, tensor in server.items()}
    assert refused(ask(node, TRAIN, 2, crafted, collect=True)) == "round"
    assert refused(ask(node, TRAIN, 1, server, collect=True)) == "round"
    assert "samples" in ask(node, TRAIN, 3, crafted, collect=True, last=2).values


def test_going_back_needs_the_owners_word(tmp_path: Path) -> None:
    run = deployment("fedper")
    node, server = victim(tmp_path, "fedper")
    ask(node, TRAIN, 1, server, collect=True)
    ask(node, TRAIN, 2, server, collect=True, last=1)
    ask(node, EVALUATE, 2, server, last=2)
    assert refused(ask(node, TRAIN, 2, server, collect=True, last=0)) == "round"
    (agreed, *_) = nodes(run, tmp_path, **{"go-back": True})
    assert (
        "samples" in ask(agreed, TRAIN, 2, {**server, "fc1.bias": server["fc1.bias"] + 1}, collect=True, last=1).values
    )
    assert "scores" in ask(agreed, EVALUATE, 2, server, last=2).values
    assert refused(ask(node, TRAIN, 1, server, collect=True)) == "round"  # the word was taken back


def test_a_run_stays_what_it_was(tmp_path: Path) -> None:
    """With another client number a node's test samples would become training samples, with another seed too."""
    node, server = victim(tmp_path, "fedper")
    ask(node, TRAIN, 1, server, collect=True)
    assert refused(ask(node, TRAIN, 2, server, collect=True, client=1)) == "changed"
    for other in (
        deployment("fedavg"),
        deployment("fedper", train__seed=1),
        deployment("fedper", data__test_share=0.0),
    ):
        assert refused(ask(nodes(other, tmp_path)[0], TRAIN, 2, server, collect=True)) == "changed"
    longer = nodes(deployment("fedper", train__rounds=9), tmp_path)[0]
    assert "samples" in ask(longer, TRAIN, 2, server, collect=True, last=1).values


# ---------------------------------------------------------------- evaluation


def always(server: State, label: int) -> State:
    """A state of a model that answers one class, whatever it sees."""
    constant = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
    constant["fc2.bias"][label] = 10
    return constant


def test_crafted_evaluations_do_not_count_the_labels_of_a_round(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedavg")
    labels = loopback.load({"client": "0"})[3]
    first = ask(node, EVALUATE, 1, always(server, 0))
    assert first.values["scores"]["test"]["correct"] == int((labels == 0).sum())  # one count is what an evaluation is
    for label in (1, 2):
        assert refused(ask(node, EVALUATE, 1, always(server, label))) == "evaluation"
    again = ask(node, EVALUATE, 1, always(server, 0), nonce="cd")
    assert again.values == first.values
    assert refused(ask(node, EVALUATE, 0, always(server, 1))) == "evaluation"


def test_only_the_newest_round_is_evaluated_and_only_where_the_run_says_so(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedavg", train__evaluate_every=2, train__rounds=5)
    ask(node, TRAIN, 3, server, collect=True)
    assert refused(ask(node, EVALUATE, 2, server)) == "evaluation"
    assert refused(ask(node, EVALUATE, 3, server)) == "evaluation"
    assert "scores" in ask(node, EVALUATE, 4, server).values
    assert "scores" in ask(node, EVALUATE, 5, server).values


# ---------------------------------------------------------------- the node's disk


def test_what_is_held_does_not_grow(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "random-redrawn")
    for number in range(1, 7):
        ask(node, TRAIN, number, server, masks={"fc1": ALL})
    assert [path.name for path in tmp_path.rglob("held-*")] == ["held-000006"]


def named(number: int) -> str:
    return f"{number:016x}"


def begin(node: Node, server: State, number: int) -> Packet:
    return node.answer(Request(TRAIN, run=named(number), round=1, classes=CLASSES, server=server, collect=True))


@pytest.mark.parametrize(("limit", "left"), [({"keep-runs": 3}, 3), ({"keep-bytes": 1}, 1), ({"keep-days": 1}, 7)])
def test_old_runs_do_not_fill_the_disk(limit: dict[str, int], left: int, tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedper", limit)
    base = node.config.folder
    for number in range(6):
        assert "samples" in begin(node, server, number).values
    old = time.time() - 2 * 24 * 3600
    for path in base.glob(f"{named(0)}/**/*"):
        os.utime(path, (old, old))
    assert "samples" in begin(node, server, 6).values
    there = {path.name for path in base.iterdir()}
    assert named(6) in there
    assert (named(0) in there) is False
    assert len(there) == left - (limit == {"keep-days": 1})


def test_the_newest_model_and_a_run_in_use_stay(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedper", {"keep-runs": 1})
    base = node.config.folder
    begin(node, server, 0)
    node.answer(Request(EVALUATE, run=named(0), round=1, classes=CLASSES, server=server, last=1))
    begin(node, server, 1)
    with FileLock(base / named(1) / "0" / "lock"):
        begin(node, server, 2)
    begin(node, server, 3)
    assert {path.name for path in base.iterdir()} == {named(0), named(3)}
    assert export(base, tmp_path / "model")["round"] == 1


def test_folders_are_private_and_those_of_an_earlier_version_are_mended(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        node, server = victim(tmp_path, "fedper")
        ask(node, TRAIN, 1, server, collect=True)
        ask(node, EVALUATE, 1, server, last=1)
        base = node.config.folder
        modes = {path: path.stat().st_mode & 0o777 for path in [base, *base.rglob("*")]}
        assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
        assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
        assert {path.name for path in modes} >= {"ledger", "kept-000001", "model", "lock"}
        for path in modes:
            path.chmod(0o777 if path.is_dir() else 0o666)
        ask(node, TRAIN, 2, server, collect=True, last=1)
        assert {path.stat().st_mode & 0o077 for path in [base, *base.rglob("*")]} == {0}
    finally:
        os.umask(before)


def test_a_folder_that_is_not_only_the_nodes_keeps_its_own_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "visits.csv").write_text("a\n")
    run: Deployment = deployment("fedper")
    node = Node(run, NodeConfig.read({"client": "0", "data": "loopback:load", "folder": str(tmp_path)}, 0))
    ask(node, TRAIN, 1, state_of(run.model(SHAPE, CLASSES)), collect=True)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / RUN).stat().st_mode & 0o777 == 0o700


def test_a_run_of_an_earlier_version_goes_forward_too(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedper")
    ask(node, TRAIN, 4, server, collect=True)
    (ledger,) = tmp_path.rglob("ledger")
    ledger.unlink()
    assert refused(ask(node, TRAIN, 3, server, collect=True)) == "round"
    assert "samples" in ask(node, TRAIN, 5, server, collect=True, last=4).values


def test_a_reply_says_which_request_it_answers(tmp_path: Path) -> None:
    node, server = victim(tmp_path, "fedavg")
    request = Request(TRAIN, run=RUN, round=1, classes=CLASSES, server=server, collect=True, nonce="0123")
    assert node.answer(request).to == f"{RUN}/1/train/0/0123"
    assert node.answer(replace(request, action=EVALUATE)).to == f"{RUN}/1/evaluate/0/0123"
