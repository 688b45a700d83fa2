"""Pictures of partitions: what they say is what was counted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import message
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.cells import cell_len
from rich.console import Console, RenderableType
from scipy import ndimage

from fedfac.data.partition import iid, pathological
from fedfac.data.picture import ROWS, counts, evenly, save_png, terminal, terminal_sizes
from fedfac.errors import ConfigError, DataError

Table = npt.NDArray[np.int64]


def printed(thing: RenderableType, width: int = 100, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=file, width=width, color_system=None).print(thing)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def numbered(n: int) -> list[str]:
    return [str(i) for i in range(n)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 7))
def test_counts_are_counts(seed: int, n: int, classes: int) -> None:
    labels = np.random.default_rng(seed).integers(classes, size=n)
    parts = iid(labels, clients=min(n, 5), seed=seed)
    made = counts(parts, labels, classes)
    assert made.tolist() == [[sum(labels[i] == k for i in part) for k in range(classes)] for part in parts]
    assert made.dtype == np.int64


def test_counts_of_empty_clients_and_of_unseen_classes() -> None:
    assert counts([np.array([], dtype=np.int64)], np.array([0, 1]), 3).tolist() == [[0, 0, 0]]
    assert counts([], np.array([0, 1]), 3).shape == (0, 3)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0]])
def test_labels_out_of_range_are_refused(labels: list[int]) -> None:
    text = message(DataError, lambda: counts([np.array([0])], np.array(labels), 3))
    assert text == f"there are labels from {min(labels)} to {max(labels)}; allowed: 0..2"


@given(st.integers(1, 500), st.integers(1, 60))
def test_evenly_chosen_numbers_are_distinct_and_reach_both_ends(n: int, most: int) -> None:
    chosen = evenly(n, most)
    assert len(chosen) == min(n, most) == len(set(chosen))
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    if len(chosen) > 1:
        assert chosen[-1] == n - 1
        assert max(np.diff(chosen)) - min(np.diff(chosen)) <= 1


# --- in a terminal -------------------------------------------------------------------------------------------------


def test_a_heat_map_to_the_letter() -> None:
    table = np.array([[16, 0, 1], [1200, 75, 300], [675, 676, 76]])
    assert printed(terminal(table, ["ann", "bob", "eve"])) == [
        "client  0  1  2    samples  classes",
        "   ann  ░░ ·· ░░        17        2",
        "   bob  ██ ░░ ▒▒     1,575        3",
        "   eve  ▓▓ ██ ▒▒     1,427        3",
        "samples in a cell: · none  ░ to 75  ▒ to 300  ▓ to 675  █ to 1,200",
    ]


def test_a_terminal_without_blocks_gets_letters() -> None:
    lines = printed(terminal(np.array([[0, 1, 4, 9, 16]]), ["a"]), encoding="ascii")
    assert lines[1].startswith("     a  .. -- ++ ** ##")


def test_long_class_names_are_written_downwards() -> None:
    lines = printed(terminal(np.array([[1, 2]]), ["0"], ["cat", "automobiles"]))
    columns = ["".join(line.ljust(20)[i] for line in lines[:10]).strip() for i in (8, 11)]
    assert columns == ["cat", "automobile"]  # ten letters are enough


def test_many_clients_are_thinned_out_with_a_note() -> None:
    table = np.ones((101, 2), dtype=np.int64)
    lines = printed(terminal(table, numbered(101)))
    rows = [line.split()[0] for line in lines[1 : ROWS + 1]]
    assert (rows[0], rows[-1]) == ("0", "100")
    assert lines[-1] == "40 of 101 clients shown, evenly chosen"
    assert len(lines) == ROWS + 3
    assert not any("shown" in line for line in printed(terminal(table[:ROWS], numbered(ROWS))))


def test_sums_give_way_to_classes_and_classes_are_added_up_only_when_they_must() -> None:
    table = np.ones((2, 62), dtype=np.int64)
    wide, narrow, tiny = (printed(terminal(table, ["a", "b"]), width=w) for w in (100, 75, 60))
    assert wide[1].endswith("samples  classes")
    assert wide[2].count("█") == narrow[2].count("█") == 62
    assert "samples" not in narrow[1]
    assert tiny[2].count("█") == 31
    assert tiny[2].endswith("62       62")
    assert tiny[-1] == "a column is 2 neighbouring classes, of 62"
    assert tiny[-2] == "samples in a cell: · none  ▓ to 1  █ to 2"


NAMES = st.text(max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=8), st.lists(NAMES, min_size=1, max_size=70), st.integers(50, 150))
def test_any_names_fit_in_any_width(names: list[str], class_names: list[str], width: int) -> None:
    table = np.arange(len(names) * len(class_names)).reshape(len(names), -1)
    lines = printed(terminal(table, names, class_names), width=width)
    assert all(cell_len(line) <= width for line in lines)
    sizes = [int(row.sum()) for row in table]
    assert len(printed(terminal_sizes(sizes, names), width=width)) == len(names)


def test_names_are_no_markup() -> None:
    lines = printed(terminal(np.array([[1]]), ["[red]a[/b]"], ["x\n"]))
    assert "[red]a[/b]" in lines[-2]


def test_sizes_are_bars() -> None:
    assert printed(terminal_sizes([30, 0, 60], ["a", "b", "c"])) == [
        "     a  30  " + "█" * 30,
        "     b   0  ",
        "     c  60  " + "█" * 60,
    ]
    assert printed(terminal_sizes([0, 0], ["a", "b"]))[0] == "     a  0  "
    assert printed(terminal_sizes([1] * 50, numbered(50)))[-1] == "40 of 50 clients shown, evenly chosen"


@pytest.mark.parametrize(
    ("table", "names", "class_names", "text"),
    [
        (np.ones((2, 3)), ["a"], None, "1 client names for counts of 2 clients"),
        (np.ones((2, 3)), ["a", "b"], ["x"], "1 class names for 3 classes"),
        (np.ones((0, 3)), [], None, "counts of shape (0, 3) cannot be shown"),
        (np.ones((2, 0)), ["a", "b"], None, "counts of shape (2, 0) cannot be shown"),
        (np.ones(3), ["a"], None, "counts of shape (3,) cannot be shown"),
    ],
)
def test_tables_that_cannot_be_shown(
    tmp_path: Path, table: Any, names: Sequence[str], class_names: Sequence[str] | None, text: str
) -> None:
    assert text in message(DataError, lambda: terminal(table, names, class_names))
    assert text in message(DataError, lambda: save_png(table, tmp_path / "x.png", names=names, class_names=class_names))
    assert not list(tmp_path.iterdir())


# --- as a PNG file -------------------------------------------------------------------------------------------------


def pixels(path: Path) -> npt.NDArray[np.int64]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(np.int64)


def bubbles(path: Path) -> list[float]:
    """The areas of all blue spots, the legend's too, the largest first."""
    colours = pixels(path)
    blueness = np.clip((colours[..., 2] - colours[..., 0]) / (0xB3 - 0x2F), 0, 1)  # by how much a pixel is covered
    spots, number = ndimage.label(blueness > 0.1)
    return sorted(ndimage.sum(blueness, spots, range(1, number + 1)).tolist(), reverse=True)


