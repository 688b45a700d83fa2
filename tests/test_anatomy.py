"""Who owns which numbers.

The oracle for ownership is the network itself: a change of the numbers of element j must change output j of the
layer and no other. The oracle for input weights is index arithmetic written here from PyTorch's documented shapes.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers import message
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedfac.anatomy import Anatomy, Layer
from fedfac.errors import LayerError, ModelError
from fedfac.state import references

Output = Callable[[], Tensor]  # (samples, elements, ...)

PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "Conv1d in groups": (lambda: nn.Conv1d(4, 6, 3, groups=2), (2, 4, 7)),
    "Conv1d without bias": (lambda: nn.Conv1d(4, 6, 3, bias=False), (2, 4, 7)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2), (2, 4, 7, 6)),
    "Conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
    "Conv2d depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), (2, 6, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 3, 3, 3)),
    "Conv3d in groups": (lambda: nn.Conv3d(4, 6, 2, groups=2), (2, 4, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 5)),
    "ConvTranspose1d in groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=2), (2, 4, 3, 3)),
    "ConvTranspose2d in groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False), (2, 4, 3, 3)),
    "ConvTranspose2d depthwise": (lambda: nn.ConvTranspose2d(6, 6, 2, groups=6), (2, 6, 3, 3)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 2), (2, 4, 2, 2, 2)),
    "ConvTranspose3d in groups": (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2), (2, 4, 2, 2, 2)),
    "Linear": (lambda: nn.Linear(5, 6), (3, 5)),
    "Linear without bias": (lambda: nn.Linear(5, 6, bias=False), (3, 5)),
}

RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(3, 4),
    "LSTM without bias": lambda: nn.LSTM(3, 4, bias=False),
    "LSTM of two layers": lambda: nn.LSTM(3, 4, num_layers=2),
    "LSTM bidirectional": lambda: nn.LSTM(3, 4, bidirectional=True),
    "LSTM of two layers, bidirectional": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "LSTM with projection": lambda: nn.LSTM(3, 4, proj_size=2),
    "LSTM of two layers, bidirectional, with projection": lambda: nn.LSTM(
        3, 4, num_layers=2, bidirectional=True, proj_size=2
    ),
    "GRU": lambda: nn.GRU(3, 4),
    "GRU of three layers, bidirectional, without bias": lambda: nn.GRU(3, 4, 3, bidirectional=True, bias=False),
    "RNN": lambda: nn.RNN(3, 4),
    "RNN with ReLU, bidirectional": lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True),
}

CELLS: dict[str, Callable[[], nn.RNNCellBase]] = {
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "RNNCell without bias": lambda: nn.RNNCell(3, 4, bias=False),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(module: nn.Module) -> nn.Module:
    """Double precision, evaluation mode, and every number of its state drawn and positive."""
    module = module.double().eval()
    for i, tensor in enumerate(references(module).values()):
        if tensor.is_floating_point():
            tensor.copy_(0.2 + draw(*tensor.shape, seed=i).abs())
    return module


def assert_each_element_owns_its_output(layer: Layer, model: nn.Module, output: Output) -> None:
    """Change the numbers of one element at a time and see which outputs move."""
    state = references(model)
    rows = [*layer.weights, *layer.biases, *layer.norm]
    owners = {r.tensor: r.owner(tuple(state[r.tensor].shape)).expand(state[r.tensor].shape) for r in rows}
    assert len(owners) == len(rows), "a tensor is owned twice"
    assert all(0 <= int(owner.min()) <= int(owner.max()) < layer.elements for owner in owners.values())
    with torch.no_grad():
        before = output()
        assert before.shape[1] == layer.elements
        for j in range(layer.elements):
            old = {name: state[name].clone() for name in owners}
            for name, owner in owners.items():
                state[name][owner == j] += 0.5
            moved = (output() - before).abs().amax([d for d in range(before.ndim) if d != 1])
            for name, tensor in old.items():
                state[name].copy_(tensor)
            assert (moved > 1e-12).nonzero().flatten().tolist() == [j]


@pytest.mark.parametrize("case", PLAIN)
def test_an_element_owns_exactly_what_its_output_depends_on(case: str) -> None:
    make, shape = PLAIN[case]
    model = positive(make())
    layer = Anatomy.of(model).layer(1)
    assert layer.tensors == set(references(model))
    assert_each_element_owns_its_output(layer, model, lambda: model(draw(*shape, seed=99)))


def test_an_element_of_a_bilinear_layer_owns_its_matrix() -> None:
    model = positive(nn.Bilinear(3, 5, 6))
    layer = Anatomy.of(model).layer(1)
    assert layer.tensors == {"weight", "bias"}
    assert_each_element_owns_its_output(layer, model, lambda: model(draw(4, 3), draw(4, 5, seed=1)))


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Linear(5, 6), nn.BatchNorm1d(6), (3, 5)),
        (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 7)),
        (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), (2, 4, 3, 3, 3)),
        (nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6), (2, 4, 3, 3)),
        (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), (2, 4, 5, 5)),
        (nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (2, 4, 5, 5)),
        (nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True), (2, 4, 5, 5)),
        (nn.Conv2d(4, 6, 3), nn.GroupNorm(6, 6), (2, 4, 5, 5)),  # one channel a group: channels do not mix
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_normalisation_of_an_output_belongs_to_its_element(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]
) -> None:
    model = positive(nn.Sequential(layer, norm))
    found = Anatomy.of(model).layer("0")
    assert {r.tensor for r in found.norm} | set(found.norm_rest) == {f"1.{n}" for n in references(norm)}
    assert set(found.norm_rest) <= {"1.num_batches_tracked"}
    assert_each_element_owns_its_output(found, model, lambda: model(draw(*shape, seed=99)))


def recurrent_units(module: nn.RNNBase, index: int) -> Output:
    """The units of one layer after one step from some hidden state: forward ones, then reverse ones."""
    directions = 2 if module.bidirectional else 1
    hidden = draw(module.num_layers * directions, 2, module.proj_size or module.hidden_size, seed=5)
    cell = draw(module.num_layers * directions, 2, module.hidden_size, seed=6)
    inputs = draw(1, 2, module.input_size, seed=7)

    def units() -> Tensor:
        if isinstance(module, nn.LSTM):
            _, (h, c) = module(inputs, (hidden, cell))
            h = c if module.proj_size else h  # a projection mixes the units: the cells are before it
        else:
            _, h = module(inputs, hidden)
        return torch.cat([h[index * directions + d] for d in range(directions)], dim=1)

    return units


@pytest.mark.parametrize("case", RECURRENT)
def test_a_recurrent_unit_owns_its_gates(case: str) -> None:
    module = RECURRENT[case]().double()
    anatomy = Anatomy.of(module)
    assert [layer.name for layer in anatomy.layers] == [f"l{i}" for i in range(module.num_layers)]
    for index, layer in enumerate(anatomy.layers):
        own = {name for name in references(module) if name.removesuffix("_reverse").endswith(f"_l{index}")}
        assert layer.tensors == {name for name in own if not name.startswith("weight_hr")}
        assert_each_element_owns_its_output(layer, module, recurrent_units(module, index))


@pytest.mark.parametrize("case", CELLS)
def test_a_cell_unit_owns_its_gates(case: str) -> None:
    cell = CELLS[case]().double()
    hidden, inputs = draw(2, 4, seed=5), draw(2, 3, seed=7)
    layer = Anatomy.of(cell).layer(1)
    assert layer.tensors == set(references(cell))

    def units() -> Tensor:
        made = cell(inputs, (hidden, hidden))[0] if isinstance(cell, nn.LSTMCell) else cell(inputs, hidden)
        assert isinstance(made, Tensor)
        return made

    assert_each_element_owns_its_output(layer, cell, units)


def test_a_unit_of_a_fresh_lstm_moves_only_itself_in_the_first_step() -> None:
    module = nn.LSTM(3, 4).double()
    inputs = draw(1, 2, 3)
    assert_each_element_owns_its_output(Anatomy.of(module).layer("l0"), module, lambda: module(inputs)[0][0])


# --- input weights -------------------------------------------------------------------------------------------------


def codes(module: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """From PyTorch's documented shapes: of every number of a weight, its element, and its place among the inputs."""
    at = np.indices(shape)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        H = module.hidden_size
        element = at[0] % H + (H if name.endswith("_reverse") else 0)
        kind = 1 if name.startswith("weight_ih") else 2
        return element, kind * 10**6 + (at[0] // H) * 10**3 + at[1]
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        inputs, outputs = module.in_channels // module.groups, module.out_channels // module.groups
        element = at[0] // inputs * outputs + at[1]
        rest = [at[0] % inputs, *at[2:]]
    else:
        element, rest = at[0], list(at[1:])
    return element, sum((r * 100**i for i, r in enumerate(rest)), np.zeros(shape, dtype=np.int64))


ALL_MODULES: dict[str, Callable[[], nn.Module]] = {
    **{case: make for case, (make, _) in PLAIN.items()},
    **RECURRENT,
    **CELLS,
    "Bilinear": lambda: nn.Bilinear(3, 5, 6),
}


@pytest.mark.parametrize("case", ALL_MODULES)
def test_input_weights_are_the_element_s_own_and_aligned_between_elements(case: str) -> None:
    module = ALL_MODULES[case]()
    shapes = {name: tuple(t.shape) for name, t in references(module).items()}
    for layer in Anatomy.of(module).layers:
        coded = {r.tensor: codes(module, r.tensor, shapes[r.tensor]) for r in layer.weights}
        elements = layer.vectors({name: torch.from_numpy(element) for name, (element, _) in coded.items()})
        places = layer.vectors({name: torch.from_numpy(place) for name, (_, place) in coded.items()})
        fan_in = sum(element.size for element, _ in coded.values()) // layer.elements
        assert elements.shape == places.shape == (layer.elements, fan_in)
        assert (elements == torch.arange(layer.elements)[:, None]).all()
        assert (places == places[0]).all()
        assert len(set(places[0].tolist())) == fan_in


def test_input_weights_by_hand() -> None:
    conv = nn.Conv2d(2, 3, 2)
    assert torch.equal(Anatomy.of(conv).layer(1).vectors(references(conv)), conv.weight.detach().flatten(1))
    lstm = nn.LSTM(3, 2)
    W, V = references(lstm)["weight_ih_l0"], references(lstm)["weight_hh_l0"]
    unit_one = torch.cat([W[1], W[3], W[5], W[7], V[1], V[3], V[5], V[7]])
    assert torch.equal(Anatomy.of(lstm).layer(1).vectors(references(lstm))[1], unit_one)


# --- normalisations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [
        nn.GroupNorm(2, 6),
        nn.LayerNorm(6),
        nn.RMSNorm(6),
        nn.BatchNorm1d(6),
        nn.SyncBatchNorm(6),
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        nn.BatchNorm1d(6, track_running_stats=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_normalisation_of_the_layer_s_size_follows_it(norm: nn.Module) -> None:
    layer = Anatomy.of(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), norm, nn.Linear(6, 2))).layer(1)
    assert {r.tensor for r in layer.norm} == {f"2.{n}" for n, t in references(norm).items() if t.shape == (6,)}
    assert all(torch.equal(r.owner((6,)), torch.arange(6)) for r in layer.norm)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(5), nn.LayerNorm(4), nn.LayerNorm((6, 4, 4)), nn.GroupNorm(2, 8), nn.InstanceNorm2d(6)]
)
def test_a_normalisation_of_another_size_or_without_numbers_does_not_follow(norm: nn.Module) -> None:
    layer = Anatomy.of(nn.Sequential(nn.Conv2d(3, 6, 3), norm)).layer(1)
    assert layer.norm == ()
    assert layer.norm_rest == ()


