"""People with phones: recognise what somebody is doing from 2.56 seconds of movement, and serve somebody new.

With the real windows (UCI HAPT as windows.npz: signal (n, 128, 6), label, subject) in a folder:

    python examples/phones.py --data-dir DIR

Without --data-dir the example writes made-up movements in the same file and trains on those: it shows how things are
done, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import fedfac
from fedfac import models
from fedfac.data.tables import ACTIVITIES, hapt
from fedfac.newcomers import serve


def write_made_up(folder: Path, people: int = 10, windows: int = 36) -> None:
    """Every activity is an oscillation; everybody moves at a pace of their own."""
    draws = np.random.default_rng(0)
    time = np.arange(128) / 50
    signal, label, subject = [], [], []
    for person in range(people):
        for window in range(windows):
            activity = window % len(ACTIVITIES)
            pace = (0.5 + activity / 3) * (0.8 + 0.4 * person / people)
            wave = np.sin(2 * np.pi * pace * time + draws.uniform(0, 6))[:, None] * np.linspace(1, 0.3, 6)
            signal.append(wave + 0.2 * draws.standard_normal((128, 6)))
            label.append(activity)
            subject.append(person + 1)
    file = folder / "windows.npz"
    np.savez_compressed(file, signal=np.array(signal, np.float16), label=np.array(label), subject=np.array(subject))


def main(data_dir: Path, rounds: int) -> None:
    """Train on most people, then serve those who were not there."""
    federation = hapt(data_dir=data_dir).federation()
    model = models.build("signal-cnn", shape=(6, 128), classes=len(ACTIVITIES), seed=0)
    for method in (fedfac.methods.fedavg(), fedfac.methods.fedfac(layers=[2])):
        result = fedfac.fit(model, federation, method=method, rounds=rounds, epochs=2, newcomers=0.2)
        print(f"{method.name}: people who took part {result.accuracy:.3f}")
        for rule, figures in serve(result, epochs=5).items():
            print(f"{method.name}: people who came later, {rule}: {figures['accuracy']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="a folder with windows.npz")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.data_dir is not None:
        main(arguments.data_dir, arguments.rounds)
    else:
        with tempfile.TemporaryDirectory() as made_up:
            write_made_up(Path(made_up))
            main(Path(made_up), arguments.rounds)
