"""What several test files need. Nothing here calls fedfac: these are the judges."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

# the matrices here are small, and tests run side by side: more threads would only wait for each other
torch.set_num_threads(1)
threadpool_limits(1)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Type, shape and every bit of a tensor: tells 0.0 from -0.0, and a NaN equals itself."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(raw.numpy())


def bitwise(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two states agree in names, types, shapes and bits."""
    return {name: bits(t) for name, t in a.items()} == {name: bits(t) for name, t in b.items()}


def counted(shapes: Mapping[str, tuple[int, ...]], start: int = 0) -> dict[str, Tensor]:
    """A state in which no number occurs twice: start, start + 1, ..."""
    state = {}
    for name, shape in shapes.items():
        n = torch.Size(shape).numel()
        state[name] = torch.arange(start, start + n, dtype=torch.float64).reshape(shape)
        start += n
    return state


def message(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the exception that ``call`` raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail, rather than hang, when the body takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def curve(line: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The x and y values of a matplotlib line, as they are drawn."""
    return np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)


def drawn(axes: Any) -> int:
    """How many things with finite numbers a matplotlib ``Axes`` shows: lines, bars, points, images."""
    lines = [line.get_xydata() for line in axes.lines]
    points = [np.asarray(c.get_offsets(), dtype=float) for c in axes.collections if len(c.get_offsets())]
    bars = [np.array([p.get_height()]) for p in axes.patches if hasattr(p, "get_height")]
    images = [np.asarray(i.get_array(), dtype=float) for i in axes.images]
    return sum(bool(a.size) and bool(np.isfinite(a).all()) for a in map(np.asarray, [*lines, *points, *bars, *images]))


def heights(axes: Any) -> list[float]:
    """Of all bars, in the order in which they were drawn."""
    return [float(patch.get_height()) for patch in axes.patches]


def check_readable(figure: Any) -> None:
    """Every panel of a matplotlib figure has labelled axes and shows something; nothing is drawn twice over."""
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert panels
    for axes in panels:
        assert axes.get_xlabel(), f"no x label: {axes.get_title()!r}"
        assert axes.get_ylabel(), f"no y label: {axes.get_title()!r}"
        assert drawn(axes), f"nothing is drawn: {axes.get_title()!r}"
        names = axes.get_legend_handles_labels()[1]
        assert len(names) == len(set(names)), f"a name is twice in the legend: {names}"
    titles = [axes.get_title() for axes in panels]
    assert len(titles) == len(set(titles)), f"two panels have one title: {titles}"