def test_a_layer_has_at_most_one_normalisation_the_first() -> None:
    first, second = Anatomy.of(
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    ).layers
    assert {r.tensor for r in first.norm} == {"1.weight", "1.bias"}
    assert {r.tensor for r in second.norm} == {f"4.{n}" for n in ("weight", "bias", "running_mean", "running_var")}


def test_a_normalisation_before_the_first_layer_belongs_to_nobody() -> None:
    assert Anatomy.of(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))).layer(1).norm == ()


def test_a_normalisation_follows_the_last_layer_of_a_recurrent_module() -> None:
    anatomy = Anatomy.of(nn.Sequential(nn.LSTM(3, 4, 2, bidirectional=True), nn.LayerNorm(8)))
    assert anatomy.layer("0.l0").norm == ()
    assert {r.tensor for r in anatomy.layer("0.l1").norm} == {"1.weight", "1.bias"}


def test_a_normalisation_after_a_layer_without_elements_does_not_follow_an_earlier_layer() -> None:
    between = parametrizations.weight_norm(nn.Conv2d(6, 6, 3))
    anatomy = Anatomy.of(nn.Sequential(nn.Conv2d(3, 6, 3), between, nn.BatchNorm2d(6)))
    assert [layer.name for layer in anatomy.layers] == ["0"]
    assert anatomy.layer(1).norm == ()


