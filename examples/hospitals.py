"""Four hospitals that cannot pool their patients: heart disease from 13 measurements.

With the real files (UCI "Heart Disease", processed.*.data) in a folder:

    python examples/hospitals.py --data-dir DIR

Without --data-dir the example writes made-up patients in the same four files and trains on those: it shows how things
are done, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import fedfac
from fedfac import models
from fedfac.data.tables import HEART_FEATURES, HOSPITALS, heart


def write_made_up(folder: Path, patients: int = 80) -> None:
    """The four files, with another relation of age, pulse and disease at every hospital."""
    draws = np.random.default_rng(0)
    for number, hospital in enumerate(HOSPITALS):
        rows = []
        for _ in range(patients):
            age, pulse = draws.normal(55, 9), draws.normal(140, 22)
            sick = (age - 55) / 9 - (1 + number / 2) * (pulse - 140) / 22 + draws.normal() > 0
            values = [
                age,
                1,
                draws.integers(1, 5),
                130,
                240,
                0,
                0,
                pulse,
                0,
                draws.exponential(),
                2,
                draws.choice(["0", "1", "?"]),
                3,
            ]
            assert len(values) == len(HEART_FEATURES)
            rows.append(",".join(map(str, [*values, int(sick)])))
        (folder / f"processed.{hospital}.data").write_text("\n".join(rows) + "\n")


def main(data_dir: Path, rounds: int) -> None:
    """Each hospital's accuracy with one model for all, with its own data only, and with FedFac."""
    federation = heart(data_dir=data_dir).federation()
    model = models.build("mlp", shape=(len(HEART_FEATURES),), classes=2, seed=0)
    print(f"{'':10}" + "".join(f"{name:>13}" for name in federation.names))
    for method in (fedfac.methods.fedavg(), fedfac.methods.local(), fedfac.methods.fedfac(layers=[1])):
        result = fedfac.fit(model, federation, method=method, rounds=rounds, batch_size=16)
        print(f"{method.name:10}" + "".join(f"{row['accuracy']:13.3f}" for row in result.clients))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="a folder with processed.cleveland.data and the other three")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.data_dir is not None:
        main(arguments.data_dir, arguments.rounds)
    else:
        with tempfile.TemporaryDirectory() as made_up:
            write_made_up(Path(made_up))
            main(Path(made_up), arguments.rounds)
