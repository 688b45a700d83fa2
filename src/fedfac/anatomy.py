"""Layers and hidden elements of any ``nn.Module``: who owns which numbers.

A *layer* l has d_l hidden *elements* (channels of a convolution, neurons of a fully connected layer,
units of a recurrent one). An element owns its input weights, its bias, and its entry in the normalisation
that follows the layer. The columns of the next layer that read the element belong to the next layer
(paper 3.1: the parameter set of one layer at a time).

Layers are numbered 1..L in the order in which the modules are registered; L is the head. A model may say
better than that which of its layers the paper would count, and in which order, by an attribute
``fedfac_layers``: a sequence of names (a ResNet leaves its projection shortcuts out). Layers that are not
listed keep their names and have no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedfac.errors import LayerError, ModelError, did_you_mean
from fedfac.state import references

LayerKey = int | str


@dataclass(frozen=True)
class Rows:
    """Which element owns which slices of one tensor.

    Along ``dim`` the tensor runs through the elements ``first .. first + count - 1``, ``tiles`` times over
    (four times for an LSTM's gates). A grouped transposed convolution also runs through ``groups`` blocks
    of its first dimension.
    """

    tensor: str
    count: int
    dim: int = 0
    first: int = 0
    tiles: int = 1
    groups: int = 1

    def owner(self, shape: tuple[int, ...]) -> Tensor:
        """The owning element of every number, as an integer tensor that broadcasts to ``shape``."""
        if self.groups > 1:
            block, within = shape[0] // self.groups, self.count // self.groups
            ids = (torch.arange(shape[0]) // block)[:, None] * within + torch.arange(within)[None, :]
            return ids.reshape(shape[0], within, *[1] * (len(shape) - 2))
        return self.spread(torch.arange(self.first + self.count), shape)

    def spread(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """One value for every element, as a tensor that broadcasts to ``shape``: each number gets its owner's."""
        if self.groups > 1:
            return values[self.owner(shape).to(values.device)]
        along = values[self.first : self.first + self.count].repeat(self.tiles)
        return along.reshape([-1 if d == self.dim else 1 for d in range(len(shape))])

    def vectors(self, tensor: Tensor) -> Tensor:
        """The numbers of each element as one row: (count, fan-in)."""
        if self.groups > 1:
            blocks = tensor.reshape(self.groups, tensor.shape[0] // self.groups, tensor.shape[1], -1)
            return blocks.transpose(1, 2).reshape(self.count, -1)
        rows = tensor.movedim(self.dim, 0).reshape(self.tiles, self.count, -1)
        return rows.transpose(0, 1).reshape(self.count, -1)


@dataclass(frozen=True)
class Layer:
    """One layer: its elements and the tensors in which they own rows."""

    name: str
    number: int | None
    elements: int
    kind: str
    weights: tuple[Rows, ...]
    biases: tuple[Rows, ...] = ()
    norm: tuple[Rows, ...] = ()
    norm_rest: tuple[str, ...] = ()  # tensors of that normalisation which no element owns

    def vectors(self, state: Mapping[str, Tensor]) -> Tensor:
        """Input weights of every element: (d_l, fan-in), the transpose of one client's block of Z_l."""
        firsts = sorted({rows.first for rows in self.weights})
        blocks = [
            torch.cat([r.vectors(state[r.tensor]) for r in self.weights if r.first == first], dim=1) for first in firsts
        ]
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    @property
    def key(self) -> LayerKey:
        """What to call it by: its name, or its number where the name is one (in ``nn.Sequential``, '0' is layer 1)."""
        return self.name if self.number is None or not self.name.isdigit() else self.number

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors in which the elements own their weights and biases."""
        return frozenset(rows.tensor for rows in (*self.weights, *self.biases))

    def __str__(self) -> str:
        number = "-" if self.number is None else self.number
        return f"{number} {self.name} ({self.kind}, {self.elements} elements)"


@dataclass(frozen=True)
class Anatomy:
    """The layers of a model, and the shape of every tensor of its state."""

    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    without_elements: Mapping[str, str] = field(default_factory=dict)  # other modules: name -> type
    stage: Mapping[str, int] = field(default_factory=dict)  # of every tensor: the numbered layer that it goes with
    norms: frozenset[str] = frozenset()  # tensors of normalisation modules

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """Look at a model's modules; its forward is not run."""
        if any(nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers())):
            raise ModelError("the model has lazy modules whose sizes are not known yet: run one batch through it first")
        shapes = {name: tuple(t.shape) for name, t in references(model).items()}
        if not shapes:
            raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train")
        found: list[Layer] = []
        others: dict[str, str] = {}
        norms: set[str] = set()
        last = -1  # the layer that a normalisation would follow
        for name, module in model.named_modules():
            made = _layers_of(name, module, shapes)
            if made:
                found.extend(made)
                last = len(found) - 1
            elif name:
                others[name] = type(module).__name__
                if isinstance(module, _WITH_ELEMENTS):
                    last = -1  # tied or parametrised: what follows it follows none of the layers found
            if isinstance(module, _NORMS):
                norms |= {t for t in _own_tensors(name, module) if t in shapes}
                if last >= 0:
                    found[last] = _with_norm(found[last], name, shapes)
        layers = tuple(_numbered(found, getattr(model, "fedfac_layers", None)))
        return cls(layers, shapes, others, _stages(model, layers, shapes), frozenset(norms))

    @property
    def numbered(self) -> tuple[Layer, ...]:
        """Layers 1..L in the paper's count."""
        return tuple(sorted((x for x in self.layers if x.number is not None), key=lambda x: x.number or 0))

    @property
    def head(self) -> Layer:
        """Layer L, the output."""
        if not self.numbered:
            raise LayerError("the model has no layer with elements, so it has no head")
        return self.numbered[-1]

    def first(self, layers: int) -> frozenset[str]:
        """The tensors of layers 1..``layers``, with whatever stands between them and the next layer."""
        return frozenset(tensor for tensor, stage in self.stage.items() if stage <= self._count(layers))

    def last(self, layers: int) -> frozenset[str]:
        """The tensors of the last ``layers`` layers."""
        return frozenset(t for t, stage in self.stage.items() if stage > len(self.numbered) - self._count(layers))

    def _count(self, layers: int) -> int:
        if not isinstance(layers, int) or not 0 <= layers <= len(self.numbered):
            raise LayerError(f"{layers} layers were asked for; the model has {len(self.numbered)}")
        return layers

    def layer(self, key: LayerKey) -> Layer:
        """A layer by its number 1..L (or -1 for L, -2 for L-1, ...) or by its module's name."""
        if isinstance(key, int) and not isinstance(key, bool):
            return self._by_number(key)
        by_name = {layer.name: layer for layer in self.layers}
        if key in by_name:
            return by_name[key]
        sole = [layer for layer in self.layers if layer.name.rpartition(".")[0] == key and key]
        if len(sole) == 1 and sole[0].kind in _RECURRENT_KINDS:
            return sole[0]
        if key in self.without_elements:
            raise LayerError(
                f"layer {key!r} is a {self.without_elements[str(key)]} and has no hidden elements to split. "
                f"Layers with elements: {', '.join(by_name) or 'none'}."
            )
        raise LayerError(f"the model has no layer {key!r}. {did_you_mean(str(key), by_name)}")

    def select(self, keys: Iterable[LayerKey]) -> tuple[Layer, ...]:
        """The layers for several keys, each once, in the model's order."""
        chosen = {self.layer(key).name for key in keys}
        return tuple(layer for layer in self.layers if layer.name in chosen)

    def _by_number(self, key: int) -> Layer:
        numbered = self.numbered
        number = key if key > 0 else len(numbered) + 1 + key
        if not 1 <= number <= len(numbered) or key == 0:
            known = ", ".join(f"{layer.number} {layer.name}" for layer in numbered)
            raise LayerError(f"the model has no layer {key}: its layers are {known or 'none'}")
        return numbered[number - 1]

    def __str__(self) -> str:
        return "\n".join(str(layer) for layer in self.layers)


_WITH_ELEMENTS = (_ConvNd, nn.Linear, nn.Bilinear)
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_CELL_GATES = {nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}
_RECURRENT_KINDS = frozenset(_GATES)


def _layers_of(name: str, module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Layer]:
    prefix = f"{name}." if name else ""
    if isinstance(module, nn.RNNBase):
        return [_recurrent(prefix, module, i) for i in range(module.num_layers)]
    if isinstance(module, nn.RNNCellBase):
        gates = next((g for kind, g in _CELL_GATES.items() if isinstance(module, kind)), 1)
        rows = {n: Rows(prefix + n, module.hidden_size, tiles=gates) for n, _ in module.named_parameters()}
        return [
            Layer(
                name,
                None,
                module.hidden_size,
                type(module).__name__,
                weights=tuple(r for n, r in rows.items() if n.startswith("weight")),
                biases=tuple(r for n, r in rows.items() if n.startswith("bias")),
            )
        ]
    if not isinstance(module, (_ConvNd, nn.Linear, nn.Bilinear)) or prefix + "weight" not in shapes:
        return []  # the weight of a parametrised module is computed: its elements own no numbers of their own
    elements = module.out_channels if isinstance(module, _ConvNd) else module.out_features
    if isinstance(module, _ConvTransposeNd):
        weight = Rows(prefix + "weight", elements, dim=1, groups=module.groups)
    else:
        weight = Rows(prefix + "weight", elements)
    biases = (Rows(prefix + "bias", elements),) if prefix + "bias" in shapes else ()
    return [Layer(name, None, elements, type(module).__name__, (weight,), biases)]


def _own_tensors(name: str, module: nn.Module) -> list[str]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [f"{name}.{tensor}" if name else tensor for tensor, _ in own]


def _stages(model: nn.Module, layers: tuple[Layer, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """A tensor of no numbered layer (a normalisation, a shortcut) goes with the layer before it."""
    owner = {tensor: layer.number for layer in layers if layer.number is not None for tensor in layer.tensors}
    stage: dict[str, int] = {}
    current = 1
    for name, module in model.named_modules():
        for tensor in _own_tensors(name, module):
            current = owner.get(tensor, current)
            if tensor in shapes:
                stage[tensor] = current
    return stage


def _recurrent(prefix: str, module: nn.RNNBase, index: int) -> Layer:
    gates = _GATES[module.mode]
    directions = ["", "_reverse"] if module.bidirectional else [""]
    weights: list[Rows] = []
    biases: list[Rows] = []
    for place, direction in enumerate(directions):
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            if part.startswith("bias") and not module.bias:
                continue
            rows = Rows(
                f"{prefix}{part}_l{index}{direction}",
                module.hidden_size,
                first=place * module.hidden_size,
                tiles=gates,
            )
            (weights if part.startswith("weight") else biases).append(rows)
    elements = module.hidden_size * len(directions)
    return Layer(f"{prefix}l{index}", None, elements, module.mode, tuple(weights), tuple(biases))


def _with_norm(layer: Layer, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Layer:
    """The layer with the normalisation that follows it, if that has one entry for every element."""
    own = [t for t in shapes if t.rpartition(".")[0] == name]
    per_element = tuple(Rows(t, layer.elements) for t in own if shapes[t] == (layer.elements,))
    if layer.norm or not per_element:
        return layer
    rest = tuple(t for t in own if shapes[t] != (layer.elements,))
    return replace(layer, norm=per_element, norm_rest=rest)


def _numbered(found: list[Layer], declared: Iterable[str] | None) -> list[Layer]:
    names = [layer.name for layer in found]
    order = names if declared is None else list(declared)
    twice = sorted({name for name in order if order.count(name) > 1})
    if twice:
        raise ModelError(f"fedfac_layers names {', '.join(map(repr, twice))} more than once; a layer has one number")
    for name in order:
        if name not in names:
            raise ModelError(f"fedfac_layers names {name!r}, which has no elements. {did_you_mean(name, names)}")
    return [replace(x, number=order.index(x.name) + 1 if x.name in order else None) for x in found]