# --- numbers and names ---------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 4, 3),
            relu=nn.ReLU(),
            conv2=nn.Conv2d(4, 6, 3),
            pool=nn.MaxPool2d(2),
            lstm=nn.LSTM(6, 5),
            fc=nn.Linear(5, 2),
        )
    )


def test_layers_are_numbered_in_the_order_of_the_modules() -> None:
    anatomy = Anatomy.of(network())
    assert [(layer.number, layer.name, layer.elements, layer.kind) for layer in anatomy.numbered] == [
        (1, "conv1", 4, "Conv2d"),
        (2, "conv2", 6, "Conv2d"),
        (3, "lstm.l0", 5, "LSTM"),
        (4, "fc", 2, "Linear"),
    ]
    assert anatomy.head.name == "fc"


def test_a_layer_is_found_by_number_from_either_end_and_by_name() -> None:
    anatomy = Anatomy.of(network())
    assert [anatomy.layer(k).name for k in (1, 2, 3, 4)] == ["conv1", "conv2", "lstm.l0", "fc"]
    assert [anatomy.layer(k).name for k in (-1, -2, -3, -4)] == ["fc", "lstm.l0", "conv2", "conv1"]
    assert [anatomy.layer(k).number for k in ("conv2", "lstm.l0", "lstm")] == [2, 3, 3]


