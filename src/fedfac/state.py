"""Arithmetic on a State: a model's parameters and buffers by name.

Tied parameters appear once, under their first name; buffers that the module does not save are not state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedfac.errors import ModelError, RunError
from fedfac.limits import check_memory

State = dict[str, Tensor]


def references(model: nn.Module) -> State:
    """The model's own tensors by name: writing into them changes the model."""
    saved = set(model.state_dict())
    state = {name: p.detach() for name, p in model.named_parameters()}
    state |= {name: b for name, b in model.named_buffers() if name in saved}
    return state


def state_of(model: nn.Module) -> State:
    """A copy of the model's state."""
    return clone(references(model))


@torch.no_grad()
def clone(state: Mapping[str, Tensor]) -> State:
    """A deep copy."""
    copied = {name: torch.empty_like(t) for name, t in state.items()}
    copy_into(copied, state)
    return copied


@torch.no_grad()
def copy_into(target: State, source: Mapping[str, Tensor]) -> None:
    """Write ``source`` into ``target`` in place, by name; tensors that ``source`` lacks stay."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, tensor in source.items():
        if target[name] is not tensor:
            kinds.setdefault((target[name].dtype, tensor.dtype), []).append(name)
    for names in kinds.values():  # one call for all of a kind: on a GPU a launch costs more than the copy
        torch._foreach_copy_([target[name] for name in names], [source[name] for name in names])


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write a whole state into a model; names and shapes must agree."""
    own = references(model)
    check_same_tensors(own, state)
    copy_into(own, state)


def check_same_tensors(model: Mapping[str, Tensor], checkpoint: Mapping[str, Tensor]) -> None:
    """Fail with the names that differ unless both states have the same tensors of the same shapes."""
    common = model.keys() & checkpoint.keys()
    if not common:
        raise ModelError(
            f"the model has no parameters in common with the checkpoint: the model has {_few(model)}, "
            f"the checkpoint {_few(checkpoint)}. Build the model that the run was started with."
        )
    problems = [f"missing from the checkpoint: {_few(model.keys() - common)}"] if model.keys() - common else []
    if checkpoint.keys() - common:
        problems.append(f"unknown to the model: {_few(checkpoint.keys() - common)}")
    problems += [
        f"{name} is {tuple(model[name].shape)} in the model and {tuple(checkpoint[name].shape)} in the checkpoint"
        for name in sorted(common)
        if model[name].shape != checkpoint[name].shape
    ][:3]
    if problems:
        raise ModelError(
            f"the model does not fit the checkpoint: {'; '.join(problems)}. "
            "Build the model that the run was started with."
        )


def is_finite(state: Mapping[str, Tensor]) -> bool:
    """Whether no tensor holds an infinity or a NaN; a GPU is waited for once."""
    tensors = [t for t in state.values() if t.is_floating_point() and t.numel()]
    if not tensors:
        return True
    largest = torch._foreach_norm(tensors, float("inf"))
    if any(value.dtype != largest[0].dtype for value in largest):
        largest = tuple(value.double() for value in largest)
    return bool(torch.isfinite(torch.stack(list(largest))).all())


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bitwise equality, names included."""
    return a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def numel(state: Mapping[str, Tensor]) -> int:
    """How many numbers the state holds."""
    return sum(t.numel() for t in state.values())


def nbytes(state: Mapping[str, Tensor]) -> int:
    """How many bytes its numbers take."""
    return sum(t.numel() * t.element_size() for t in state.values())


def to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """The state as safetensors bytes: no code can hide in them."""
    return save({name: t.detach().cpu().contiguous() for name, t in state.items()})


def from_bytes(data: bytes) -> State:
    """The inverse of :func:`to_bytes`."""
    try:
        return load(data)
    except (SafetensorError, KeyError, RuntimeError, ValueError, TypeError) as error:  # types and shapes of no tensor
        raise RunError(f"these {len(data)} bytes are not a whole safetensors state: {error}") from error


def from_file(path: Path) -> State:
    """The state in a file; OSError as it comes."""
    check_memory(path.stat().st_size, str(path), RunError)
    return from_bytes(path.read_bytes())


def digest(data: bytes) -> str:
    """A short checksum of stored bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _few(names: object) -> str:
    listed = sorted(names)  # type: ignore[call-overload]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
