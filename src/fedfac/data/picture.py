"""Pictures of a partition: how many samples of each class every client has, in a terminal and as a PNG file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from fedfac.data.partition import Index
from fedfac.errors import ConfigError, DataError

Counts = npt.NDArray[np.int64]  # clients × classes


def counts(parts: Sequence[Index], labels: npt.NDArray[np.integer], classes: int) -> Counts:
    """How many samples of each class every client has (clients × classes).

    >>> counts([np.array([0, 1]), np.array([2])], np.array([1, 1, 0]), classes=3).tolist()
    [[0, 2, 0], [1, 0, 0]]
    """
    labels = np.asarray(labels)
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(f"there are labels from {labels.min()} to {labels.max()}; allowed: 0..{classes - 1}")
    table = [np.bincount(labels[part], minlength=classes) for part in parts]
    return np.array(table, dtype=np.int64).reshape(len(table), classes)


def evenly(n: int, at_most: int) -> list[int]:
    """At most that many of the numbers 0..n-1, evenly spaced, with both ends.

    >>> evenly(3, 5), evenly(101, 5)
    ([0, 1, 2], [0, 25, 50, 75, 100])
    """
    return [round(i) for i in np.linspace(0, n - 1, min(n, at_most))]


def _merged(table: Counts, names: Sequence[str], at_most: int) -> tuple[Counts, list[str], int]:
    """Neighbouring classes added up until there are no more than that many columns; and how many make one."""
    each = -(-len(names) // at_most)
    starts = np.arange(0, len(names), each)
    return np.add.reduceat(table, starts, axis=1), [names[i] for i in starts.tolist()], each


def _class_names(table: Counts, names: Sequence[str] | None) -> list[str]:
    if names is not None and len(names) != table.shape[1]:
        raise DataError(f"{len(names)} class names for {table.shape[1]} classes")
    return [str(k) for k in range(table.shape[1])] if names is None else [_printable(name) for name in names]


def _check(table: Counts, names: Sequence[str]) -> None:
    if table.ndim != 2 or 0 in table.shape:
        raise DataError(f"counts of shape {table.shape} cannot be shown; they must be clients × classes, one at least")
    if len(names) != len(table):
        raise DataError(f"{len(names)} client names for counts of {len(table)} clients")


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


# --- in a terminal -------------------------------------------------------------------------------------------------

ROWS = 40
_SHADES = "·░▒▓█"
_ASCII_SHADES = ".-+*#"
_NAME_WIDTH = 16
_HEADER_HEIGHT = 10


def terminal(
    table: Counts, names: Sequence[str], class_names: Sequence[str] | None = None, *, rows: int = ROWS
) -> RenderableType:
    """A heat map for ``rich``: clients down (at most ``rows``, evenly chosen), classes across."""
    table = np.asarray(table)
    _check(table, names)
    return _HeatMap(table, names, _class_names(table, class_names), rows)


def terminal_sizes(sizes: Sequence[int], names: Sequence[str], *, rows: int = ROWS) -> RenderableType:
    """Sizes as bars, for data without classes."""
    _check(np.asarray(sizes)[:, None], names)
    return _Bars(list(sizes), names, rows)


@dataclass(frozen=True)
class _HeatMap:
    table: Counts
    names: Sequence[str]
    class_names: Sequence[str]
    rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = evenly(len(self.table), self.rows)
        labels, margin = _row_labels(self.names, shown)
        sides = _sides(self.table[shown])
        room = options.max_width - margin - 2
        if room - len(sides[0]) < len(self.class_names) <= room:
            sides = [""] * len(sides)  # rather every class than the sums
        table, class_names, each = _merged(self.table[shown], self.class_names, max(room - len(sides[0]), 1))
        fits = [w for w, most in ((3, 16), (2, 40)) if len(class_names) <= min(most, (room - len(sides[0])) // w)]
        width = max(fits, default=1)
        header = list(_header(class_names, width))
        for line in header[:-1]:
            yield _line(Text(" " * (margin + 2) + line, style="bold"))
        yield _line(Text(f"{'client':>{margin}}  {header[-1]}{sides[0]}", style="bold"))
        shades = _ASCII_SHADES if options.ascii_only else _SHADES
        for label, row, side in zip(labels, _levels(table), sides[1:], strict=True):
            yield _line(Text(f"{label}  {''.join(_cell(shades[level], width) for level in row)}{side}"))
        yield from self._notes(shades, int(table.max()), len(shown), each)

    def _notes(self, shades: str, highest: int, shown: int, each: int) -> Iterator[Text]:
        limits = [highest * sixteenths // 16 for sixteenths in (1, 4, 9, 16)]
        keys = [f"{shades[0]} none"]
        keys += [f"{shades[i + 1]} to {n:,}" for i, n in enumerate(limits) if n > (limits[i - 1] if i else 0)]
        yield Text("samples in a cell: " + "  ".join(keys), style="dim")
        if shown < len(self.table):
            yield Text(f"{shown} of {len(self.table):,} clients shown, evenly chosen", style="dim")
        if each > 1:
            yield Text(f"a column is {each} neighbouring classes, of {len(self.class_names)}", style="dim")


@dataclass(frozen=True)
class _Bars:
    sizes: Sequence[int]
    names: Sequence[str]
    rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = evenly(len(self.sizes), self.rows)
        labels, margin = _row_labels(self.names, shown)
        right = max(len(f"{self.sizes[i]:,}") for i in shown)
        room = max(min(options.max_width - margin - right - 4, 60), 1)
        block = "#" if options.ascii_only else "█"
        for label, i in zip(labels, shown, strict=True):
            bar = block * round(room * self.sizes[i] / max(*self.sizes, 1))
            yield _line(Text(f"{label}  {self.sizes[i]:>{right},}  {bar}"))
        if len(shown) < len(self.sizes):
            yield Text(f"{len(shown)} of {len(self.sizes):,} clients shown, evenly chosen", style="dim")


def _row_labels(names: Sequence[str], shown: Sequence[int]) -> tuple[list[str], int]:
    """The clients' names, all of one width, and that width."""
    plain = [_printable(str(names[i])) for i in shown]
    width = min(max(len("client"), *map(cell_len, plain)), _NAME_WIDTH)
    short = [name if cell_len(name) <= width else set_cell_size(name, width - 1) + "…" for name in plain]
    return [" " * (width - cell_len(name)) + name for name in short], width


