"""Tables of a comparison: for the terminal, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedfac import marks
from fedfac.comparison import LOWER_IS_BETTER, Comparison, figures
from fedfac.evaluate import LEAST, WINDOW

TITLES = {
    "last": "last 10",
    "best": "best 10",
    "mean": "client mean",
    "std": "client std",
    "worst_decile": "worst decile",
    "jain": "Jain",
    "loss": "loss",
    "newcomers_accuracy": "newcomers",
    "newcomers_loss": "newcomers' loss",
    "time": "time",
}
CLASSIFICATION = ("last", "best", "mean", "std", "worst_decile", "jain")
NOTE = (
    "Accuracy over all test samples. last 10: the mean of {window}; best 10: the best such mean of ten consecutive "
    "rounds (picked on test data, as the paper does). Mean, std, worst decile (mean of the worst tenth) and Jain's "
    "index are over clients, last evaluation. ± is the standard deviation over seeds. Best in bold; {marks}"
)
MARKS = (
    "* is worse than the best by a paired t-test over {seeds} seeds (two-sided, p < 0.05 by Holm for all pairs of "
    "methods): of tables of equal methods at most one in twenty has a mark. The first mark takes a difference of "
    "{least:.1f} times its standard deviation over seeds."
)
UNMARKED = "no difference is marked, because that takes three seeds."
PLAIN_NOTE = "Last evaluation, over all test samples. ± is the standard deviation over seeds. Best in bold."
VALIDATION_NOTE = " validation: the mean of the same evaluations on validation samples, the ones to choose by."
NEWCOMERS_NOTE = (
    " newcomers: over all test samples of the clients that were kept out of training, each with the model that it "
    "gets by adapting as the method prescribes, last round."
)
TIME_NOTE = " time: seconds a round relative to FedAvg's, methods alternating."


class Window(NamedTuple):
    """So many evaluations, of the rounds from the first to the last."""

    evaluations: int
    first: int
    last: int


@dataclass(frozen=True)
class Entry:
    """One figure of one method: mean and standard deviation over seeds."""

    mean: float
    spread: float | None
    best: bool
    worse: bool = False

    def text(self, bold: tuple[str, str], plus_minus: str = " ± ") -> str:
        """The figure as it is printed."""
        number = f"{self.mean:.3f}" + ("" if self.spread is None else f"{plus_minus}{self.spread:.3f}")
        return f"{bold[0]}{number}{bold[1]}" if self.best else number + ("*" if self.worse else "")


@dataclass(frozen=True)
class Block:
    """The table of one setting."""

    setting: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Entry]]
    models: Mapping[str, str]  # which model was evaluated
    windows: Mapping[str, frozenset[Window]]  # what the headlines of a method's runs are the means of
    seeds: int  # that all methods have: by them they are told apart


def blocks(comparison: Comparison, times: Mapping[str, float] | None = None) -> list[Block]:
    """A block per setting."""
    return [_block(comparison, setting, times or {}) for setting in comparison.settings]


def _block(comparison: Comparison, setting: str, times: Mapping[str, float]) -> Block:
    cells = {m: {c.seed: f for c in comparison.of(setting, m) if (f := figures(c))} for m in comparison.methods}
    found = {m: list(own.values()) for m, own in cells.items() if own}
    columns = _columns([f for fs in found.values() for f in fs])
    values = {m: {c: [float(f[c]) for f in fs if c in f] for c in columns} for m, fs in found.items()}
    if times:
        columns = (*columns, "time")
        values = {m: row | ({"time": [times[m]]} if m in times else {}) for m, row in values.items()}
    headlines = {m: {seed: float(f["last"]) for seed, f in own.items() if "last" in f} for m, own in cells.items()}
    scores = {m: own for m, own in headlines.items() if own}
    return Block(
        setting,
        columns,
        _rows(values, columns, marks.worse_than_best(scores)),
        {m: str(fs[0].get("model", "")) for m, fs in found.items()},
        {m: frozenset(_window_of(f) for f in fs if "last" in f) for m, fs in found.items()},
        len(marks.common_seeds(scores)),
    )


def _rows(
    values: Mapping[str, Mapping[str, Sequence[float]]], columns: Sequence[str], worse: set[str]
) -> dict[str, dict[str, Entry]]:
    """Means and deviations of what every method has over its seeds; the best mean of a column is marked."""
    means = {m: {c: statistics.fmean(v) for c, v in row.items() if v} for m, row in values.items()}
    winners = {c: _winner(c, [row[c] for row in means.values() if c in row]) for c in columns}
    return {
        method: {
            column: Entry(
                mean,
                statistics.stdev(values[method][column]) if len(values[method][column]) > 1 else None,
                best=len(means) > 1 and column != "time" and mean == winners[column],
                worse=column == "last" and method in worse,
            )
            for column, mean in row.items()
        }
        for method, row in means.items()
    }


def _winner(column: str, means: Sequence[float]) -> float | None:
    return (min if column in LOWER_IS_BETTER else max)(means, default=None)


def _window_of(found: Mapping[str, Any]) -> Window:
    return Window(found["evaluations"], *found["window"])


def _columns(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What can be shown of these figures."""
    shown = found[0] if found else {}
    if "last" not in shown:
        return tuple(k for k, v in shown.items() if isinstance(v, float))
    return CLASSIFICATION + tuple(c for c in ("validation", "newcomers_accuracy") if any(c in f for f in found))