def test_areas_are_proportional_to_counts(tmp_path: Path) -> None:
    save_png(np.array([[100, 25], [0, 50]]), tmp_path / "chart.png")
    areas = np.array(bubbles(tmp_path / "chart.png"))
    shown = [100, 100, 50, 25, 20, 5, 1]  # of which the legend: 100, 20, 5, 1
    assert areas / areas[0] * 100 == pytest.approx(shown, rel=0.01, abs=0.2)


def test_every_count_has_a_bubble_that_touches_no_other(tmp_path: Path) -> None:
    table = np.random.default_rng(0).integers(0, 50, size=(30, 12))
    table[:3] = 50
    save_png(table, tmp_path / "chart.png")
    assert len(bubbles(tmp_path / "chart.png")) == np.count_nonzero(table) + len([50, 10, 2])


def test_the_smallest_of_many_can_be_seen(tmp_path: Path) -> None:
    table = np.ones((100, 10), dtype=np.int64)
    table[0, 0] = 100_000
    save_png(table, tmp_path / "chart.png")
    assert min(bubbles(tmp_path / "chart.png")) > 4


@pytest.mark.parametrize(
    ("clients", "classes", "width", "height"),
    [(100, 10, 2400, 360), (60, 62, 2400, 1800), (1, 1, 64, 64), (4, 2, 256, 128)],
)
def test_the_plot_has_room_for_all(tmp_path: Path, clients: int, classes: int, width: int, height: int) -> None:
    save_png(np.ones((clients, classes), dtype=np.int64), tmp_path / "chart.png")
    high, wide, _ = pixels(tmp_path / "chart.png").shape
    assert width < wide < width + 600
    assert height < high < height + 400