def test_selected_layers_come_once_each_in_the_model_s_order() -> None:
    anatomy = Anatomy.of(network())
    assert [layer.name for layer in anatomy.select([-1, "conv1", 4, 1])] == ["conv1", "fc"]
    assert anatomy.select([]) == ()


@pytest.mark.parametrize("number", [0, 5, -5, 99])
def test_a_wrong_number_is_answered_with_all_layers(number: int) -> None:
    assert message(LayerError, lambda: Anatomy.of(network()).layer(number)) == (
        f"the model has no layer {number}: its layers are 1 conv1, 2 conv2, 3 lstm.l0, 4 fc"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("conv3", "the model has no layer 'conv3'. Did you mean 'conv2' or 'conv1'?"),
        ("fcc", "the model has no layer 'fcc'. Did you mean 'fc'?"),
        ("lstm.l1", "the model has no layer 'lstm.l1'. Did you mean 'lstm.l0'?"),
        ("zzz", "the model has no layer 'zzz'. Known: conv1, conv2, lstm.l0, fc."),
        ("", "the model has no layer ''. Known: conv1, conv2, lstm.l0, fc."),
        (
            "pool",
            "layer 'pool' is a MaxPool2d and has no hidden elements to split. "
            "Layers with elements: conv1, conv2, lstm.l0, fc.",
        ),
        (True, "the model has no layer True. Known: conv1, conv2, lstm.l0, fc."),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(name: str, text: str) -> None:
    assert message(LayerError, lambda: Anatomy.of(network()).layer(name)) == text


def test_a_recurrent_module_of_two_layers_is_not_one_layer() -> None:
    anatomy = Anatomy.of(nn.ModuleDict({"rnn": nn.GRU(3, 4, 2)}))
    text = message(LayerError, lambda: anatomy.layer("rnn"))
    assert text == "the model has no layer 'rnn'. Did you mean 'rnn.l1' or 'rnn.l0'?"


def test_a_model_that_is_itself_a_layer_is_layer_one() -> None:
    anatomy = Anatomy.of(nn.Linear(3, 2))
    assert anatomy.layer(1) is anatomy.head
    assert anatomy.layer(1).tensors == {"weight", "bias"}


def test_a_module_without_layers_has_no_head() -> None:
    anatomy = Anatomy.of(nn.Sequential(nn.BatchNorm1d(3)))
    assert message(LayerError, lambda: anatomy.head) == "the model has no layer with elements, so it has no head"
    assert message(LayerError, lambda: anatomy.layer(1)) == "the model has no layer 1: its layers are none"
    assert message(LayerError, lambda: anatomy.layer("0")) == (
        "layer '0' is a BatchNorm1d and has no hidden elements to split. Layers with elements: none."
    )


def test_a_module_without_parameters_is_refused() -> None:
    text = message(ModelError, lambda: Anatomy.of(nn.Flatten()))
    assert text == "Flatten has no parameters: there is nothing to train"


def test_a_lazy_module_is_refused_until_it_has_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that lazy modules are new
        model = nn.Sequential(nn.LazyLinear(3))
    assert message(ModelError, lambda: Anatomy.of(model)) == (
        "the model has lazy modules whose sizes are not known yet: run one batch through it first"
    )
    model(torch.zeros(1, 5))
    assert Anatomy.of(model).layer(1).elements == 3


class Residual(nn.Module):
    """A block whose shortcut the paper would not count."""

    fedfac_layers: Sequence[str] = ("stem", "conv", "fc")

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)
        self.stem = nn.Conv2d(3, 4, 3)
        self.shortcut = nn.Conv2d(4, 6, 1)
        self.conv = nn.Conv2d(4, 6, 3)