def title(column: str) -> str:
    """A column's heading."""
    return TITLES.get(column, column)


def markdown(tables: Sequence[Block]) -> str:
    """Markdown, a table per setting."""
    lines: list[str] = []
    for block in tables:
        if block.setting:
            lines += [f"### {block.setting}", ""]
        lines.append(f"| method | model | {' | '.join(title(c) for c in block.columns)} |")
        lines.append(f"|---|---|{'---:|' * len(block.columns)}")
        for method, row in block.rows.items():
            cells = [row[c].text(("**", "**")) if c in row else "-" for c in block.columns]
            lines.append(f"| {method} | {block.models[method]} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, note(tables), ""])


def latex(tables: Sequence[Block]) -> str:
    """LaTeX (booktabs), a tabular per setting."""
    lines: list[str] = []
    for block in tables:
        if block.setting:
            lines.append(f"% {block.setting}")
        lines += [f"\\begin{{tabular}}{{ll{'r' * len(block.columns)}}}", "\\toprule"]
        lines += [" & ".join(["method", "model", *(title(c) for c in block.columns)]) + " \\\\", "\\midrule"]
        for method, row in block.rows.items():
            cells = [row[c].text(("\\textbf{", "}"), " $\\pm$ ") if c in row else "--" for c in block.columns]
            lines.append(" & ".join([_escaped(method), block.models[method], *cells]) + " \\\\")
        lines += ["\\bottomrule", "\\end{tabular}", ""]
    legend = _escaped(note(tables)).replace("±", "$\\pm$")
    return "\n".join([*lines, f"% {legend}", ""])


def csv_text(comparison: Comparison) -> str:
    """One row per cell, full precision."""
    rows = [
        {"setting": c.setting, "method": c.method, "seed": c.seed, "rounds": c.config.train.rounds, **_flat(figures(c))}
        for c in comparison.cells
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def plain(tables: Sequence[Block]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [
        {
            "setting": block.setting,
            "methods": {
                method: {"model": block.models[method], **_averaged(block.windows[method])}
                | {c: {"mean": e.mean, "std": e.spread, "best": e.best, "worse": e.worse} for c, e in row.items()}
                for method, row in block.rows.items()
            },
        }
        for block in tables
    ]


def note(tables: Sequence[Block]) -> str:
    """What the columns mean."""
    columns = {column for block in tables for column in block.columns}
    windows = {window for block in tables for own in block.windows.values() for window in own}
    words = NOTE.format(window=_window(windows), marks=_marks(tables)) if "last" in columns else PLAIN_NOTE
    words += VALIDATION_NOTE if "validation" in columns else ""
    if {"newcomers_accuracy", "newcomers_loss"} & columns:
        words += NEWCOMERS_NOTE
    return words + (TIME_NOTE if "time" in columns else "")


def _window(windows: set[Window]) -> str:
    """What the headlines are the means of, in words."""
    if len(windows) != 1:
        return "the evaluations of each run's last ten rounds (the runs do not have the same ones)"
    (window,) = windows
    words = f"{window.evaluations} evaluation{'s' * (window.evaluations > 1)} of rounds {window.first}-{window.last}"
    if window.evaluations < LEAST:
        return f"{words} (there are no more)"
    sparse = window.last - window.first >= WINDOW
    return words + " (fewer than three are of the last ten rounds: evaluate more often)" * sparse


def _marks(tables: Sequence[Block]) -> str:
    """What the marks mean, and from which difference on there are any, in words."""
    kinds = [(len(block.rows), block.seeds) for block in tables if block.seeds >= marks.FEWEST_SEEDS]
    if not kinds:
        return UNMARKED
    seeds = sorted({seeds for _, seeds in kinds})
    return MARKS.format(seeds=" or ".join(map(str, seeds)), least=min(marks.least_difference(*kind) for kind in kinds))


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as the cells of a row."""
    return {key: f"{value[0]}-{value[1]}" if key == "window" else value for key, value in found.items()}


def _averaged(windows: frozenset[Window]) -> dict[str, Any]:
    """The fewest evaluations that a method's headlines are the means of, and the rounds that these lie in."""
    if not windows:
        return {}
    return {
        "evaluations": min(window.evaluations for window in windows),
        "window": [min(window.first for window in windows), max(window.last for window in windows)],
    }


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "%_&#$" else c for c in text)
