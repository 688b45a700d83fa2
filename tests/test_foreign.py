"""Other people's containers: small classes of the same interface, and the real ones where they are installed."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import message
from PIL import Image

from fedfac.data.foreign import from_hf, from_partitioner
from fedfac.errors import ConfigError, DataError


class Names:
    """As ``datasets.ClassLabel``."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)


class Columns:
    """As ``datasets.Dataset``: a row by number, a column by name."""

    def __init__(self, features: dict[str, Any] | None = None, **columns: Sequence[Any]) -> None:
        self.columns = columns
        self.features = features or {}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}


class Parts:
    """As a partitioner of ``flwr-datasets``."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.num_partitions = len(parts)

    def load_partition(self, partition_id: int) -> Any:
        return self.parts[partition_id]


def pixels(seed: int, *shape: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(array: npt.NDArray[np.uint8]) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


COLOURS = [pixels(i, 4, 5, 3) for i in range(3)]


@pytest.mark.parametrize(
    "images",
    [
        [Image.fromarray(array) for array in COLOURS],
        [encoded(array) for array in COLOURS],
        COLOURS,
        [torch.from_numpy(array).movedim(-1, 0) for array in COLOURS],
    ],
    ids=["pil", "bytes", "numpy", "torch"],
)
def test_images_in_every_dress(images: list[Any]) -> None:
    dataset = Columns({"label": Names("a", "b", "c", "d")}, img=images, label=[2, 0, 1], who=["x", "y", "x"])
    samples = from_hf(dataset, label="label", client="who")
    inputs = samples.pool.inputs  # type: ignore[attr-defined]
    assert inputs.dtype == torch.uint8
    assert np.array_equal(inputs.numpy(), np.stack(COLOURS).transpose(0, 3, 1, 2))
    x, y = samples.pool.batch(torch.tensor([1]))
    assert torch.allclose(x, inputs[1:2].float() / 127.5 - 1, atol=1e-6)
    assert y.tolist() == [0]
    assert (samples.classes, samples.class_names) == (4, ("a", "b", "c", "d"))
    assert samples.owners is not None
    assert samples.owners.tolist() == ["x", "y", "x"]


def test_grey_images_and_a_grey_one_among_coloured() -> None:
    grey = [Image.fromarray(pixels(i, 4, 5)) for i in range(2)]
    assert from_hf(Columns(img=grey, y=[0, 1]), label="y").pool.inputs.shape == (2, 1, 4, 5)  # type: ignore[attr-defined]
    mixed = Columns(img=[grey[0], Image.fromarray(COLOURS[0])], y=[0, 1])
    inputs = from_hf(mixed, label="y").pool.inputs  # type: ignore[attr-defined]
    assert np.array_equal(inputs[0], np.stack([pixels(0, 4, 5)] * 3))


def test_an_image_by_its_path(tmp_path: Path) -> None:
    Image.fromarray(COLOURS[0]).save(tmp_path / "a.png")
    dataset = Columns(img=[{"bytes": None, "path": str(tmp_path / "a.png")}], y=[0])
    assert from_hf(dataset, label="y").pool.inputs.shape == (1, 3, 4, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "wanted", "kind"),
    [
        ([1, 2, 3], [[1], [2], [3]], torch.float32),
        ([0.5, 1.5, 2.5], [[0.5], [1.5], [2.5]], torch.float32),
        ([True, False, True], [[1], [0], [1]], torch.float32),
        ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]], torch.int64),
        ([[1.0, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]], torch.float32),
        (torch.tensor([[1.0], [2.0], [3.0]]), [[1], [2], [3]], torch.float32),
        ([torch.tensor(1), torch.tensor(2), torch.tensor(3)], [[1], [2], [3]], torch.float32),
        (np.arange(12).reshape(3, 2, 2), np.arange(12).reshape(3, 2, 2).tolist(), torch.float32),
    ],
)
def test_numbers(values: Any, wanted: list[Any], kind: torch.dtype) -> None:
    x, _ = from_hf(Columns(a=values, y=[0, 1, 0]), label="y").pool.batch(torch.arange(3))
    assert (x.tolist(), x.dtype) == (wanted, kind)


def test_several_columns_are_one_input() -> None:
    dataset = Columns(a=[1, 2], b=[0.5, 1.5], name=["x", "y"], y=[0, 1])
    x, _ = from_hf(dataset, label="y", inputs=["b", "a"]).pool.batch(torch.arange(2))
    assert x.tolist() == [[0.5, 1.0], [1.5, 2.0]]


@pytest.mark.parametrize(
    ("labels", "classes", "names", "targets"),
    [
        (["p", "n", "p"], 2, ("n", "p"), [1, 0, 1]),
        ([2001, 1999, 2001], 2, ("1999", "2001"), [1, 0, 1]),
        ([0.5, 1.5, 2.5], None, None, [[0.5], [1.5], [2.5]]),
        ([[0.5, 1], [1.5, 2], [2.5, 3]], None, None, [[0.5, 1], [1.5, 2], [2.5, 3]]),
    ],
)
def test_labels(labels: list[Any], classes: int | None, names: Any, targets: list[Any]) -> None:
    samples = from_hf(Columns(a=[1.0, 2.0, 3.0], y=labels), label="y")
    _, y = samples.pool.batch(torch.arange(3))
    assert (samples.classes, samples.class_names, y.tolist()) == (classes, names, targets)
    assert (samples.labels is None) == (classes is None)


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (Columns(a=[1], lable=[0]), {}, "has no column 'label'. Did you mean 'lable'?"),
        (Columns(a=[1], label=[0]), {"inputs": "b"}, "has no column 'b'"),
        (Columns(a=[1], label=[0]), {"client": "who"}, "has no column 'who'"),
        (Columns(label=[0]), {}, "has no input columns beside ['label']"),
        (Columns(a=[], label=[]), {}, "the dataset has no rows; its columns are ['a', 'label']"),
        (Columns(a=["text"], label=[0]), {}, "column 'a' holds 'text'; wanted: numbers or images"),
        (Columns(a=[1, None], label=[0, 1]), {}, "column 'a' has 1 missing values"),
        (Columns(a=[[1], [1, 2]], label=[0, 1]), {}, "column 'a' has rows of different shapes"),
        (Columns(a=[torch.ones(1), torch.ones(2)], label=[0, 1]), {}, "column 'a' has rows of different shapes"),
        (Columns(a=[[1], [2]], b=[1, 2], label=[0, 1]), {}, "column 'a' holds arrays of shape (1,) and is one of 2"),
        (Columns(a=[1], label=[[0]]), {}, "label 'label' holds [0]; wanted"),
        (Columns(a=[1], label=[None]), {}, "column 'label' has 1 missing values"),
        (Columns({"label": Names("n", "p")}, a=[1, 2], label=[0, 2]), {}, "is 2 in row 1 and out of range in 1 rows"),
        (Columns({"label": Names("n", "p")}, a=[1], label=[-1]), {}, "-1 stands for an unknown label"),
        (Columns(a=[float("nan")], label=[0]), {}, "not finite"),
        (Columns(a=[1], who=[0.5], label=[0]), {"client": "who"}, "client column 'who' holds 0.5"),
        (Columns(a=[{"bytes": b"no", "path": None}], label=[0]), {}, "row 0, column 'a' is not an image"),
        (Columns(a=[{"bytes": None, "path": None}], label=[0]), {}, "neither bytes nor a path"),
        (Columns(a=[Image.new("L", (2, 2)), 7], label=[0, 1]), {}, "row 1, column 'a' is of type int"),
        (Columns(a=[Image.new("L", (2, 2)), Image.new("L", (3, 2))], label=[0, 1]), {}, "3 × 2 pixels and row 0 2 × 2"),
        ({"train": Columns(a=[1], label=[0])}, {}, "collection of ['train']: give one of them"),
        (iter([1]), {}, "without column_names, __len__, __getitem__; wanted: a map-style dataset"),
    ],
)
def test_what_is_refused(dataset: Any, options: dict[str, Any], text: str) -> None:
    assert text in message(DataError, lambda: from_hf(dataset, label="label", **options))


def test_the_label_is_no_input() -> None:
    said = message(ConfigError, lambda: from_hf(Columns(a=[1], y=[0]), label="y", inputs=["a", "y"]))
    assert "cannot be an input as well" in said


def test_partitions_share_their_classes() -> None:
    parts = Parts(Columns(a=[1.0, 2.0], y=["c", "a"]), Columns(a=[3.0, 4.0], y=["b", "b"]))
    federation = from_partitioner(parts, label="y", test_share=0.5)
    assert (federation.classes, list(federation.names)) == (3, ["0", "1"])
    seen = {}
    for i in range(2):
        data = federation.client(i)
        assert (len(data.train), len(data.test)) == (1, 1)
        x, y = data.pool.batch(torch.cat([data.train, data.test]))
        seen.update(dict(zip(x[:, 0].tolist(), y.tolist(), strict=True)))
    assert seen == {1.0: 2, 2.0: 0, 3.0: 1, 4.0: 1}


def test_the_first_partitions_with_their_natural_names() -> None:
    parts = Parts(*(Columns(img=[Image.fromarray(pixels(i, 4, 4))] * 2, y=[0, 1]) for i in range(3)))
    parts.partition_id_to_natural_id = {0: "anna", 1: "bert", 2: "cleo"}  # type: ignore[attr-defined]
    federation = from_partitioner(parts, 2, label="y", inputs="img")
    assert list(federation.names) == ["anna", "bert"]
    x, _ = federation.client(1).pool.batch(federation.client(1).train)
    assert x.dtype == torch.float32
    assert torch.allclose(x[0, 0], torch.from_numpy(pixels(1, 4, 4)).float() / 127.5 - 1, atol=1e-6)


def test_partitioners_that_are_refused() -> None:
    one = Columns(a=[1.0], y=[0])
    assert "4 partitions were asked for; the partitioner has 1" in message(
        ConfigError, lambda: from_partitioner(Parts(one), 4, label="y")
    )
    assert "partition 1 has no rows" in message(
        DataError, lambda: from_partitioner(Parts(one, Columns(a=[], y=[])), label="y")
    )
    unready: Any = object()
    assert "partitioner.dataset = dataset" in message(DataError, lambda: from_partitioner(unready, label="y"))


def test_neither_package_is_imported() -> None:
    code = "import sys, fedfac.data.foreign; sys.exit(bool({'datasets', 'flwr_datasets'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_real_hugging_face_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"]), "who": datasets.Value("string")}
    )
    columns = {"img": [Image.fromarray(array) for array in COLOURS], "label": [1, 0, 1], "who": ["x", "y", "x"]}
    dataset = datasets.Dataset.from_dict(columns, features=features)
    samples = from_hf(dataset, label="label", client="who")
    assert np.array_equal(samples.pool.inputs.numpy(), np.stack(COLOURS).transpose(0, 3, 1, 2))  # type: ignore[attr-defined]
    assert (samples.class_names, samples.classes) == (("a", "b"), 2)
    for other in (dataset.cast_column("img", datasets.Image(decode=False)), dataset.with_format("torch")):
        assert from_hf(other, label="label", inputs="img").fingerprint == samples.fingerprint


def test_real_flower_partitioners() -> None:
    datasets = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    dataset = datasets.Dataset.from_dict(
        {"a": [float(i) for i in range(12)], "who": [f"w{i % 3}" for i in range(12)], "y": [i % 2 for i in range(12)]}
    )
    natural = partitioner.NaturalIdPartitioner("who")
    assert "partitioner.dataset = dataset" in message(DataError, lambda: from_partitioner(natural, label="y"))
    natural.dataset = dataset
    federation = from_partitioner(natural, label="y", inputs="a", test_share=0.25)
    assert list(federation.names) == ["w0", "w1", "w2"]
    assert [federation.client(i).size for i in range(3)] == [3, 3, 3]
    even = partitioner.IidPartitioner(4)
    even.dataset = dataset
    assert len(from_partitioner(even, label="y", inputs="a")) == 4


def test_samples_become_a_federation_by_the_keys_of_a_config() -> None:
    from fedfac.data.digits import digits
    from fedfac.errors import ConfigError

    samples = digits()
    federation = samples.federation(partition="pathological", clients=20, classes_per_client=2, seed=3)
    assert len(federation) == 20
    labels = [set(federation.client(i).pool.batch(federation.client(i).train)[1].tolist()) for i in range(20)]
    assert all(len(own) <= 2 for own in labels)
    assert federation.fingerprint != samples.federation(clients=20).fingerprint
    with pytest.raises(ConfigError, match="unknown key 'client_count' in"):
        samples.federation(client_count=3)
    with pytest.raises(ConfigError, match="digits has no natural clients"):
        samples.federation(partition="natural")
