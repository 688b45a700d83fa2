"""How a model's numbers are computed: device, precision, memory layout, determinism.

None of it changes what is computed, only its rounding and its speed. ``auto`` is a fixed rule, never a race between
alternatives: a choice by timing would make results depend on the machine's mood.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedfac.errors import ConfigError, did_you_mean

PRECISIONS = ("auto", "fp32", "tf32", "bf16")
LAYOUTS = ("auto", "contiguous", "channels-last")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Numerics:
    """The rule that was chosen; as it stands, plain fp32 on a CPU."""

    device: torch.device = CPU
    precision: str = "fp32"
    channels_last: bool = False
    deterministic: bool = False

    @classmethod
    def choose(
        cls,
        model: nn.Module,
        device: torch.device,
        *,
        precision: str = "auto",
        layout: str = "auto",
        deterministic: bool = False,
    ) -> Numerics:
        """``auto`` precision is bf16 autocast for convolutional models on a GPU, and fp32 otherwise.

        ``auto`` layout is channels-last for models with two-dimensional convolutions: measured, it is never slower.
        """
        if precision not in PRECISIONS:
            raise ConfigError(f"precision is {precision!r}. {did_you_mean(precision, PRECISIONS)}")
        if layout not in LAYOUTS:
            raise ConfigError(f"layout is {layout!r}. {did_you_mean(layout, LAYOUTS)}")
        convolves = any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())
        if precision == "auto":
            precision = "bf16" if convolves and device.type == "cuda" else "fp32"
        if precision == "tf32" and device.type != "cuda":
            raise ConfigError(f"precision 'tf32' is a GPU's; on {device.type} choose fp32 or bf16")
        channels_last = convolves if layout == "auto" else layout == "channels-last"
        return cls(device, precision, channels_last, deterministic)

    def place(self, model: nn.Module) -> nn.Module:
        """The model, moved to the device and into the layout."""
        model = model.to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def inputs(self, batch: Any) -> Any:
        """A batch in the layout (images only: four dimensions)."""
        if self.channels_last and isinstance(batch, Tensor) and batch.ndim == 4:
            return batch.contiguous(memory_format=torch.channels_last)
        return batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, a forward pass runs in the chosen precision."""
        if self.precision != "bf16":
            return nullcontext()
        # no cache of cast weights: a captured graph must cast them anew at every replay
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @contextmanager
    def backend(self) -> Iterator[None]:
        """Inside, PyTorch's process-wide switches are as chosen; afterwards as they were."""
        if self.device.type == "cuda" and self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        tf32 = self.precision == "tf32"
        before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark)
        strict = torch.are_deterministic_algorithms_enabled()
        try:
            if self.device.type == "cuda":
                cudnn.allow_tf32 = matmul.allow_tf32 = tf32
                cudnn.deterministic, cudnn.benchmark = self.deterministic, False
            torch.use_deterministic_algorithms(strict or self.deterministic)
            yield
        finally:
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
            torch.use_deterministic_algorithms(strict)

    def describe(self) -> dict[str, Any]:
        """Plain values, for the record of a run."""
        layout = "channels-last" if self.channels_last else "contiguous"
        return {
            "device": self.device.type,
            "precision": self.precision,
            "layout": layout,
            "deterministic": self.deterministic,
        }
