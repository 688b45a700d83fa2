"""The networks, and the paper's numbering of their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedfac import models
from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, ModelError
from fedfac.state import references, same, state_of


def made(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    return models.build(name, shape=shape, classes=classes, seed=0, **options)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "layers", "number", "layer"),
    [
        ("femnist-cnn", (1, 28, 28), 62, 4, 2, "conv2"),
        ("char-lstm", (80,), 80, 4, 3, "fc1"),
        ("resnet18", (3, 32, 32), 10, 18, 16, "stages.3.1.conv1"),
        ("resnet18", (3, 32, 32), 10, 18, 17, "stages.3.1.conv2"),
        ("vgg16", (3, 32, 32), 100, 16, 15, "fc2"),
        ("mlp", (1, 28, 28), 10, 2, 1, "fc1"),
        ("cnn", (1, 8, 8), 10, 4, 3, "fc1"),
        ("signal-cnn", (6, 128), 12, 4, 2, "conv2"),
    ],
)
def test_layers_are_counted_as_the_paper_counts_them(
    name: str, shape: tuple[int, ...], classes: int, layers: int, number: int, layer: str
) -> None:
    model = made(name, shape, classes)
    anatomy = Anatomy.of(model)
    assert len(anatomy.numbered) == layers
    assert anatomy.layer(number).name == layer
    assert anatomy.head.elements == classes
    inputs = torch.zeros((2, *shape), dtype=torch.int64 if name == "char-lstm" else torch.float32)
    assert model.eval()(inputs).shape == (2, classes)


def test_the_femnist_cnn_has_the_papers_number_of_parameters() -> None:
    assert sum(p.numel() for p in made("femnist-cnn", (1, 28, 28), 62).parameters()) == 608_702


def test_vgg_16_has_the_papers_width_as_an_option() -> None:
    layer = Anatomy.of(made("vgg16", (3, 32, 32), 100, width=4096)).layer(15)
    assert layer.elements == 4096
    assert Anatomy.of(made("vgg16", (3, 32, 32), 100)).layer(15).elements == 512


def test_resnet_stages_are_where_the_paper_has_them() -> None:
    anatomy = Anatomy.of(made("resnet18", (3, 32, 32), 10))
    widths = [layer.elements for layer in anatomy.numbered]
    assert widths == [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4 + [10]
    shortcuts = [layer for layer in anatomy.layers if layer.number is None]
    assert [layer.name for layer in shortcuts] == [f"stages.{i}.0.shortcut.conv" for i in (1, 2, 3)]
    for layer in anatomy.numbered[:-1]:
        assert [rows.tensor.rpartition(".")[2] for rows in layer.norm] == [
            "weight",
            "bias",
            "running_mean",
            "running_var",
        ]
    assert anatomy.layer(17).norm[0].tensor == "stages.3.1.bn2.weight"


def test_the_large_stem_leaves_one_by_one_maps_on_small_images() -> None:
    large, small = (made("resnet18", (3, 32, 32), 10, stem=stem) for stem in (7, 3))
    shapes: list[tuple[int, ...]] = []
    for model in (large, small):
        assert isinstance(model.stages, nn.Module)
        model.stages.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape)))
        model.eval()(torch.zeros(1, 3, 32, 32))
    assert shapes == [(1, 512, 1, 1), (1, 512, 4, 4)]


def test_the_char_lstm_predicts_at_every_position_when_asked() -> None:
    model = made("char-lstm", (80,), 30, every_position=True).eval()
    text = torch.randint(30, (3, 80), generator=torch.Generator())
    outputs = model(text)
    assert outputs.shape == (3, 30, 80)
    last = made("char-lstm", (80,), 30).eval()
    torch.testing.assert_close(last(text), outputs[:, :, -1])


def test_the_seed_decides_the_start_and_the_global_generator_is_left_alone() -> None:
    before = torch.default_generator.get_state()
    one, again = (made("mlp", (4,), 2) for _ in range(2))
    other = models.build("mlp", shape=(4,), classes=2, seed=1)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert same(references(one), references(again))
    assert not same(references(one), references(other))


def test_weights_of_ones_own_are_loaded(tmp_path: Path) -> None:
    donor = models.build("mlp", shape=(4,), classes=2, seed=7)
    save_file(state_of(donor), tmp_path / "w.safetensors")
    assert same(references(made("mlp", (4,), 2, weights=tmp_path / "w.safetensors")), references(donor))
    with pytest.raises(ModelError, match="the model does not fit the checkpoint"):
        made("mlp", (4,), 2, weights=tmp_path / "w.safetensors", hidden=3)
    with pytest.raises(ModelError, match="there is no weights file"):
        made("mlp", (4,), 2, weights=tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        made("mlp", (4,), 2, weights=tmp_path / "bad")


def test_a_network_of_ones_own_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))

    @models.register("line")
    def line(*, shape: tuple[int, ...], classes: int, bias: bool = True) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes, bias=bias))

    assert len(list(made("line", (4,), 2, bias=False).parameters())) == 1
    with pytest.raises(ConfigError, match="there is already a model 'line'"):
        models.register("line")(line)
    with pytest.raises(ConfigError, match="does not take classes"):
        models.register("other")(lambda shape: nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("resnet", (3, 32, 32), {}, "there is no model 'resnet'. Did you mean 'resnet18'?"),
        ("mlp", (4,), {"hiden": 3}, "model 'mlp' has no option 'hiden'. Did you mean 'hidden'?"),
        ("resnet18", (3, 32, 32), {"stem": 5}, "stem is 5; allowed: 3"),
        ("femnist-cnn", (1, 8, 8), {}, "femnist-cnn eats images (channels, height, width) of 16 × 16"),
        ("vgg16", (80,), {}, "the data has samples of (80,)"),
        ("char-lstm", (1, 8, 8), {}, "char-lstm eats lines of characters"),
        ("signal-cnn", (6, 4), {}, "signal-cnn eats signals"),
    ],
)
def test_mistakes_are_explained(name: str, shape: tuple[int, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        made(name, shape, 2, **options)
    assert words in str(caught.value)
