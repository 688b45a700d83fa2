"""One look for all figures, and files that depend on nothing but the numbers drawn.

matplotlib is an extra, imported here and nowhere else but for its types. Figures are made without pyplot, so there
is no global state, no display, and nothing to close.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfac.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedfac",  # else the ids in the file are drawn anew every time
}
DPI = 110


def require() -> None:
    """Fail with the way out when matplotlib is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "figures are drawn by matplotlib, which is not installed: pip install 'fedfac[studies]'"
        ) from error


def style() -> AbstractContextManager[None]:
    """Inside, figures are drawn and saved in our look."""
    require()
    import matplotlib

    return matplotlib.rc_context(STYLE)


def panels(
    rows: int = 1, columns: int = 1, *, width: float = 3.2, height: float = 2.8, **sharing: Any
) -> tuple[Figure, npt.NDArray[np.object_]]:
    """A figure and its axes as an array (rows, columns); ``sharing`` is ``sharex=``, ``sharey=``."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def panel(*, width: float = 4.8, height: float = 3.2) -> tuple[Figure, Axes]:
    """A figure with a single pair of axes."""
    figure, axes = panels(width=width, height=height)
    return figure, axes[0, 0]


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    """What the axes show."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)


def save(figure: Figure, folder: Path, name: str) -> None:
    """``name.png`` and ``name.svg``, the same bytes for the same numbers."""
    figure.savefig(folder / f"{name}.png", dpi=DPI, metadata={"Software": None})
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
