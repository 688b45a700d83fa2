"""The report: one self-contained HTML page for a run or a comparison.

``facts`` reads run directories into plain values, ``page`` writes them into one file, ``assets/`` is what the browser
runs. The page needs no network, no data set and no PyTorch; it is made from the run directories alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedfac.disk import FOR_OTHERS, atomic_write, disk_errors
from fedfac.report.facts import gather
from fedfac.report.page import html

__all__ = ["gather", "html", "write"]


def write(folders: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of some runs and comparisons; by default ``report.html`` beside the first of them.

    Returns where it is. A run may still be training: the page shows the rounds that are done. The run's own files are
    private; the page is made to be shown, so it gets the permissions that the umask leaves to new files.
    """
    several = [folders] if isinstance(folders, str | Path) else list(folders)
    facts = gather([Path(folder) for folder in several])
    path = Path(several[0]) / "report.html" if out is None else Path(out)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, html(facts), mode=FOR_OTHERS)
    return path
