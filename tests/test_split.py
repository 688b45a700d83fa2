"""Where every number lives: the laws of cutting and composing, and hand-made examples."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bitwise, counted, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedfac.anatomy import Anatomy, Rows
from fedfac.errors import ConfigError, ModelError
from fedfac.split import Change, Split, mask_of, mask_text
from fedfac.state import State, state_of

MODELS: dict[str, nn.Module] = {
    "convolutional": nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 8), nn.Linear(8, 3)
    ),
    "transposed, in groups": nn.Sequential(
        nn.ConvTranspose2d(4, 6, 2, groups=2), nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4)
    ),
    "recurrent": nn.Sequential(
        nn.Embedding(7, 3), nn.LSTM(3, 4, 2, bidirectional=True), nn.LayerNorm(8), nn.Linear(8, 5)
    ),
}
LAWS = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def random_split(model: nn.Module, seed: int) -> Split:
    """Some layers by element with random masks, some tensors personal, any treatment of the normalisation."""
    draws = np.random.default_rng(seed)
    anatomy = Anatomy.of(model)
    layers = [layer for layer in anatomy.layers if draws.random() < 0.7]
    personal = [name for name in anatomy.shapes if draws.random() < 0.2]
    split = Split.of(
        anatomy, layers=layers, personal=personal, norm=["follow", "shared", "personal"][draws.integers(3)]
    )
    return split.with_masks(
        {name: (draws.random(len(mask)) < draws.random()).tolist() for name, mask in split.masks.items()}
    )


def numbers(state: State) -> list[float]:
    return [float(x) for t in state.values() for x in t.flatten()]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@LAWS
@given(seed=SEEDS)
def test_the_two_parts_make_up_the_state_bit_by_bit(model: nn.Module, seed: int) -> None:
    split = random_split(model, seed)
    state = state_of(model)
    composed = split.compose(split.shared(state), split.personal(state))
    assert bitwise(composed, state)
    assert list(composed) == list(state)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@LAWS
@given(seed=SEEDS)
def test_every_number_is_in_exactly_one_part(model: nn.Module, seed: int) -> None:
    split = random_split(model, seed)
    state = counted(split.shapes)
    shared, personal = numbers(split.shared(state)), numbers(split.personal(state))
    assert sorted(shared + personal) == numbers(state)
    assert split.shared_numel() == len(shared)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@LAWS
@given(seed=SEEDS)
def test_a_number_is_shared_where_the_mask_says_so(model: nn.Module, seed: int) -> None:
    split = random_split(model, seed)
    state = counted(split.shapes)
    shared = set(numbers(split.shared(state)))
    for name, tensor in state.items():
        is_shared = [float(x) in shared for x in tensor.flatten()]
        if split.place(name) == "by element":
            assert split.mask(name).shape == tensor.shape
            assert split.mask(name).flatten().tolist() == is_shared
        else:
            assert is_shared == [split.place(name) == "shared"] * tensor.numel()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@LAWS
@given(seed=SEEDS)
def test_overlay_takes_shared_numbers_from_the_server_and_personal_ones_from_the_client(
    model: nn.Module, seed: int
) -> None:
    split = random_split(model, seed)
    server = counted(split.shapes)
    own = counted(split.shapes, start=10**6)
    personal = set(numbers(split.personal(server)))
    wanted = {name: t.clone().apply_(lambda x: x + 10**6 if x in personal else x) for name, t in server.items()}
    assert bitwise(split.compose(split.shared(server), split.personal(own)), wanted)
    assert bitwise(split.overlay(server, own), wanted)
    assert bitwise(split.overlay(server, {name: own[name] for name in split.kept}), wanted)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@LAWS
@given(seed=SEEDS)
def test_json_brings_a_split_back(model: nn.Module, seed: int) -> None:
    split = random_split(model, seed)
    back = Split.from_json(split.to_json())
    assert back == split
    assert hash(back) == hash(split)
    state = counted(split.shapes)
    assert bitwise(back.shared(state), split.shared(state))
    assert bitwise(back.personal(state), split.personal(state))


# --- one example by hand -------------------------------------------------------------------------------------------


def example(norm: str = "follow", personal: tuple[str, ...] = ()) -> Split:
    """Layer 1 (six channels and their normalisation) by element: channels 1 and 5 are personal."""
    anatomy = Anatomy.of(MODELS["convolutional"])
    split = Split.of(anatomy, layers=[anatomy.layer(1)], personal=personal, norm=norm)
    return split.with_masks({"0": [True, False, True, True, True, False]})


NORM = ("1.weight", "1.bias", "1.running_mean", "1.running_var")


def test_a_personal_channel_keeps_its_kernel_bias_and_normalisation() -> None:
    split, state = example(), state_of(MODELS["convolutional"])
    personal, shared = split.personal(state), split.shared(state)
    assert set(personal) == {"0.weight", "0.bias", *NORM}
    for name in personal:
        assert torch.equal(personal[name], state[name][[1, 5]].flatten())
        assert torch.equal(shared[name], state[name][[0, 2, 3, 4]].flatten())
    assert set(shared) == set(state)
    assert split.place("1.num_batches_tracked") == "shared"


def test_the_normalisation_can_be_shared_or_personal_as_a_whole() -> None:
    assert {example("shared").place(name) for name in NORM} == {"shared"}
    personal = example("personal")
    assert {personal.place(name) for name in (*NORM, "1.num_batches_tracked")} == {"personal"}
    assert personal.place("0.weight") == "by element"
    assert personal.place("3.weight") == "shared"


def test_a_personal_tensor_of_a_decided_layer_is_personal_as_a_whole() -> None:
    split = example(personal=("0.bias", "3.weight"))
    assert split.place("0.bias") == split.place("3.weight") == "personal"
    assert split.place("0.weight") == "by element"
    assert split.kept == {"0.weight", "0.bias", "3.weight", *NORM}


def test_a_layer_whose_tensors_are_all_personal_needs_no_mask() -> None:
    anatomy = Anatomy.of(MODELS["convolutional"])
    split = Split.of(anatomy, layers=[anatomy.head], personal=["4.weight", "4.bias"])
    assert dict(split.masks) == {}
    assert split.kept == {"4.weight", "4.bias"}


def test_what_a_split_names_can_be_a_key() -> None:
    """A GPU lane keeps its recorded steps by the set of tensors that they train."""
    for split in (example(), example(personal=("3.weight",)), dataclasses.replace(example(), anew=True)):
        assert {split.own: 1, split.kept: 2, split.mixed: 3}


def test_a_new_split_shares_everything() -> None:
    anatomy = Anatomy.of(MODELS["convolutional"])
    split = Split.of(anatomy, layers=anatomy.layers)
    state = state_of(MODELS["convolutional"])
    assert split.shared_share == 1
    assert split.shared_numel() == sum(t.numel() for t in state.values())
    assert numbers(split.personal(state)) == []
    assert Split.of(anatomy).kept == frozenset()


def test_shared_share_counts_elements_or_numbers() -> None:
    assert example().shared_share == 4 / 6
    anatomy = Anatomy.of(nn.Linear(3, 2))
    assert Split.of(anatomy, personal=["bias"]).shared_share == 6 / 8
    assert Split.of(anatomy, personal=["bias", "weight"]).shared_share == 0


def test_other_masks_leave_the_old_split_alone() -> None:
    anatomy = Anatomy.of(MODELS["convolutional"])
    split = Split.of(anatomy, layers=anatomy.select([1, 2]))
    new = split.with_masks({"0": [False] * 6})
    assert split.masks["0"] == (True,) * 6
    assert new.masks["0"] == (False,) * 6
    assert new.masks["3"] == (True,) * 8
    assert new != split
    assert new.with_masks({"0": [True] * 6}) == split


def test_a_client_without_values_of_its_own_gets_the_server_s() -> None:
    server = counted(example().shapes)
    nothing: list[State | None] = [None, {}]
    for own in nothing:
        made = example().overlay(server, own)
        assert made.keys() == server.keys()
        assert all(made[name] is server[name] for name in server)


def test_overlay_takes_from_the_server_what_the_client_does_not_have() -> None:
    split = example()
    server, own = counted(split.shapes), counted(split.shapes, start=10**6)
    made = split.overlay(server, {"0.bias": own["0.bias"]})
    assert made["0.bias"].tolist() == [(own if j in (1, 5) else server)["0.bias"][j].item() for j in range(6)]
    assert torch.equal(made["0.weight"], server["0.weight"])


def test_overlay_and_compose_change_neither_server_nor_client() -> None:
    split = example(personal=("3.bias",))
    server, own = counted(split.shapes), counted(split.shapes, start=10**6)
    split.overlay(server, own)
    split.compose(split.shared(server), split.personal(own))
    assert bitwise(server, counted(split.shapes))
    assert bitwise(own, counted(split.shapes, start=10**6))


def test_diff_says_which_elements_changed_sides() -> None:
    before = example()
    after = before.with_masks({"0": [True, True, False, True, False, False]})
    change = after.diff(before)["0"]
    assert change == Change(to_shared=(1,), to_personal=(2, 4), elements=6)
    assert change.kept == 0.5
    assert before.diff(after)["0"] == Change(to_shared=(2, 4), to_personal=(1,), elements=6)
    assert after.diff(after)["0"] == Change((), (), 6)
    assert after.diff(after)["0"].kept == 1


def test_a_layer_that_was_not_decided_before_has_not_changed() -> None:
    before = Split.of(Anatomy.of(MODELS["convolutional"]))
    assert example().diff(before) == {"0": Change((), (), 6)}


def test_a_split_prints_its_masks_and_places() -> None:
    assert str(example(personal=("4.weight", "4.bias"))) == (
        "0: 4 of 6 elements shared  █░███░\npersonal: 4.bias, 4.weight\nshared: 3.weight, 3.bias, 1.num_batches_tracked"
    )
    assert str(Split.of(Anatomy.of(nn.Linear(1, 1)), personal=["weight", "bias"])) == (
        "personal: bias, weight\nshared: nothing as a whole"
    )


@LAWS
@given(st.lists(st.booleans(), max_size=20))
def test_the_text_of_a_mask_brings_it_back(mask: list[bool]) -> None:
    assert mask_of(mask_text(mask)) == tuple(mask)


# --- a split is a value --------------------------------------------------------------------------------------------


def test_splits_are_equal_exactly_when_they_place_everything_alike() -> None:
    assert example() == example()
    assert len({example(), example(), example("shared")}) == 2
    assert example() != example("shared")
    assert example() != example(personal=("3.bias",))
    assert example() != "a split"


def test_equality_does_not_depend_on_the_order_in_which_layers_are_named() -> None:
    anatomy = Anatomy.of(MODELS["convolutional"])
    one, two = anatomy.select([1, 2])
    a, b = Split.of(anatomy, layers=[one, two]), Split.of(anatomy, layers=[two, one])
    assert a == b
    assert hash(a) == hash(b)


def test_no_field_and_no_mapping_of_a_split_can_be_written() -> None:
    split: Any = example()
    for field in ("shapes", "personal_tensors", "owners", "masks"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(split, field, {})
    for mapping in (split.shapes, split.owners, split.masks):
        with pytest.raises(TypeError):
            mapping["0"] = ()


def test_a_split_does_not_see_later_changes_of_what_it_was_made_from() -> None:
    shapes, masks = {"w": (2, 3)}, {"l": (True, False)}
    owners = {"w": ("l", Rows("w", 2))}
    split = Split(shapes, frozenset(), owners, masks)
    text = split.to_json()
    shapes["v"] = (9,)  # type: ignore[assignment]
    masks["l"] = (False, False)
    owners.clear()
    assert split.to_json() == text


def test_writing_into_a_mask_does_not_change_the_split() -> None:
    split = example()
    before = split.shared_numel()
    split.mask("0.bias").fill_(False)
    assert split.mask("0.bias").tolist() == [True, False, True, True, True, False]
    assert split.shared_numel() == before


def test_a_split_can_be_copied() -> None:
    assert copy.deepcopy(example()) == example()


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_mask_of_another_size_or_layer_is_refused() -> None:
    split = example()
    assert message(ConfigError, lambda: split.with_masks({"0": [True] * 5})) == (
        "a mask of 5 elements for layer '0'; the split has {'0': 6}"
    )
    assert message(ConfigError, lambda: split.with_masks({"3": [True] * 8})) == (
        "a mask of 8 elements for layer '3'; the split has {'0': 6}"
    )


def test_unknown_tensors_are_refused() -> None:
    anatomy = Anatomy.of(nn.Linear(3, 2))
    assert message(ConfigError, lambda: Split.of(anatomy, personal=["wieght"])) == (
        "the split places tensors that the state does not have: ['wieght']"
    )
    assert message(ModelError, lambda: Split.of(anatomy).place("wieght")) == "the split knows no tensor 'wieght'"


def test_a_tensor_has_one_place() -> None:
    owners = {"w": ("l", Rows("w", 2))}
    assert message(ConfigError, lambda: Split({"w": (2,)}, frozenset({"w"}), owners, {"l": (True, True)})) == (
        "the split places tensors both as a whole and by element: ['w']"
    )


def test_masks_and_owners_must_name_the_same_layers() -> None:
    owners = {"w": ("l", Rows("w", 2))}
    assert message(ConfigError, lambda: Split({"w": (2,)}, frozenset(), owners, {"k": (True, True)})) == (
        "the split has masks for ['k'], its tensors name ['l']"
    )


def test_an_unknown_treatment_of_the_normalisation_is_refused() -> None:
    assert message(ConfigError, lambda: example("folow")) == ("norm is 'folow'; allowed: follow, shared, personal")
