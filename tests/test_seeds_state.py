"""Random streams are pure functions of their ids; states are compared, written and read bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import bits, bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfac.errors import ModelError, RunError
from fedfac.seeds import generator, global_stream, key, stream
from fedfac.state import (
    check_same_tensors,
    clone,
    copy_into,
    digest,
    from_bytes,
    is_finite,
    load_state,
    numel,
    references,
    same,
    state_of,
    to_bytes,
)

IDS = st.lists(st.integers() | st.text(max_size=4), max_size=3)
PLACES = st.tuples(st.integers(), st.text(max_size=6), IDS)


@settings(max_examples=100, deadline=None)
@given(PLACES, PLACES)
def test_keys_are_equal_exactly_when_all_arguments_are(
    a: tuple[int, str, list[int | str]], b: tuple[int, str, list[int | str]]
) -> None:
    assert (key(a[0], a[1], *a[2]) == key(b[0], b[1], *b[2])) == (a == b)


def test_a_key_tells_numbers_from_texts_and_one_id_from_two() -> None:
    keys = [key(0, "p", 1), key(0, "p", "1"), key(0, "p", 1, 1), key(0, "p", 11), key(1, "p", 1), key(0, "p1")]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k < 2**128 for k in keys)


def test_streams_stay_what_they_were_so_that_old_runs_can_be_resumed() -> None:
    assert stream(0, "cohort", 3).integers(1000, size=4).tolist() == [168, 133, 963, 914]
    assert torch.randint(1000, (4,), generator=generator(7, "noise", 1, 2)).tolist() == [776, 122, 724, 288]


def test_a_stream_does_not_depend_on_other_streams_or_on_the_global_generators() -> None:
    first = stream(5, "batches", 1, 2).random(8)
    stream(5, "batches", 1, 3).random(1000)
    torch.rand(10)
    assert np.array_equal(stream(5, "batches", 1, 2).random(8), first)


def test_streams_and_generators_leave_the_global_generator_alone() -> None:
    before = torch.default_generator.get_state()
    stream(0, "x").random(3)
    torch.rand(3, generator=generator(0, "x"))
    assert torch.equal(torch.default_generator.get_state(), before)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_generator_is_a_function_of_its_ids(seed: int, one: int, two: int) -> None:
    a = torch.rand(4, generator=generator(seed, "noise", one))
    assert torch.equal(a, torch.rand(4, generator=generator(seed, "noise", one)))
    assert torch.equal(a, torch.rand(4, generator=generator(seed, "noise", two))) == (one == two)


def test_a_global_stream_draws_as_the_generator_of_the_same_ids() -> None:
    with global_stream(3, "model", "a"):
        drawn = torch.rand(5)
    assert torch.equal(drawn, torch.rand(5, generator=generator(3, "model", "a")))


def test_a_global_stream_gives_the_generator_back_also_after_an_error() -> None:
    before = torch.default_generator.get_state()

    def draw_and_fail() -> None:
        torch.rand(100)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), global_stream(3, "model"):
        draw_and_fail()
    assert torch.equal(torch.default_generator.get_state(), before)


class Tied(nn.Module):
    """Two layers with one weight, a buffer that is saved and one that is not."""

    kept: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("kept", torch.arange(2))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


def test_tied_parameters_appear_once_and_unsaved_buffers_not_at_all() -> None:
    assert set(references(Tied())) == {"a.weight", "a.bias", "b.bias", "kept"}


def test_references_are_the_model_and_a_state_is_a_copy() -> None:
    model = Tied()
    copied = state_of(model)
    references(model)["a.bias"].fill_(5)
    references(model)["kept"].fill_(6)
    assert model.a.bias.tolist() == [5, 5, 5]
    assert model.kept.tolist() == [6, 6]
    assert copied["a.bias"].tolist() != [5, 5, 5]
    assert copied["kept"].tolist() == [0, 1]


def test_a_clone_shares_no_memory() -> None:
    state = {"x": torch.zeros(2)}
    clone(state)["x"].fill_(1)
    assert state["x"].tolist() == [0, 0]


def test_copy_into_writes_in_place_by_name_and_leaves_the_rest() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    copy_into({"x": x, "y": y}, {"y": torch.ones(2)})
    assert x.tolist() == [0, 0]
    assert y.tolist() == [1, 1]


def test_a_loaded_model_holds_the_state_bit_by_bit() -> None:
    source, target = Tied(), Tied()
    load_state(target, state_of(source))
    assert bitwise(references(target), references(source))
    assert target.a.weight is target.b.weight


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    model = {f"m{i}": torch.zeros(1) for i in range(6)}
    assert message(ModelError, lambda: check_same_tensors(model, {"c": torch.zeros(1)})) == (
        "the model has no parameters in common with the checkpoint: the model has m0, m1, m2, m3 and 2 more, "
        "the checkpoint c. Build the model that the run was started with."
    )


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros(1)}
    checkpoint = {"b": torch.zeros(3, 2), "c": torch.zeros(1), "d": torch.zeros(1)}
    assert message(ModelError, lambda: check_same_tensors(model, checkpoint)) == (
        "the model does not fit the checkpoint: missing from the checkpoint: a; unknown to the model: d; "
        "b is (2, 3) in the model and (3, 2) in the checkpoint. Build the model that the run was started with."
    )


def test_a_state_that_does_not_fit_leaves_the_model_as_it_was() -> None:
    model = Tied()
    before = state_of(model)
    wrong = {**state_of(model), "a.bias": torch.zeros(4)}
    with pytest.raises(ModelError):
        load_state(model, wrong)
    assert bitwise(references(model), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_makes_a_state_not_finite(bad: float) -> None:
    state = {"n": torch.tensor([1, 2]), "x": torch.zeros(2, 2)}
    assert is_finite(state)
    state["x"][1, 1] = bad
    assert not is_finite(state)


A = {"x": torch.tensor([1.0, math.nan, 0.0]), "n": torch.tensor(3)}


def test_a_state_is_the_same_as_its_copy_even_with_a_nan() -> None:
    assert same(A, clone(A))
    assert same({}, {})


@pytest.mark.parametrize(
    "other",
    [
        {"x": A["x"]},
        {**A, "y": torch.zeros(1)},
        {"y": A["x"], "n": A["n"]},
        {**A, "n": torch.tensor(4)},
        {**A, "n": torch.tensor([3])},
    ],
)
def test_other_names_shapes_or_numbers_are_not_the_same(other: dict[str, Tensor]) -> None:
    assert not same(A, other)
    assert not same(other, A)


def test_sameness_is_bitwise() -> None:
    assert not same({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
    assert not same({"x": torch.tensor([1.0])}, {"x": torch.tensor([1.0], dtype=torch.float64)})
    assert not same({"x": torch.tensor([1.0])}, {"x": torch.tensor([1])})


def test_numel_counts_every_number() -> None:
    assert numel({"x": torch.zeros(2, 3), "n": torch.tensor(1), "e": torch.zeros(0, 5)}) == 7


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text("abc._0", min_size=1, max_size=6),
        st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(TYPES), st.integers(0, 99)),
        max_size=4,
    )
)
def test_bytes_bring_a_state_back_bit_by_bit(made: dict[str, tuple[list[int], torch.dtype, int]]) -> None:
    state = {
        name: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(kind)
        for name, (shape, kind, seed) in made.items()
    }
    assert bitwise(from_bytes(to_bytes(state)), state)


def test_bytes_keep_bad_numbers_signs_and_transposed_tensors() -> None:
    state = {"x": torch.tensor([math.nan, -0.0, math.inf]), "t": torch.arange(6.0).reshape(2, 3).T}
    assert bitwise(from_bytes(to_bytes(state)), state)


@pytest.mark.parametrize("left", [0, 5, 50, -1])
def test_bytes_that_are_not_whole_are_refused(left: int) -> None:
    data = to_bytes({"x": torch.arange(10.0)})[:left]
    text = message(RunError, lambda: from_bytes(data))
    assert text.startswith(f"these {len(data)} bytes are not a whole safetensors state: ")


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_digest_notices_every_flipped_bit(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, 8 * len(data) - 1))
    other = bytearray(data)
    other[place // 8] ^= 1 << place % 8
    assert digest(data) == digest(bytes(data))
    assert digest(data) != digest(bytes(other))


def test_the_judge_itself_sees_bits() -> None:
    assert bits(torch.tensor(0.0)) != bits(torch.tensor(-0.0))
    assert bits(torch.tensor(math.nan)) == bits(torch.tensor(math.nan))