def _sides(table: Counts) -> list[str]:
    """To the right of the cells: a heading, then each client's samples and how many classes they are of."""
    totals = ["samples", *(f"{n:,}" for n in table.sum(1))]
    width = max(map(len, totals))
    seen = ["classes", *map(str, np.count_nonzero(table, axis=1))]
    return [f"  {total:>{width}}  {number:>7}" for total, number in zip(totals, seen, strict=True)]


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "crop"
    return text


def _cell(shade: str, width: int) -> str:
    return shade * 2 + " " if width == 3 else shade * width


def _levels(table: Counts) -> Counts:
    """0 for nothing, 1 to 4 by the square root of the count, so that small counts can be told apart too."""
    sixteenths = 16 * table / max(int(table.max()), 1)
    return np.searchsorted([0, 1, 4, 9], sixteenths, side="left")


def _header(names: Sequence[str], width: int) -> Iterator[str]:
    """Class names above their columns; written downwards if they are too long."""
    room = max(width - 1, 1)
    if all(cell_len(name) <= room for name in names):
        yield "".join(name.ljust(width) for name in names)
        return
    short = [name[:_HEADER_HEIGHT] for name in names]
    height = max(map(len, short))
    for i in range(height):
        yield "".join(set_cell_size(name.rjust(height)[i], width) for name in short)


# --- as a PNG file -------------------------------------------------------------------------------------------------

COLUMNS = 120
_CLASSES = 150
_INK, _FAINT, _GRID, _BUBBLE = "#222222", "#666666", "#e4e4e4", "#2f6db3"
_FONT, _TITLE_FONT = 24, 36
_GAP = 14


