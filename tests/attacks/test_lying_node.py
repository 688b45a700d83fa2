"""What a node that lies can do to a run: the server is real, and its run directory is on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import message
from loopback import CLIENTS, Loopback, deployment, nodes, over_the_wire, session

from fedfac.cli import main
from fedfac.engine.flower import wire
from fedfac.engine.flower.grid import roster_of
from fedfac.engine.flower.wire import EVALUATE, TRAIN, Hello, Packet, ReplyError, Request
from fedfac.errors import RunError
from fedfac.result import Result
from fedfac.run import RunDirectory
from fedfac.state import is_finite

LIAR = 1
Lie = Callable[[Packet], Packet | None]


def lies(tmp_path: Path, action: str, lie: Lie, method: str = "fedfac", **changes: Any) -> Result:
    """A run of which one client lies in round 2."""

    def meddle(client: int, request: Request, reply: Packet) -> Packet | None:
        return lie(reply) if (request.round, request.action, client) == (2, action, LIAR) else reply

    run = deployment(method, train__cohort=CLIENTS, **changes)
    return over_the_wire(run, tmp_path / "nodes", meddle, out=tmp_path / "run")


def strict(text: str) -> Any:
    def never(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=never)


def check_sound(result: Result, tmp_path: Path) -> list[dict[str, Any]]:
    """All of it is finite, small, printable, and says the same on disk."""
    assert is_finite(result.server)
    saved = RunDirectory.read(tmp_path / "run").checkpoint()
    assert saved is not None
    assert is_finite(saved.server)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert len(text) < 20_000
    records = [strict(line) for line in text.splitlines()]
    assert all(line.isprintable() for line in text.splitlines())
    assert all(why.isprintable() for record in records for why in record["left_out"].values())
    return records


def check_left_out(result: Result, tmp_path: Path, why: str) -> None:
    """The liar is named and left out of its round; the others go on, and it may come back."""
    records = check_sound(result, tmp_path)
    assert [sorted(record["left_out"]) for record in records] == [[], [str(LIAR)], []]
    text = records[1]["left_out"][str(LIAR)]
    assert text.startswith(f"the reply of node n{LIAR} was refused: ")
    assert why in text


def with_tensors(prefix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    return lambda reply: replace(
        reply, tensors={name: change(t) if name.startswith(prefix) else t for name, t in reply.tensors.items()}
    )


def with_values(**values: Any) -> Lie:
    return lambda reply: replace(reply, values={**reply.values, **values})


# ---------------------------------------------------------------- poison


POISON = [(value, "its part of fc1.weight is up to") for value in (1e300, -1e300, 1e42)]


@pytest.mark.parametrize(("value", "why"), [*POISON, (float("inf"), "not finite"), (float("nan"), "not finite")])
def test_a_number_that_no_weight_can_be_does_not_poison_the_model(value: float, why: str, tmp_path: Path) -> None:
    result = lies(tmp_path, TRAIN, with_tensors("part/fc1.weight", lambda t: torch.full_like(t, value)), "fedper")
    check_left_out(result, tmp_path, why)


def test_what_its_samples_make_of_it_counts(tmp_path: Path) -> None:
    """1e39 over a few dozen samples would fit single precision; the bound is on the weight, not on the sum."""
    result = lies(tmp_path, TRAIN, with_tensors("part/fc1.weight", lambda t: torch.full_like(t, 4e38 * 30)), "fedper")
    check_left_out(result, tmp_path, "more than its type can hold")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.full_like(t, 1e300),
        lambda t: -t.abs() - 1,
        lambda t: torch.full_like(t, 1e79),
    ],
)
def test_moments_that_no_weights_have_are_left_out(change: Any, tmp_path: Path) -> None:
    result = lies(tmp_path, TRAIN, with_tensors("sums/fc1/products", change))
    check_left_out(result, tmp_path, "its moments of layer fc1 are not those of any weights in single precision")


def test_a_total_that_its_squares_do_not_allow_is_left_out(tmp_path: Path) -> None:
    result = lies(tmp_path, TRAIN, with_tensors("sums/fc1/total", lambda t: t + 1e6))
    check_left_out(result, tmp_path, "its moments of layer fc1")
    spread = lies(tmp_path / "spread", TRAIN, with_tensors("sums/fc1/squares", lambda t: t + 1), "variance")
    check_left_out(spread, tmp_path / "spread", "its spread of layer fc1")


# ---------------------------------------------------------------- sizes and scores


@pytest.mark.parametrize("samples", [2**53 - 1, 10_000_001])
def test_a_client_does_not_outweigh_all_others_by_a_number(samples: int, tmp_path: Path) -> None:
    def huge(reply: Packet) -> Packet:
        tensors = {name: t / reply.values["samples"] * samples for name, t in reply.tensors.items()}
        return replace(reply, values={**reply.values, "samples": samples}, tensors=tensors)

    result = lies(tmp_path, TRAIN, huge, "fedavg")
    check_left_out(result, tmp_path, f"it says {samples} samples; at most 10000000 are allowed ([deploy] most_samples)")


def test_a_client_has_about_as_many_samples_as_it_said_at_first() -> None:
    limits = wire.Limits(announced={3: 40})
    for samples in (20, 40, 80):
        limits.check(samples, 3)
    for samples in (19, 81, 10_000_000):
        text = message(ReplyError, lambda n=samples: limits.check(n, 3))  # type: ignore[misc]
        assert text == f"it says {samples} samples, and said 40 before: it may not jump"


def score(**values: Any) -> Lie:
    def lie(reply: Packet) -> Packet:
        return replace(reply, values={"scores": {"test": {**reply.values["scores"]["test"], **values}}})

    return lie


@pytest.mark.parametrize(
    "lie",
    [
        score(loss=1e308),
        score(loss=float("nan")),
        score(loss="x" * 500_000),
        score(samples=2**53 - 1),
        score(correct=7),
        score(correct="6"),
        score(metrics={"x" * 100_000: 1.0}),
        with_values(scores={"test": {}, "\x1b[2J": {}}),
        with_values(more="y" * 500_000),
    ],
)
def test_scores_that_cannot_be_leave_no_trace_but_a_name(lie: Lie, tmp_path: Path) -> None:
    result = lies(tmp_path, EVALUATE, lie, "fedavg")
    records = check_sound(result, tmp_path)
    assert [record.get("not_tested") for record in records] == [None, [str(LIAR)], None]


@pytest.mark.parametrize("loss", [1e308, -1e308, float("inf"), "0.5", "y" * 500_000, None, [0.5], True])
def test_a_training_loss_that_is_none_never_reaches_a_record(loss: Any, tmp_path: Path) -> None:
    check_left_out(lies(tmp_path, TRAIN, with_values(loss=loss), "fedavg"), tmp_path, "$.loss")


def test_the_largest_losses_that_are_allowed_have_a_finite_mean(tmp_path: Path) -> None:
    result = lies(tmp_path, TRAIN, with_values(loss=3.4e38), "fedavg")
    assert check_sound(result, tmp_path)[1]["left_out"] == {}


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize(
    "problem", ["z" * 900_000, "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe", ["a"] * 1000, {"a": {"b": 3}}, 7]
)
def test_what_a_client_says_of_its_failure_is_one_short_printable_line(problem: Any, tmp_path: Path) -> None:
    result = lies(tmp_path, TRAIN, lambda reply: Packet({"problem": problem}), "fedavg")
    records = check_sound(result, tmp_path)
    text = records[1]["left_out"][str(LIAR)]
    assert 0 < len(text) <= 200
    assert text.isprintable()


def test_markup_of_a_client_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lie = lambda reply: Packet({"problem": "[/bold] [conceal]all is well"})  # noqa: E731
    lies(tmp_path, TRAIN, lie, "fedavg")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "round 2 went without 1 ([/bold] [conceal]all is well)" in " ".join(capsys.readouterr().out.split())


def test_a_kind_of_refusal_has_the_servers_words(tmp_path: Path) -> None:
    lie = lambda reply: Packet({"problem": "\x1b[31mPAY", "kind": "round"})  # noqa: E731
    records = check_sound(lies(tmp_path, TRAIN, lie, "fedavg"), tmp_path)
    assert records[1]["left_out"] == {str(LIAR): f"it refused: {wire.REFUSALS['round']}"}


def test_names_of_tensors_do_not_get_into_a_record_unseen(tmp_path: Path) -> None:
    lie = lambda reply: replace(reply, tensors={**reply.tensors, "\x1b[2J" + "n" * 5000: torch.zeros(1)})  # noqa: E731
    check_left_out(lies(tmp_path, TRAIN, lie, "fedavg"), tmp_path, "its part has other tensors than the shared ones")


def test_a_message_has_a_size(tmp_path: Path) -> None:
    text, data = Packet({"loss": "x" * 20_000_000}).pack()
    assert message(ReplyError, lambda: Packet.unpack(text, data)).endswith("at most 1048576 are allowed")
    run = deployment("fedavg")
    asked: list[int] = []

    class Counting(Loopback):
        def exchange(self, requests: Any, *, most: int = 0) -> Any:
            asked.append(most)
            return super().exchange(requests, most=most)

    session(run, Counting(nodes(run, tmp_path))).drive()
    weights = 12 * 10 + 10 + 10 * 3 + 3
    assert set(asked) == {8 * weights + wire.HEADER}
    large = Packet({}, {"a": torch.zeros(asked[0] // 4 + 1)}).pack()
    assert "bytes of tensors; at most" in message(ReplyError, lambda: Packet.unpack(*large, asked[0]))


# ---------------------------------------------------------------- replies to something else


@pytest.mark.parametrize("method", ["fedavg", "fedfac"])
def test_a_reply_of_an_earlier_round_does_not_count_again(method: str, tmp_path: Path) -> None:
    earlier: dict[str, Packet] = {}

    def replay(client: int, request: Request, reply: Packet) -> Packet:
        if client != LIAR or request.action != TRAIN:
            return reply
        earlier.setdefault(request.action, reply)
        return earlier[request.action] if request.round == 2 else reply

    run = deployment(method, train__cohort=CLIENTS)
    result = over_the_wire(run, tmp_path / "nodes", replay, out=tmp_path / "run")
    check_left_out(result, tmp_path, "it answers another request: '0123456789abcdef/1/train/1/")


def test_a_reply_of_somebody_else_does_not_count(tmp_path: Path) -> None:
    seen: dict[int, Packet] = {}

    def borrow(client: int, request: Request, reply: Packet) -> Packet:
        if (request.round, request.action) == (2, TRAIN):
            seen[client] = reply  # requests go out from the last client to the first
            return seen[3] if client == LIAR else reply
        return reply

    run = deployment("fedavg", train__cohort=CLIENTS)
    result = over_the_wire(run, tmp_path / "nodes", borrow, out=tmp_path / "run")
    check_left_out(result, tmp_path, "it answers another request: '0123456789abcdef/2/train/3/")


# ---------------------------------------------------------------- hello


def hello(name: str = "north", **values: Any) -> Packet:
    return Packet({"name": name, "shape": [3], "classes": 2, "samples": 5, **values})


@pytest.mark.parametrize(
    "packet",
    [
        hello("a\x1b[2J"),
        hello("a\u202eb"),
        hello("a\nb"),
        hello(" a"),
        hello("n" * 101),
        hello(classes=10**9),
        hello(classes="2"),
        hello(samples=2**53 - 1),
        hello(samples=0),
        hello(shape=[2**40]),
        hello(shape=[2**13, 2**14]),
        hello(shape=[1] * 9),
        hello(more=1),
    ],
)
def test_a_node_that_cannot_be_is_not_taken_in(packet: Packet) -> None:
    text = message(ReplyError, lambda: wire.read_hello(Packet.unpack(*packet.pack())))
    assert text.isprintable()
    assert len(text) < 300


@pytest.mark.parametrize("name", ["²", "٣", "½", "0" * 100, "9" * 100, "[bold]", "[/]", "é"])
def test_a_name_is_a_name_and_a_number_only_in_ascii_digits(name: str) -> None:
    found = wire.read_hello(Packet.unpack(*hello(name).pack()))
    names, _, _ = roster_of({"10": Hello("10", (3,), 2, 5), name: found, "2": Hello("2", (3,), 2, 5)})
    assert sorted(names) == sorted(["10", "2", name])
    assert names.index("2") < names.index("10")


def test_a_run_does_not_start_with_nodes_that_refuse_it() -> None:
    there = {name: Hello(name, (3,), 2, 5, refuses) for name, refuses in (("a", None), ("b", "measure"), ("c", None))}
    text = message(RunError, lambda: roster_of(there))
    assert text.startswith("1 of 3 nodes refuse this run (b): its owner has not agreed to be measured")
    assert "fedfac-plus" in text
    assert text.endswith("--node-config 'share-weights=true'")
