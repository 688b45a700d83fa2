"""Tables of a comparison: for the terminal, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfac.comparison import LOWER_IS_BETTER, SIGNIFICANT, Comparison, figures, p_value

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
    "Accuracy over all test samples: mean of the last 10 evaluations, and best mean of 10 in a row (picked on test "
    "data, as the paper does). Mean, std, worst decile (mean of the worst tenth) and Jain's index are over clients, "
    "last evaluation. ± is the standard deviation over seeds. Best in bold; * marks methods whose clients do worse "
    "than those of the best one (one-sided Wilcoxon signed-rank test, paired by seed and client, p < 0.05)."
)
PLAIN_NOTE = "Last evaluation, over all test samples. ± is the standard deviation over seeds. Best in bold."
VALIDATION_NOTE = " validation: mean of the last 10 evaluations on validation samples, the ones to choose by."
NEWCOMERS_NOTE = (
    " newcomers: over all test samples of the clients that were kept out of training, each with the model that it "
    "gets by adapting as the method prescribes, last round."
)
TIME_NOTE = " time: seconds a round relative to FedAvg's, methods alternating."


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


def blocks(comparison: Comparison, times: Mapping[str, float] | None = None) -> list[Block]:
    """A block per setting."""
    return [_block(comparison, setting, times or {}) for setting in comparison.settings]


def _block(comparison: Comparison, setting: str, times: Mapping[str, float]) -> Block:
    found = {m: [f for cell in comparison.of(setting, m) if (f := figures(cell))] for m in comparison.methods}
    shown = next((fs[0] for fs in found.values() if fs), {})
    columns = CLASSIFICATION if "last" in shown else tuple(k for k, v in shown.items() if isinstance(v, float))
    if "last" in shown:
        extra = [c for c in ("validation", "newcomers_accuracy") if any(c in f for fs in found.values() for f in fs)]
        columns = (*columns, *extra)
    values = {m: {c: [float(f[c]) for f in fs if c in f] for c in columns} for m, fs in found.items() if fs}
    means = {m: {c: statistics.fmean(v) for c, v in row.items() if v} for m, row in values.items()}
    if times:
        columns = (*columns, "time")
        for method, row in means.items():
            if method in times:
                row["time"] = times[method]
    winners = {
        c: (min if c in LOWER_IS_BETTER else max)((row[c] for row in means.values() if c in row), default=None)
        for c in columns
    }
    worse = _significantly_worse(comparison, setting, means)
    rows: dict[str, dict[str, Entry]] = {}
    for method, row in means.items():
        rows[method] = {}
        for column, mean in row.items():
            several = values[method].get(column, [])
            rows[method][column] = Entry(
                mean,
                statistics.stdev(several) if len(several) > 1 else None,
                best=len(means) > 1 and column != "time" and mean == winners[column],
                worse=column == columns[0] and method in worse,
            )
    models = {m: str(fs[0].get("model", "")) for m, fs in found.items() if fs}
    return Block(setting, columns, rows, models)


def _significantly_worse(comparison: Comparison, setting: str, means: Mapping[str, Mapping[str, float]]) -> set[str]:
    scored = {m: row["last"] for m, row in means.items() if "last" in row}
    if len(scored) < 2:
        return set()
    best = max(scored, key=lambda m: scored[m])
    winner = comparison.of(setting, best)
    return {m for m in scored if m != best and p_value(comparison.of(setting, m), winner) < SIGNIFICANT}


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
        {"setting": c.setting, "method": c.method, "seed": c.seed, "rounds": c.config.train.rounds, **figures(c)}
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
                method: {"model": block.models[method]}
                | {c: {"mean": e.mean, "std": e.spread, "best": e.best, "worse": e.worse} for c, e in row.items()}
                for method, row in block.rows.items()
            },
        }
        for block in tables
    ]


def note(tables: Sequence[Block]) -> str:
    """What the columns mean."""
    columns = {column for block in tables for column in block.columns}
    words = NOTE if "last" in columns else PLAIN_NOTE
    words += VALIDATION_NOTE if "validation" in columns else ""
    if {"newcomers_accuracy", "newcomers_loss"} & columns:
        words += NEWCOMERS_NOTE
    return words + (TIME_NOTE if "time" in columns else "")


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "%_&#$" else c for c in text)
