"""Random numbers inside a forward pass (dropout and the like), from a stream of the client's own.

PyTorch draws them from one global generator. With several lanes the order of the draws, and so the result,
would depend on timing. A model is therefore tried once: one that draws nothing runs as it is; the draws of
one that uses the usual functions are routed to the client's generator; any other model (an LSTM with
dropout inside, a compiled operator) takes turns with the global generator, set to the client's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Seeded = Callable[[torch.Generator], AbstractContextManager[Any]]


def silent(generator: torch.Generator) -> AbstractContextManager[Any]:  # noqa: ARG001
    """For models that draw nothing."""
    return nullcontext()


class Routed(TorchFunctionMode):
    """Inside, dropout and the usual random functions draw from ``generator``; it holds for one thread only."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Redirect what is known, pass on the rest."""
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return _dropout(_DROPOUTS[func], self.generator, *args, **given)
        if func in _TAKES_GENERATOR and given.get("generator") is None:
            given["generator"] = self.generator
        return func(*args, **given)


@contextmanager
def taking_turns(generator: torch.Generator) -> Iterator[None]:
    """Inside, the device's global generator continues the client's stream; one lane at a time."""
    device = generator.device
    shared = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    with _TURN:
        before = shared.get_state()
        shared.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(shared.get_state())
            shared.set_state(before)


def how_it_draws(forward: Callable[[], Any], device: torch.device) -> Seeded:
    """Try a training forward and say how its random numbers are seeded."""
    if not _moves_global(forward, device, silent):
        return silent
    return Routed if not _moves_global(forward, device, Routed) else taking_turns


def _moves_global(forward: Callable[[], Any], device: torch.device, seeded: Seeded) -> bool:
    outer = torch.Generator(device=device)
    with taking_turns(outer):
        before = outer.get_state()  # what the global generator now holds
        with torch.no_grad(), seeded(torch.Generator(device=device)):
            forward()
    return not torch.equal(before, outer.get_state())


def _dropout(
    feature_dims: int | None,
    generator: torch.Generator,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Zero with probability p and scale by 1/(1-p); whole channels if ``feature_dims`` is given."""
    if not training or p == 0:
        return input
    shape = input.shape
    if feature_dims is not None:
        batched = input.ndim == feature_dims + 2 or (feature_dims, input.ndim) == (2, 3)  # PyTorch: (N, C, L)
        channels = 2 if batched else 1
        shape = input.shape[:channels] + (1,) * (input.ndim - channels)
    keep = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p, generator=generator)
    if p < 1:
        keep.div_(1 - p)
    return input.mul_(keep) if inplace else input * keep


_TURN = threading.RLock()
_DROPOUTS: dict[Any, int | None] = {F.dropout: None, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
_TAKES_GENERATOR = frozenset(
    {
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        Tensor.bernoulli_,
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.random_,
        Tensor.exponential_,
        Tensor.multinomial,
    }
)