def test_declared_layers_are_numbered_as_declared_and_others_keep_only_their_names() -> None:
    anatomy = Anatomy.of(Residual())
    assert [(layer.number, layer.name) for layer in anatomy.numbered] == [(1, "stem"), (2, "conv"), (3, "fc")]
    assert anatomy.head.name == "fc"
    assert anatomy.layer(-2).name == "conv"
    assert anatomy.layer("shortcut").number is None
    assert str(anatomy.layer("shortcut")) == "- shortcut (Conv2d, 6 elements)"
    assert message(LayerError, lambda: anatomy.layer(4)) == (
        "the model has no layer 4: its layers are 1 stem, 2 conv, 3 fc"
    )


def test_a_declaration_must_name_layers_with_elements() -> None:
    model = Residual()
    model.fedfac_layers = ("stem", "con", "fc")
    assert message(ModelError, lambda: Anatomy.of(model)) == (
        "fedfac_layers names 'con', which has no elements. Did you mean 'conv'?"
    )


def test_a_declaration_names_a_layer_once() -> None:
    model = Residual()
    model.fedfac_layers = ("stem", "conv", "conv", "fc")
    assert "conv" in message(ModelError, lambda: Anatomy.of(model))


def test_tied_weights_belong_to_the_first_layer_only() -> None:
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    b.weight = a.weight
    anatomy = Anatomy.of(nn.Sequential(a, b, c))
    assert [layer.name for layer in anatomy.layers] == ["0", "2"]
    assert anatomy.layer(1).tensors == {"0.weight", "0.bias"}
    assert set(anatomy.shapes) == {"0.weight", "0.bias", "1.bias", "2.weight", "2.bias"}


