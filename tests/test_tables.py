"""Tables: what becomes of a column, what is refused, and the two data sets with natural clients."""

from __future__ import annotations

import datetime
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfac.data.samples import Samples
from fedfac.data.tables import ACTIVITIES, csv_or_parquet, hapt, heart, standardise
from fedfac.errors import ConfigError, DataError

CSV = """age,city,smoker,where,y
20,Rome,true,A,sick
40,Oslo,false,B,well
,Rome,true,A,well
60,?,false,B,sick
"""


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def everything(samples: Samples) -> tuple[list[Any], list[Any]]:
    assert samples.labels is None or samples.classes is not None
    n = len(samples.pool.targets)  # type: ignore[attr-defined]
    x, y = samples.pool.batch(torch.arange(n))
    assert x.dtype == torch.float32
    return x.tolist(), y.tolist()


def test_columns_of_a_csv_file(tmp_path: Path) -> None:
    samples = csv_or_parquet(written(tmp_path / "mine.csv", CSV), label="y", client="where")
    x, y = everything(samples)
    up = np.float32(20 / (800 / 4) ** 0.5)  # 20, 40, 40 (the mean of the others), 60
    assert x == [  # age, Oslo, Rome, smoker
        [-up, 0.0, 1.0, 1.0],
        [0.0, 1.0, 0.0, -1.0],
        [0.0, 0.0, 1.0, 1.0],
        [up, 0.0, 0.0, -1.0],
    ]
    assert y == [0, 1, 1, 0]
    assert samples.labels is not None
    assert samples.labels.tolist() == y
    assert (samples.name, samples.classes, samples.class_names) == ("mine", 2, ("sick", "well"))
    assert samples.owners is not None
    assert samples.owners.tolist() == ["A", "B", "A", "B"]


def test_parquet_gives_the_same(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "mine.parquet",
        age=[20.0, 40.0, float("nan"), 60.0],
        city=pa.array(["Rome", "Oslo", "Rome", None]).dictionary_encode(),
        smoker=[True, False, True, False],
        where=["A", "B", "A", "B"],
        y=["sick", "well", "well", "sick"],
    )
    from_csv = csv_or_parquet(written(tmp_path / "mine.csv", CSV), label="y", client="where")
    assert csv_or_parquet(path, label="y", client="where").fingerprint == from_csv.fingerprint


@pytest.mark.parametrize(
    ("values", "classes", "names", "targets"),
    [
        ([7, -3, 7], 2, ("-3", "7"), [1, 0, 1]),
        ([True, False, True], 2, ("False", "True"), [1, 0, 1]),
        (["b", "a", "ü"], 3, ("a", "b", "ü"), [1, 0, 2]),
        ([1.0, 2.5, 1.0], None, None, [[1.0], [2.5], [1.0]]),
    ],
)
def test_labels(tmp_path: Path, values: Any, classes: int | None, names: Any, targets: Any) -> None:
    samples = csv_or_parquet(parquet(tmp_path / "a.parquet", x=[1, 2, 3], y=values), label="y")
    assert (samples.classes, samples.class_names, everything(samples)[1]) == (classes, names, targets)
    assert (samples.labels is None) == (classes is None)


def test_a_column_of_one_value_is_zero_and_drop_leaves_out(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", x=[0.1] * 3, noise=[1, 2, 3], y=[0, 1, 0])
    assert everything(csv_or_parquet(path, label="y", drop=["noise"]))[0] == [[0.0]] * 3


def test_integers_that_turn_real_far_down_the_file(tmp_path: Path) -> None:
    rows = [f"{i},{i % 2}" for i in range(300_000)] + ["0.5,1"]
    path = written(tmp_path / "long.csv", "x,y\n" + "\n".join(rows))
    assert path.stat().st_size > 2**21, "more than one block of the reader"
    assert csv_or_parquet(path, label="y").classes == 2


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.floats(-1e300, 1e300), st.just(float("nan"))), min_size=1, max_size=30))
def test_standardised(values: list[float]) -> None:
    known = [v for v in values if v == v]
    if not known:
        assert "is empty in all" in message(DataError, lambda: standardise(np.array(values), "x"))
        return
    result = standardise(np.array(values), "x").astype(np.float64)
    assert np.isfinite(result).all()
    assert all(r == 0 for v, r in zip(values, result, strict=True) if v != v)
    scale = max(abs(v) for v in known) or 1.0
    if len(set(known)) == 1:
        assert not result.any()
    elif statistics.pstdev(v / scale for v in known) > 1e-6:
        assert result.mean() == pytest.approx(0, abs=1e-5)
        assert result.std() == pytest.approx(1, abs=1e-5)
        order = np.argsort(known)
        assert (np.diff(result[~np.isnan(values)][order]) >= 0).all()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "Empty CSV"),
        ("x,y\n", "has no rows; its columns are ['x', 'y']"),
        ("x,y\n1,0\n2\n", "Expected 2 columns, got 1"),
        ("x,y\n1,0\n2,\n", "label 'y' is missing in 1 of 2 rows, the first is row 1"),
        ("x,z,y\n1,,0\n2,,1\n", "column 'z' is empty in all 2 rows: leave it out (--drop; in Python drop=)"),
        ("x,x,y\n1,2,0\n", "several columns of the name 'x'"),
        ("y\n1\n", "has no input columns beside ['y']"),
        ("x,y\ninf,1\n2,0\n", "column 'x' is infinite in 1 rows, the first is row 0"),
        ("x,y\n1,0.5\n1,inf\n", "label 'y' is not a finite number in row 1"),
        (
            "x,y\n2024-01-01,1\n2024-01-02,1\n",
            "column 'x' is of type date32[day]; allowed: numbers",
        ),
        ("x,Y\n1,0\n", "has no column 'y'. "),
    ],
)
def test_bad_csv_files(tmp_path: Path, content: str, text: str) -> None:
    path = written(tmp_path / "bad.csv", content)
    said = message(DataError, lambda: csv_or_parquet(path, label="y"))
    assert text in said
    assert str(path) in said


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(b"x,y\n\xe9,1\n\xe8,0\n")
    assert "line 2 has the byte 0xE9 (byte 4 of the file)" in message(
        DataError, lambda: csv_or_parquet(path, label="y")
    )


