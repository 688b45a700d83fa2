"""Four methods on the embedded handwritten digits, and a page that shows how they differ.

python examples/digits.py            # 30 rounds; open runs/example-digits/report.html afterwards
python examples/digits.py --rounds 3 # a quick look
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fedfac
from fedfac import models, report
from fedfac.data.digits import digits


def main(rounds: int, out: Path) -> None:
    """Train, print, write the page."""
    federation = digits().federation(partition="dirichlet", clients=60, alpha=0.1)
    model = models.build("cnn", shape=(1, 8, 8), classes=10, seed=0)
    methods = [
        fedfac.methods.fedavg(),
        fedfac.methods.fedper(),
        fedfac.methods.fedfac(layers=["fc1"], tau="50%", schedule="static"),
        fedfac.methods.fedfac(layers=["fc1"], tau="50%", head="personal"),
    ]
    folders = []
    for method in methods:
        folders.append(out / method.name)
        result = fedfac.fit(
            model, federation, method=method, rounds=rounds, cohort=12, batch_size=16, out=folders[-1], seed=0
        )
        last = result.metrics.to_pylist()[-1]
        print(f"{method.name:14} accuracy {result.accuracy:.3f}, worst tenth of clients {last['worst_decile']:.3f}")
    print("open", report.write(folders, out / "report.html"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/example-digits"))
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.out)
