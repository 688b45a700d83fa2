"""Split: for every tensor of a state, shared by all, personal to a client, or decided element by element.

This is the decomposition W_c = {W^s, W_c^p} of paper 3.1. A Split is a value: immutable, total over the
state, comparable, printable, and saved as JSON. ``shared`` and ``personal`` cut a state into two disjoint
parts (of a masked tensor, a part holds only its own numbers, in one row), ``compose`` puts them together::

    split.compose(split.shared(state), split.personal(state)) == state
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedfac.anatomy import Anatomy, Layer, Rows
from fedfac.errors import ConfigError, ModelError, RunError
from fedfac.limits import reason
from fedfac.state import State

CPU = torch.device("cpu")
Mask = tuple[bool, ...]
NORM_OPTIONS = ("follow", "shared", "personal")


@dataclass(frozen=True)
class Change:
    """How the masks of one layer differ between two splits."""

    to_shared: tuple[int, ...]
    to_personal: tuple[int, ...]
    elements: int

    @property
    def kept(self) -> float:
        """The share of elements that kept their side (paper 4.3.2)."""
        return 1 - (len(self.to_shared) + len(self.to_personal)) / self.elements


@dataclass(frozen=True, eq=False)
class Split:
    """Where every number of a state lives.

    ``shapes`` names every tensor. One in ``owners`` is decided by the mask of a layer (True = shared); one in
    ``personal_tensors`` is wholly personal; every other one is wholly shared. ``anew``: what the masks call personal is
    trained by all as well, and a client has its own of it only while it predicts, made anew from the server's (by a
    phase that trains ``PERSONAL``).
    """

    shapes: Mapping[str, tuple[int, ...]]
    personal_tensors: frozenset[str] = frozenset()
    owners: Mapping[str, tuple[str, Rows]] = field(default_factory=dict)
    masks: Mapping[str, Mask] = field(default_factory=dict)
    anew: bool = False

    def __post_init__(self) -> None:
        unknown = (self.personal_tensors | self.owners.keys()) - self.shapes.keys()
        if unknown:
            raise ConfigError(f"the split places tensors that the state does not have: {sorted(unknown)}")
        twice = self.personal_tensors & self.owners.keys()
        if twice:
            raise ConfigError(f"the split places tensors both as a whole and by element: {sorted(twice)}")
        named = {layer for layer, _ in self.owners.values()}
        if named != set(self.masks):
            raise ConfigError(f"the split has masks for {sorted(self.masks)}, its tensors name {sorted(named)}")
        for name in ("shapes", "owners", "masks"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @classmethod
    def of(
        cls,
        anatomy: Anatomy,
        *,
        layers: Iterable[Layer] = (),
        personal: Iterable[str] = (),
        norm: str = "follow",
    ) -> Split:
        """The split in which ``layers`` are decided by element (all shared at first) and ``personal``
        tensors are personal. ``norm`` says what the normalisation after a decided layer does: ``follow``
        its elements, or be ``shared`` or ``personal`` as a whole.
        """
        if norm not in NORM_OPTIONS:
            raise ConfigError(f"norm is {norm!r}; allowed: {', '.join(NORM_OPTIONS)}")
        whole = set(personal)
        owners: dict[str, tuple[str, Rows]] = {}
        masks: dict[str, Mask] = {}
        for layer in layers:
            rows = [*layer.weights, *layer.biases, *(layer.norm if norm == "follow" else ())]
            if norm == "personal":
                whole |= {r.tensor for r in layer.norm} | set(layer.norm_rest)
            owners |= {r.tensor: (layer.name, r) for r in rows if r.tensor not in whole}
            masks[layer.name] = (True,) * layer.elements
        masks = {name: mask for name, mask in masks.items() if any(name == layer for layer, _ in owners.values())}
        return cls(anatomy.shapes, frozenset(whole), owners, masks)

    def with_masks(self, masks: Mapping[str, Sequence[bool]]) -> Split:
        """The same split with other masks for some of its layers."""
        for layer, mask in masks.items():
            if layer not in self.masks or len(mask) != len(self.masks[layer]):
                known = {name: len(own) for name, own in self.masks.items()}
                raise ConfigError(f"a mask of {len(mask)} elements for layer {layer!r}; the split has {known}")
        new = {name: tuple(bool(b) for b in masks.get(name, own)) for name, own in self.masks.items()}
        return replace(self, masks=new)

    def place(self, tensor: str) -> str:
        """``"shared"``, ``"personal"`` or ``"by element"``."""
        if tensor not in self.shapes:
            raise ModelError(f"the split knows no tensor {tensor!r}")
        if tensor in self.owners:
            return "by element"
        return "personal" if tensor in self.personal_tensors else "shared"

    @property
    def kept(self) -> frozenset[str]:
        """The tensors that a client keeps: every one that is not shared as a whole."""
        return frozenset(self.personal_tensors).union(self.cut)

    @cached_property
    def own(self) -> frozenset[str]:
        """The tensors of which some numbers are a client's own: of those that are decided by element, not all are."""
        split = (name for name in self.owners if not all(self._sides(name)))
        return frozenset(self.personal_tensors).union(split)

    @cached_property
    def cut(self) -> frozenset[str]:
        """The tensors of which the server gets some numbers, and not the others."""
        return frozenset() if self.anew else frozenset(self.owners)

    @cached_property
    def mixed(self) -> frozenset[str]:
        """The tensors of which some numbers are shared and some personal."""
        return frozenset(name for name in self.owners if len(set(self._sides(name))) > 1)

    def _sides(self, tensor: str) -> Mask:
        """On which side the elements are that own the tensor's numbers."""
        layer, rows = self.owners[tensor]
        return self.masks[layer][rows.first : rows.first + rows.count]

    def mask(self, tensor: str, device: torch.device = CPU) -> Tensor:
        """True where the tensor's numbers are shared, in the tensor's full shape."""
        if tensor in self.owners:
            return self._masks_on(device)[tensor].clone()
        return torch.full(self.shapes[tensor], self.place(tensor) == "shared", device=device)

    def _masks_on(self, device: torch.device) -> dict[str, Tensor]:
        """Every masked tensor's mask in its full shape; made once for a device."""
        if device not in self._made:
            bits = {layer: torch.tensor(mask, device=device) for layer, mask in self.masks.items()}
            self._made[device] = {
                tensor: rows.spread(bits[layer], self.shapes[tensor]).expand(self.shapes[tensor])
                for tensor, (layer, rows) in self.owners.items()
            }
        return self._made[device]

    @cached_property
    def _made(self) -> dict[torch.device, dict[str, Tensor]]:
        return {}

    def _places_on(self, device: torch.device, *, want: bool) -> dict[str, tuple[Any, list[int]]]:
        """By masked tensor, the index of its shared (or personal) numbers, and the shape in which they come.

        Whole slices, where elements own such: a GPU need not be asked how many there are. Made once for a device.
        """
        key = (device, want)
        if key not in self._places:
            found: dict[str, tuple[Any, list[int]]] = {}
            for tensor, (_, rows) in self.owners.items():
                if rows.groups > 1:
                    found[tensor] = self._masks_on(device)[tensor] == want, [-1]
                    continue
                along = [i for i, flag in enumerate(self._sides(tensor) * rows.tiles) if flag is want]
                shape = [-1 if d == rows.dim else size for d, size in enumerate(self.shapes[tensor])]
                index = torch.tensor(along, dtype=torch.int64).to(device, non_blocking=True)
                found[tensor] = (*(slice(None),) * rows.dim, index), shape
            self._places[key] = found
        return self._places[key]

    @cached_property
    def _places(self) -> dict[tuple[torch.device, bool], dict[str, tuple[Any, list[int]]]]:
        return {}

    def shared(self, state: Mapping[str, Tensor]) -> State:
        """The shared part, which the server gets: whole tensors, and of those that are cut the shared numbers only."""
        return self._part(state, want=True)

    def personal(self, state: Mapping[str, Tensor]) -> State:
        """The personal part, the rest of the state."""
        return self._part(state, want=False)

    def _part(self, state: Mapping[str, Tensor], *, want: bool) -> State:
        part = {}
        for name, tensor in state.items():
            if name in self.cut:
                place, _ = self._places_on(tensor.device, want=want)[name]
                part[name] = tensor[place].reshape(-1)
            elif (name not in self.personal_tensors) is want:
                part[name] = tensor
        return part

    def compose(self, shared: Mapping[str, Tensor], personal: Mapping[str, Tensor]) -> State:
        """The whole state from its two parts."""
        state = {}
        for name, shape in self.shapes.items():
            if name in self.cut:
                tensor = torch.empty(shape, dtype=shared[name].dtype, device=shared[name].device)
                for part, want in ((shared, True), (personal, False)):
                    place, sizes = self._places_on(tensor.device, want=want)[name]
                    tensor[place] = part[name].reshape(sizes)
                state[name] = tensor
            else:
                state[name] = (personal if name in self.personal_tensors else shared)[name]
        return state

    def overlay(self, server: State, own: Mapping[str, Tensor] | None) -> State:
        """A client's model: shared numbers from the server, personal ones from what the client kept.

        ``own`` holds whole tensors, as the client last trained them; a client that has none yet gets the
        server's values (it starts from the common point).
        """
        if not own:
            return dict(server)
        state = dict(server)
        for name in self.kept & own.keys():
            mine = own[name].to(server[name].device)
            if name in self.owners:
                state[name] = torch.where(self._masks_on(mine.device)[name], server[name], mine)
            else:
                state[name] = mine
        return state

    def diff(self, before: Split) -> dict[str, Change]:
        """By layer, which elements changed sides since ``before``."""
        changes = {}
        for layer, mask in self.masks.items():
            old = before.masks.get(layer, mask)
            pairs = list(zip(old, mask, strict=True))
            changes[layer] = Change(
                to_shared=tuple(j for j, (was, now) in enumerate(pairs) if now and not was),
                to_personal=tuple(j for j, (was, now) in enumerate(pairs) if was and not now),
                elements=len(mask),
            )
        return changes

    @property
    def shared_share(self) -> float:
        """The share of shared elements among those decided by element; without any, of all numbers."""
        if self.masks:
            elements = [flag for mask in self.masks.values() for flag in mask]
            return sum(elements) / len(elements)
        sizes = {name: torch.Size(shape).numel() for name, shape in self.shapes.items()}
        return sum(n for name, n in sizes.items() if name not in self.personal_tensors) / sum(sizes.values())

    def shared_numel(self) -> int:
        """How many values are shared; a client sends them in a round, and what the rule measures."""
        return sum(
            int(self._masks_on(CPU)[name].sum()) if name in self.cut else torch.Size(shape).numel()
            for name, shape in self.shapes.items()
            if name not in self.personal_tensors
        )

    def to_json(self) -> str:
        """The whole split as JSON text."""
        return json.dumps(
            {
                "shapes": {name: list(shape) for name, shape in self.shapes.items()},
                "personal": sorted(self.personal_tensors),
                "owners": {name: {"layer": layer, **asdict(rows)} for name, (layer, rows) in self.owners.items()},
                "masks": {layer: mask_text(mask) for layer, mask in self.masks.items()},
                **({"anew": True} if self.anew else {}),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Split:
        """The inverse of :meth:`to_json`."""
        try:
            data: dict[str, Any] = json.loads(text)
            owners = {}
            for name, entry in data["owners"].items():
                layer = entry.pop("layer")
                owners[name] = (layer, Rows(**entry))
            return cls(
                {name: tuple(shape) for name, shape in data["shapes"].items()},
                frozenset(data["personal"]),
                owners,
                {layer: mask_of(mask) for layer, mask in data["masks"].items()},
                data.get("anew", False),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"the split cannot be used: {reason(error)}") from error

    def _key(self) -> tuple[object, ...]:
        return (
            frozenset(self.shapes.items()),
            self.personal_tensors,
            frozenset(self.owners.items()),
            frozenset(self.masks.items()),
            self.anew,
        )

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and self._key() == other._key()

    def __reduce__(self) -> tuple[Any, ...]:
        return Split.from_json, (self.to_json(),)

    def __str__(self) -> str:
        lines = []
        for layer, mask in self.masks.items():
            lines.append(f"{layer}: {sum(mask)} of {len(mask)} elements shared  {mask_text(mask, '█', '░')}")
        if self.anew and self.masks:
            lines.append("the others are trained by all, too: a client makes its own of them when it predicts")
        if self.personal_tensors:
            lines.append(f"personal: {', '.join(sorted(self.personal_tensors))}")
        whole = [name for name in self.shapes if name not in self.kept]
        lines.append(f"shared: {', '.join(whole) if whole else 'nothing as a whole'}")
        return "\n".join(lines)


def mask_text(mask: Sequence[bool], shared: str = "1", personal: str = "0") -> str:
    """A mask as a line of text.

    >>> mask_text((True, False, True))
    '101'
    """
    return "".join(shared if flag else personal for flag in mask)


def mask_of(text: str) -> Mask:
    """The inverse of :func:`mask_text`."""
    return tuple(c == "1" for c in text)