def test_too_many_texts_name_the_column(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", name=[f"n{i}" for i in range(101)], y=[0, 1] * 50 + [1])
    said = message(DataError, lambda: csv_or_parquet(path, label="y"))
    assert "column 'name' has 101 distinct texts; allowed: 100" in said
    short = parquet(tmp_path / "b.parquet", name=[f"n{i}" for i in range(100)], y=[0, 1] * 50)
    assert np.array(everything(csv_or_parquet(short, label="y"))[0]).sum() == 100


def test_wrong_names(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.csv", CSV)
    assert "has no column 'citi'. Did you mean 'city'?" in message(
        DataError, lambda: csv_or_parquet(path, label="y", client="citi")
    )
    assert "has no column 'zip'. Known: age" in message(
        DataError, lambda: csv_or_parquet(path, label="y", drop=["zip"])
    )
    assert "must be different columns" in message(ConfigError, lambda: csv_or_parquet(path, label="y", client="y"))
    assert "give a list of columns" in message(ConfigError, lambda: csv_or_parquet(path, label="y", drop="age"))
    assert f"there is no file {tmp_path / 'mime.csv'}. Did you mean 'mine.csv'?" in message(
        DataError, lambda: csv_or_parquet(tmp_path / "mime.csv", label="y")
    )
    assert "the folder" in message(DataError, lambda: csv_or_parquet(tmp_path / "no" / "a.csv", label="y"))
    other = written(tmp_path / "a.xlsx", "")
    assert "ends in '.xlsx'; allowed: .csv, .tsv, .parquet, .pq" in message(
        DataError, lambda: csv_or_parquet(other, label="y")
    )


def test_a_missing_client_and_a_client_that_is_no_name(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", x=[1, 2], who=["A", None], y=[0, 1])
    assert "client 'who' is missing in 1 of 2 rows" in message(
        DataError, lambda: csv_or_parquet(path, label="y", client="who")
    )
    days = parquet(tmp_path / "b.parquet", x=[1, 2], who=[datetime.date(2024, 1, 1)] * 2, y=[0, 1])
    assert "allowed: integers, truth values, text" in message(
        DataError, lambda: csv_or_parquet(days, label="y", client="who")
    )
    assert "label 'who' is of type date32" in message(DataError, lambda: csv_or_parquet(days, label="who"))


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", x=[1, 2], y=[0, 1])
    path.write_bytes(path.read_bytes()[:-9])
    assert "cannot be read" in message(DataError, lambda: csv_or_parquet(path, label="y"))


# ---------------------------------------------------------------- heart

HEART = {
    "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
    "67.0,1.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2\n",
    "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,0\n",
    "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n",
    "va": "63,1,4,140,260,0,1,112,1,3,2,?,?,4\n",
}


def write_heart(folder: Path, **changed: str) -> Path:
    folder.mkdir(exist_ok=True)
    for hospital, rows in {**HEART, **changed}.items():
        (folder / f"processed.{hospital}.data").write_text(rows)
    return folder


def test_heart(tmp_path: Path) -> None:
    write_heart(tmp_path / "heart")
    samples = heart(data_dir=tmp_path)
    x, y = everything(samples)
    assert np.shape(x) == (5, 13)
    assert y == [0, 1, 0, 1, 1]
    assert samples.owners is not None
    assert samples.owners.tolist() == ["cleveland", "cleveland", "hungarian", "switzerland", "va"]
    assert (samples.classes, samples.class_names) == (2, ("no disease", "disease"))
    ages = np.array([63, 67, 28, 32, 63])
    assert np.allclose(np.array(x)[:, 0], (ages - ages.mean()) / ages.std())
    thal = np.array(x)[:, 12]
    assert (thal[2:] == 0).all(), "missing values are at the mean"
    assert thal[0] == -thal[1] > 0


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("63,1,1\n", "Is it UCI's table of 14 numbers a row?"),
        (HEART["hungarian"].replace("28", "old"), "Is it UCI's table of 14 numbers a row?"),
        (HEART["hungarian"].replace(",0\n", ",5\n"), "row 0: the diagnosis is 5.0; allowed: 0, 1, 2, 3, 4"),
        (HEART["hungarian"].replace(",0\n", ",?\n"), "row 0: the diagnosis is nan"),
        ("", "Is it UCI's table"),
    ],
)
def test_bad_heart_files(tmp_path: Path, rows: str, text: str) -> None:
    write_heart(tmp_path, hungarian=rows)
    said = message(DataError, lambda: heart(data_dir=tmp_path))
    assert text in said
    assert "processed.hungarian.data" in said


def test_a_hospital_too_few(tmp_path: Path) -> None:
    (write_heart(tmp_path) / "processed.va.data").unlink()
    assert "processed.va.data" in message(DataError, lambda: heart(data_dir=tmp_path))


# ---------------------------------------------------------------- HAPT


def write_hapt(folder: Path, **changed: Any) -> Path:
    draws = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "signal": (draws.normal(3, 2, (24, 128, 6)) * [1, 2, 3, 4, 5, 0]).astype(np.float16),
        "label": (np.arange(24) % 12).astype(np.int8),
        "subject": (np.arange(24) % 3 + 1).astype(np.int16),
    }
    arrays.update(changed)
    np.savez_compressed(folder / "windows.npz", **{k: v for k, v in arrays.items() if v is not None})
    return folder