def save_png(
    table: Counts,
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    title: str = "Samples by client and class",
    subtitle: str = "",
    columns: int = COLUMNS,
) -> None:
    """A bubble chart: clients across (at most ``columns``, evenly chosen), classes down, area ~ count."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"the picture is to go to {path}; only PNG can be written: end the name in .png")
    table = np.asarray(table)
    names = [str(i) for i in range(len(table))] if names is None else names
    _check(table, names)
    chart = _Chart.of(table, names, _class_names(table, class_names), columns)
    notes = [_printable(subtitle)] if subtitle else []
    drawn = BytesIO()
    chart.draw(_printable(title), notes).save(drawn, format="PNG", optimize=True)
    try:
        path.write_bytes(drawn.getvalue())
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror}") from error


@dataclass(frozen=True)
class _Chart:
    """What is drawn, and the size of a cell."""

    table: Counts
    names: list[str]
    class_names: list[str]
    notes: list[str]
    cell: tuple[float, float]

    @classmethod
    def of(cls, table: Counts, names: Sequence[str], class_names: Sequence[str], columns: int) -> _Chart:
        """Thin out clients and add up classes where there are too many."""
        shown = evenly(len(table), columns)
        notes = [f"{len(shown)} of {len(table):,} clients shown, evenly chosen"] if len(shown) < len(table) else []
        total = len(class_names)
        table, class_names, each = _merged(table[shown], class_names, _CLASSES)
        notes += [f"a row is {each} neighbouring classes, of {total}"] if each > 1 else []
        width = min(max(2400 / len(shown), 20), 64)
        height = min(max(1800 / len(class_names), 12), 64, width * 1.5)
        cell = min(width, height * 1.5), height
        short = [_shortened(_printable(str(names[i])), 16) for i in shown]
        return cls(table, short, [_shortened(name, 24) for name in class_names], notes, cell)

    def draw(self, title: str, notes: list[str]) -> Image.Image:
        """The whole picture."""
        notes = notes + self.notes
        down = _ticks_down(self.names, self.cell[0])
        left = _FONT + max(_width(name) for name in self.class_names) + 3 * _GAP
        top = _TITLE_FONT + (_FONT + 8) * len(notes) + 3 * _GAP
        right, bottom = left + len(self.names) * self.cell[0], top + len(self.class_names) * self.cell[1]
        below = bottom + _GAP + (max(_width(name) for name in self.names) if down else _FONT) + _GAP
        sizes = _legend_sizes(int(self.table.max()))
        side = right + 2 * _GAP
        across = max(side + self._legend_width(sizes), max(_width(note) for note in ["", *notes]) + 3 * _GAP)
        across = max(across, _width(title, _TITLE_FONT) + 3 * _GAP)
        pen = _Pen(across, max(below + _FONT + _GAP, top + self._legend_height(sizes)))
        pen.text(_GAP, _GAP, title, anchor="la", size=_TITLE_FONT)
        for i, note in enumerate(notes):
            pen.text(_GAP, _TITLE_FONT + 2 * _GAP + i * (_FONT + 8), note, anchor="la", fill=_FAINT)
        self._axes(pen, left, top, right, bottom, down)
        pen.text((left + right) / 2, below, "client", anchor="ma")
        if bottom - top > _width("class"):
            pen.text_up(_GAP + _FONT / 2, (top + bottom) / 2, "class")
        self._bubbles(pen, left, top)
        self._legend(pen, side, top, sizes)
        return pen.image

    def _axes(self, pen: _Pen, left: float, top: float, right: float, bottom: float, down: bool) -> None:
        """Grid lines through all cells, and labels at as many as there is room for."""
        width, height = self.cell
        for k in range(len(self.class_names)):
            pen.line(left, top + (k + 0.5) * height, right, top + (k + 0.5) * height)
        for k in range(0, len(self.class_names), _step(_FONT * 1.1, height)):
            pen.text(left - _GAP / 2, top + (k + 0.5) * height, self.class_names[k], anchor="rm")
        for i in range(0, len(self.names), self._client_step(down)):
            x = left + (i + 0.5) * width
            pen.line(x, top, x, bottom + 4)
            if down:
                pen.text_up(x, bottom + _GAP / 2 + _width(self.names[i]) / 2, self.names[i])
            else:
                pen.text(x, bottom + _GAP / 2, self.names[i], anchor="ma")
        pen.line(left, bottom, right, bottom, fill=_FAINT)
        pen.line(left, top, left, bottom, fill=_FAINT)

    def _client_step(self, down: bool) -> int:
        return _step(_FONT * 1.1 if down else max(map(_width, self.names)) + 10, self.cell[0])

    def _bubbles(self, pen: _Pen, left: float, top: float) -> None:
        for i, k in np.argwhere(self.table > 0):
            x, y = left + (i + 0.5) * self.cell[0], top + (k + 0.5) * self.cell[1]
            pen.bubble(x, y, self._diameter(int(self.table[i, k])))

    def _diameter(self, count: int) -> float:
        """Area ~ count; the largest all but fills its cell, and the smallest can still be seen."""
        share = count / max(int(self.table.max()), 1)
        return max(0.94 * min(self.cell) * math.sqrt(share), 3.0)

    def _legend(self, pen: _Pen, left: float, top: float, sizes: Sequence[int]) -> None:
        pen.text(left, top, "samples", anchor="la")
        middle = left + min(self.cell) / 2
        for i, count in enumerate(sizes):
            y = top + _FONT + _GAP + (i + 0.5) * self._legend_row()
            pen.bubble(middle, y, self._diameter(count))
            pen.text(middle + min(self.cell) / 2 + _GAP, y, f"{count:,}", anchor="lm")

    def _legend_row(self) -> float:
        return max(min(self.cell), _FONT) + 6

    def _legend_height(self, sizes: Sequence[int]) -> float:
        return _FONT + 2 * _GAP + len(sizes) * self._legend_row()

    def _legend_width(self, sizes: Sequence[int]) -> float:
        numbers = max((_width(f"{count:,}") for count in sizes), default=0.0)
        return max(_width("samples"), min(self.cell) + _GAP + numbers) + 2 * _GAP


class _Pen:
    """A white sheet and what is drawn on it, in pixels."""

    def __init__(self, width: float, height: float) -> None:
        self.image = Image.new("RGB", (round(width), round(height)), "white")
        self.on = ImageDraw.Draw(self.image)

    def line(self, x0: float, y0: float, x1: float, y1: float, *, fill: str = _GRID) -> None:
        """A thin line."""
        self.on.line([round(v) for v in (x0, y0, x1, y1)], fill=fill)

    def bubble(self, x: float, y: float, diameter: float) -> None:
        """A filled circle around a point, with smooth edges (Pillow's own are jagged, and of whole pixels only)."""
        reach = math.ceil(diameter / 2) + 1
        left, top = math.floor(x) - reach, math.floor(y) - reach
        centres = np.arange(2 * reach + 1) + 0.5
        distance = np.hypot(centres + left - x, (centres + top - y)[:, None])
        covered = np.clip(diameter / 2 - distance + 0.5, 0, 1)
        self.image.paste(_BUBBLE, (left, top), Image.fromarray(np.rint(255 * covered).astype(np.uint8)))

    def text(self, x: float, y: float, text: str, *, anchor: str, size: int = _FONT, fill: str = _INK) -> None:
        """Text at a point; ``anchor`` is Pillow's."""
        self.on.text((x, y), text, font=_font(size), anchor=anchor, fill=fill)

    def text_up(self, x: float, y: float, text: str) -> None:
        """Text that runs upwards, centred on a point."""
        mask = Image.new("L", (round(_width(text)) + 4, 2 * _FONT), 0)
        ImageDraw.Draw(mask).text((mask.width / 2, _FONT), text, font=_font(_FONT), anchor="mm", fill=255)
        turned = mask.transpose(Image.Transpose.ROTATE_90)
        self.image.paste(_INK, (round(x - turned.width / 2), round(y - turned.height / 2)), turned)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _width(text: str, size: int = _FONT) -> float:
    return _font(size).getlength(text)


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _ticks_down(names: Sequence[str], cell: float) -> bool:
    """Whether the clients' names are written upwards: if side by side most of them would be left out."""
    return not all(name.isdecimal() for name in names) and max(map(_width, names)) + 10 > cell


def _step(needed: float, cell: float) -> int:
    """Label every so many cells, in ones, twos, fives, tens, ..., so that a label has the room it needs."""
    tens = 1
    while True:
        for digit in (1, 2, 5):
            if digit * tens * cell >= needed:
                return digit * tens
        tens *= 10


def _legend_sizes(highest: int) -> list[int]:
    """Round numbers up to the highest count, each at most a quarter of the one before.

    >>> _legend_sizes(57), _legend_sizes(3)
    ([50, 10, 2], [2])
    """
    sizes: list[int] = []
    limit = float(highest)
    while limit >= 1 and len(sizes) < 4:
        tens = 10 ** math.floor(math.log10(limit))
        sizes.append(max(digit * tens for digit in (1, 2, 5) if digit * tens <= limit))
        limit = sizes[-1] / 4
    return sizes