def test_a_module_used_twice_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    assert [layer.name for layer in Anatomy.of(nn.Sequential(shared, nn.ReLU(), shared)).layers] == ["0"]


def test_every_tensor_of_the_state_has_its_shape_and_at_most_one_layer() -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(2), nn.Bilinear(2, 2, 3), nn.ConvTranspose1d(3, 4, 2, groups=1))
    anatomy = Anatomy.of(model)
    assert dict(anatomy.shapes) == {name: tuple(t.shape) for name, t in references(model).items()}
    owned = [r.tensor for layer in anatomy.layers for r in (*layer.weights, *layer.biases, *layer.norm)]
    assert len(owned) == len(set(owned))
    assert set(anatomy.shapes) - set(owned) == {"1.num_batches_tracked"}


# --- stages --------------------------------------------------------------------------------------------------------


def staged() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(9, 3),
            conv=nn.Conv1d(3, 4, 2, bias=False),
            norm=nn.BatchNorm1d(4),
            rnn=nn.LSTM(4, 5, num_layers=2, proj_size=2),
            scale=nn.LayerNorm(7),
            fc=nn.Linear(2, 2),
        )
    )


def names(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name in references(model) if name.startswith(prefixes)}


def test_every_tensor_goes_with_a_layer_or_with_the_one_before_it() -> None:
    model = staged()
    anatomy = Anatomy.of(model)
    expected = [
        names(model, "embed.", "conv.", "norm."),
        {name for name in names(model, "rnn.") if name.endswith("_l0")},
        {name for name in names(model, "rnn.") if name.endswith("_l1")} | names(model, "scale."),
        names(model, "fc."),
    ]
    assert [anatomy.first(n) - anatomy.first(n - 1) for n in (1, 2, 3, 4)] == expected
    assert [anatomy.last(n) - anatomy.last(n - 1) for n in (1, 2, 3, 4)] == expected[::-1]


def test_the_first_layers_and_the_last_ones_make_up_the_state() -> None:
    for model in (staged(), network(), Residual()):
        anatomy = Anatomy.of(model)
        for n in range(len(anatomy.numbered) + 1):
            first, last = anatomy.first(n), anatomy.last(len(anatomy.numbered) - n)
            assert first.isdisjoint(last)
            assert first | last == set(anatomy.shapes)
        assert anatomy.first(0) == anatomy.last(0) == frozenset()


@pytest.mark.parametrize("layers", [-1, 5])
def test_more_layers_than_there_are_is_refused(layers: int) -> None:
    anatomy = Anatomy.of(staged())
    text = f"{layers} layers were asked for; the model has 4"
    assert message(LayerError, lambda: anatomy.first(layers)) == text
    assert message(LayerError, lambda: anatomy.last(layers)) == text


def test_normalisations_are_known_by_type_whatever_their_names_and_sizes() -> None:
    model = staged()
    assert Anatomy.of(model).norms == names(model, "norm.", "scale.")
    misnamed = nn.ModuleDict({"norm": nn.Linear(2, 2), "linear": nn.GroupNorm(1, 2)})
    assert Anatomy.of(misnamed).norms == {"linear.weight", "linear.bias"}


# --- as a whole ----------------------------------------------------------------------------------------------------


def test_an_anatomy_prints_one_line_a_layer() -> None:
    assert str(Anatomy.of(network())).splitlines() == [
        "1 conv1 (Conv2d, 4 elements)",
        "2 conv2 (Conv2d, 6 elements)",
        "3 lstm.l0 (LSTM, 5 elements)",
        "4 fc (Linear, 2 elements)",
    ]


def test_looking_at_a_model_does_not_change_it() -> None:
    model = network()
    before = {name: t.clone() for name, t in references(model).items()}
    Anatomy.of(model)
    assert all(torch.equal(t, before[name]) for name, t in references(model).items())
    assert model.training