def ink_at_the_edge(path: Path) -> int:
    colours = pixels(path)
    edges = [colours[:6], colours[-6:], colours[:, :6].transpose(1, 0, 2), colours[:, -6:].transpose(1, 0, 2)]
    return sum(int((edge < 250).any(-1).sum()) for edge in edges)


@pytest.mark.parametrize(("clients", "classes"), [(3, 2), (100, 10), (1, 1), (40, 1), (2, 40)])
@pytest.mark.parametrize("long", [False, True])
def test_nothing_runs_over_the_edge(tmp_path: Path, clients: int, classes: int, long: bool) -> None:
    table = np.full((clients, classes), 123_456)
    names = [f"hospital of the town {i}" if long else str(i) for i in range(clients)]
    class_names = [f"a class with a name that goes on, {k}" if long else str(k) for k in range(classes)]
    title = "A title " * (8 if long else 1)
    path = tmp_path / "chart.png"
    save_png(table, path, names=names, class_names=class_names, title=title, subtitle="A subtitle\nof one line")
    assert ink_at_the_edge(path) == 0


def test_too_many_clients_and_classes_are_thinned_out(tmp_path: Path) -> None:
    table = np.zeros((1079, 400), dtype=np.int64)
    table[0, 0] = table[-1, -1] = 1
    table[1, 1] = 1  # a client that is left out
    save_png(table, tmp_path / "chart.png")
    high, wide, _ = pixels(tmp_path / "chart.png").shape
    assert (wide, high) < (3000, 2500)
    assert len(bubbles(tmp_path / "chart.png")) == 2 + 1


def test_a_chart_without_any_sample(tmp_path: Path) -> None:
    save_png(np.zeros((3, 2), dtype=np.int64), tmp_path / "chart.png")
    assert bubbles(tmp_path / "chart.png") == []
    assert printed(terminal(np.zeros((1, 2), dtype=np.int64), ["a"]))[-1] == "samples in a cell: · none"


def test_the_same_table_gives_the_same_file(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(5), 20)
    table = counts(pathological(labels, clients=10, classes_per_client=2, seed=0), labels, 5)
    for name in ("one.png", "two.PNG"):
        save_png(table, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.PNG").read_bytes()


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    table = np.ones((1, 1), dtype=np.int64)
    assert message(ConfigError, lambda: save_png(table, "chart.pdf")) == (
        "the picture is to go to chart.pdf; only PNG can be written: end the name in .png"
    )
    path = tmp_path / "no folder" / "chart.png"
    assert message(ConfigError, lambda: save_png(table, path)) == (
        f"the picture cannot be written to {path}: No such file or directory"
    )
