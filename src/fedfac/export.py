"""A client's model as a file for other programs, read back and checked before it is handed out.

- ``safetensors``: names and tensors only; load them into your own ``nn.Module``.
- ``torch-export``: a ``.pt2`` program for PyTorch without your Python code (``torch.export.load``).
- ``onnx``: for ONNX Runtime and everything that reads ONNX; any batch size.

A program is traced with samples of the client (or with ``example``), and its answers are compared with the model's for
batches of one, two and three samples. A file that answers differently is not kept.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from fedfac.errors import ConfigError, ModelError, RunError, did_you_mean

if TYPE_CHECKING:
    from fedfac.result import Result

SUFFIXES = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
TOLERANCE = 1e-4  # of the largest answer: another program may add up in another order
_SAMPLES = 3


def export(
    result: Result, client: int | str, path: str | Path, *, format: str = "safetensors", example: Tensor | None = None
) -> Path:
    """Write the client's model to ``path``; returns it. ``example`` is a batch of inputs, needed for programs only.

    Without ``example`` the client's own samples are taken, for which the result must know its federation.
    """
    if format not in SUFFIXES:
        raise ConfigError(f"there is no format {format!r}. {did_you_mean(format, SUFFIXES)}")
    path = Path(path)
    if path.suffix != SUFFIXES[format]:
        raise ConfigError(f"the file is {path}; the name of a model as {format} ends in {SUFFIXES[format]}")
    model = result.model(client).cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        if format == "safetensors":
            _save_tensors(model, part)
        else:
            batch = _batch(result, client) if example is None else example
            if len(batch) < _SAMPLES:
                batch = batch.repeat(_SAMPLES, *[1] * (batch.ndim - 1))
            _separate(model)
            write, read = _PROGRAMS[format]
            write(model, batch[:2], part)
            _check(model, read(part), batch[:_SAMPLES])
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _save_tensors(model: nn.Module, path: Path) -> None:
    state = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    path.write_bytes(save(state))
    back = load(path.read_bytes())
    if back.keys() != state.keys() or not all(torch.equal(back[name], tensor) for name, tensor in state.items()):
        raise ModelError(f"{path} does not hold what was written to it: is the disk full or broken?")


def _separate(model: nn.Module) -> None:
    """Give every tensor memory of its own: a program's file stores views into a common one with more ado."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _batch(result: Result, client: int | str) -> Tensor:
    if result.federation is None:
        raise RunError("a program is traced with inputs: give example=, a batch of them, or load with federation=")
    number = list(result.names).index(client) if isinstance(client, str) else client
    data = result.federation.client(number)
    return data.pool.batch(data.train[:_SAMPLES])[0].cpu()


def _write_program(model: nn.Module, batch: Tensor, path: Path) -> None:
    torch.export.save(_traced(model, batch), path)


def _traced(model: nn.Module, batch: Tensor) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch")},)
    try:
        return torch.export.export(model, (batch,), dynamic_shapes=shapes)
    except Exception as error:
        raise ModelError(
            f"torch.export cannot trace {type(model).__name__} for any batch size ({type(error).__name__}): "
            f"{str(error).splitlines()[0]}. Export it as safetensors instead."
        ) from error


def _read_program(path: Path) -> Callable[[Tensor], Tensor]:
    program: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return program


def _write_onnx(model: nn.Module, batch: Tensor, path: Path) -> None:
    for module in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(module)
        except ImportError as error:
            raise ConfigError(f"ONNX needs {module}, which is not installed: pip install 'fedfac[export]'") from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it would complain of a torchvision that nobody needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        torch.onnx.export(
            _traced(model, batch),
            (),
            path,
            dynamo=True,
            external_data=False,
            input_names=["input"],
            output_names=["output"],
            verbose=False,
        )


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def answer(batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: batch.numpy()})[0])

    return answer


_PROGRAMS: Mapping[str, tuple[Callable[[nn.Module, Tensor, Path], None], Callable[[Path], Any]]] = {
    "torch-export": (_write_program, _read_program),
    "onnx": (_write_onnx, _read_onnx),
}


@torch.no_grad()
def _check(model: nn.Module, program: Callable[[Tensor], Tensor], batch: Tensor) -> None:
    """The program answers as the model does, for every batch size up to that of ``batch``."""
    for size in range(1, len(batch) + 1):
        wanted, given = model(batch[:size]), program(batch[:size])
        scale = max(float(wanted.abs().max()), 1.0)
        if given.shape != wanted.shape or float((given - wanted).abs().max()) > TOLERANCE * scale:
            raise ModelError(
                f"the exported program answers differently from the model for a batch of {size}; it was not kept. "
                "Export it as safetensors instead."
            )
