"""LEAF's JSON of FEMNIST."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfac.data.pool import ArrayPool
from fedfac.data.vision import femnist
from fedfac.errors import DataError


def write(path: Path, users: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(data["y"]) for data in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": users}))


def drawing(n: int, seed: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    draws = np.random.default_rng(seed)
    return draws.integers(0, 256, (n, 784)), draws.integers(0, 62, n).tolist()


def test_users_pixels_and_labels_are_exact(tmp_path: Path) -> None:
    made = {name: drawing(n, seed) for seed, (name, n) in enumerate([("f0001", 3), ("f0002", 5), ("f0003", 1)])}
    users = {name: {"x": (x / 255).tolist(), "y": y} for name, (x, y) in made.items()}
    write(tmp_path / "femnist" / "all_data_0.json", dict(list(users.items())[:2]))
    write(tmp_path / "femnist" / "all_data_1.json", dict(list(users.items())[2:]))
    samples = femnist(data_dir=tmp_path)
    assert isinstance(samples.pool, ArrayPool)
    pixels = np.concatenate([x for x, _ in made.values()]).reshape(-1, 1, 28, 28)
    assert np.array_equal(samples.pool.inputs.numpy(), pixels)
    assert samples.pool.targets.tolist() == [label for _, y in made.values() for label in y]
    assert samples.owners is not None
    assert samples.owners.tolist() == ["f0001"] * 3 + ["f0002"] * 5 + ["f0003"]
    again = femnist(data_dir=tmp_path)
    assert again.fingerprint == samples.fingerprint
    x, _ = samples.pool.batch(torch.tensor([0]))
    assert x.shape == (1, 1, 28, 28)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"users": ["a"', "is not JSON"),
        ("[1, 2]", "got `array`; wanted: LEAF's 'users'"),
        ('{"user_data": {"a": {"x": [[0.5, 0.5]], "y": [1]}}}', "user 'a' needs 'x', a list of 784 pixels a sample"),
        (json.dumps({"user_data": {"a": {"x": [[0.5] * 784], "y": [1, 2]}}}), "has 1 images and labels of shape (2,)"),
        (json.dumps({"user_data": {"a": {"x": [[0.5] * 784], "y": [1.5]}}}), "one whole number each"),
        (
            json.dumps({"user_data": {"a": {"x": [[0.5] * 784], "y": [62]}}}),
            "the label is 62; femnist has the labels 0..61",
        ),
        (json.dumps({"user_data": {"a": {"x": [[255.0] * 784], "y": [1]}}}), "wanted: from 0 to 1"),
        ('{"user_data": {"a": 3}}', "user 'a' needs 'x'"),
        ('{"user_data": {}}', "LEAF files without any user"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError) as caught:
        femnist(data_dir=tmp_path)
    assert words in str(caught.value)
