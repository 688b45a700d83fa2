"""Exported models predict what the client's model predicts, for any batch size, or they are not kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import message
from safetensors.torch import load_file
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError, DataError, ModelError, RunError
from fedfac.export import export
from fedfac.result import Result


@pytest.fixture(scope="module")
def result() -> Result:
    method = methods.fedfac(layers=[1], head="personal")
    return fedfac.fit(small_model(), small_federation(), method=method, rounds=2, epochs=1, cohort=4)


def batch(size: int) -> Tensor:
    return torch.randn(size, 2, 6, 6, generator=torch.Generator().manual_seed(size))


def answers(path: Path, inputs: Tensor) -> Tensor:
    if path.suffix == ".onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return program(inputs)  # type: ignore[no-any-return]
    model = small_model(seed=9).eval()
    model.load_state_dict(load_file(path))
    return model(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("format", ["safetensors", "torch-export", "onnx"])
def test_the_file_answers_as_the_model_does(result: Result, tmp_path: Path, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    suffix = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}[format]
    files = [export(result, client, tmp_path / f"{client}{suffix}", format=format) for client in (0, 3)]
    for client, path in zip((0, 3), files, strict=True):
        for size in (1, 2, 7, 64):
            with torch.no_grad():
                wanted = result.model(client)(batch(size))
                torch.testing.assert_close(answers(path, batch(size)), wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # two clients are two models
        assert not torch.allclose(answers(files[0], batch(8)), answers(files[1], batch(8)), atol=1e-3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"0{suffix}", f"3{suffix}"]


def test_methods_that_wrap_the_model_are_exported_whole(tmp_path: Path) -> None:
    result = fedfac.fit(small_model(), small_federation(), method=methods.fedem(components=2), rounds=1, epochs=1)
    path = export(result, "2", tmp_path / "m.pt2", format="torch-export")
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(path).module()(batch(5)), result.model(2)(batch(5)))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    main(["run", "--clients", "6", "--rounds", "1", "--epochs", "1", "--layers", "fc1", "--out", "r", "--quiet"])
    capsys.readouterr()
    assert main(["export", "r", "--client", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": "r/client-4.safetensors",
        "format": "safetensors",
        "client": "4",
    }
    loaded, model = load_file("r/client-4.safetensors"), fedfac.load("r").model(4)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    assert main(["export", "r", "--client", "4", "--format", "torch-export", "--out", "there/m.pt2"]) == 0
    assert "checked to predict the same" in capsys.readouterr().out
    assert Path("there/m.pt2").exists()
    assert main(["export", "r", "--client", "17"]) == 1
    assert "there is no client 17; the federation has 6" in capsys.readouterr().err


class Careless(nn.Module):
    """A network that answers differently while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out + 1 if torch.compiler.is_exporting() else out


def small_result(model: nn.Module) -> Result:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    federation = fedfac.Federation.from_arrays({"a": (x, (x[:, 0] > 0).long())})
    return fedfac.fit(model, federation, method=methods.fedavg(), rounds=1, epochs=1)


def test_a_program_that_answers_differently_is_not_kept(tmp_path: Path) -> None:
    result = small_result(Careless())
    text = message(ModelError, lambda: export(result, "a", tmp_path / "m.pt2", format="torch-export"))
    assert "answers differently from the model for a batch of 1; it was not kept" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ConfigError, {"format": "onyx"}, "there is no format 'onyx'. Did you mean 'onnx'?"),
        (ConfigError, {"path": "m.pt"}, "the name of a model as safetensors ends in .safetensors"),
        (DataError, {"client": "z"}, "there is no client 'z'"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, kind: type[Exception], arguments: dict[str, Any], words: str) -> None:
    asked = {"client": "a", "path": "m.safetensors", "format": "safetensors", **arguments}
    path = tmp_path / asked.pop("path")
    result = small_result(nn.Linear(4, 2))
    assert words in message(kind, lambda: export(result, asked["client"], path, format=asked["format"]))
    assert list(tmp_path.iterdir()) == []


def test_a_result_without_its_data_needs_an_example(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    federation = fedfac.Federation.from_arrays({"a": (x, (x[:, 0] > 0).long())})
    fedfac.fit(model, federation, method=methods.fedavg(), rounds=1, epochs=1, out=tmp_path / "r")
    loaded = fedfac.load(tmp_path / "r", model)
    path = tmp_path / "m.pt2"
    assert "give example=" in message(RunError, lambda: export(loaded, "a", path, format="torch-export"))
    export(loaded, "a", path, format="torch-export", example=x[:1])
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(path).module()(x), loaded.model("a")(x))


def test_missing_onnx_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    result = small_result(nn.Linear(4, 2))
    text = message(ConfigError, lambda: export(result, "a", tmp_path / "m.onnx", format="onnx"))
    assert "pip install 'fedfac[export]'" in text