def test_hapt(tmp_path: Path) -> None:
    samples = hapt(data_dir=write_hapt(tmp_path))
    x, y = samples.pool.batch(torch.arange(24))
    assert (x.shape, x.dtype, y.dtype) == ((24, 6, 128), torch.float32, torch.int64)
    assert torch.allclose(x.mean((0, 2)), torch.zeros(6), atol=1e-5)
    assert torch.allclose(x.std((0, 2), correction=0)[:5], torch.ones(5), atol=1e-5)
    assert not x[:, 5].any(), "a channel that never moves"
    raw = np.load(tmp_path / "windows.npz")["signal"].astype(np.float64)
    wanted = (raw[7, :, 2] - raw[:, :, 2].mean()) / raw[:, :, 2].std()
    assert np.allclose(x[7, 2].numpy(), wanted, atol=1e-5)
    assert y.tolist() == [*range(12), *range(12)]
    assert samples.owners is not None
    assert samples.owners.tolist() == ["1", "2", "3"] * 8
    assert samples.class_names == ACTIVITIES
    assert samples.classes == len(ACTIVITIES) == 12
    assert samples.pool.inputs.dtype == torch.float16  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"label": np.full(24, 12)}, "has labels from 12 to 12; allowed: 0..11"),
        ({"label": np.arange(24) - 1}, "has labels from -1"),
        ({"subject": None}, "has the arrays ['label', 'signal']; wanted: ['label', 'signal', 'subject']"),
        ({"signal": np.zeros((24, 6, 128), np.float16)}, "has arrays of shapes [(24, 6, 128), (24,), (24,)]; wanted"),
        ({"label": np.zeros(24)}, "has arrays of ['float16', 'float64', 'int16']"),
        ({"signal": np.full((24, 128, 6), np.nan, np.float16)}, "signals that are not finite"),
        (
            {"subject": np.array([{"a": 1}] * 24, dtype=object)},
            "holds object; allowed: numbers and text",
        ),
    ],
)
def test_bad_hapt_files(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    assert text in message(DataError, lambda: hapt(data_dir=write_hapt(tmp_path, **changed)))


@pytest.mark.parametrize("cut", [0, 10, 1000, -40])
def test_a_truncated_npz_file(tmp_path: Path, cut: int) -> None:
    path = write_hapt(tmp_path) / "windows.npz"
    path.write_bytes(path.read_bytes()[:cut])
    assert "windows.npz" in message(DataError, lambda: hapt(data_dir=tmp_path))


def test_an_array_or_a_pickle_instead_of_an_npz_file(tmp_path: Path) -> None:
    with (tmp_path / "windows.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "it is no zip archive of arrays" in message(DataError, lambda: hapt(data_dir=tmp_path))
    (tmp_path / "windows.npz").write_bytes(b"\x80\x04K\x01.")
    assert "cannot be read" in message(DataError, lambda: hapt(data_dir=tmp_path))
