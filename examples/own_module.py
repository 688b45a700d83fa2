"""Your own nn.Module and your own data: regression on sensor readings, one client a site.

Any module works as it is. Here it has a shared trunk of two layers; FedFac splits the second one. The targets are real
numbers, so the loss is the mean squared error and the figures are MSE and R².

python examples/own_module.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedfac


class Net(nn.Module):
    """Two hidden layers and one output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.second = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Any forward will do."""
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


def sites(number: int, samples: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What all sites share is y = sin(x₀) + x₁; each adds a slope of its own on x₂."""
    draws = torch.Generator().manual_seed(0)
    data = {}
    for site in range(number):
        x = torch.randn(samples, 10, generator=draws)
        slope = 2 * site / (number - 1) - 1
        y = torch.sin(x[:, 0]) + x[:, 1] + slope * x[:, 2] + 0.1 * torch.randn(samples, generator=draws)
        data[f"site {site}"] = (x, y[:, None])
    return data


def main(rounds: int, out: Path | None) -> None:
    """One model for all against a model for each."""
    torch.manual_seed(0)
    model = Net()
    print(fedfac.Anatomy.of(model))
    federation = fedfac.Federation.from_arrays(sites(number=8, samples=120))
    for method in (fedfac.methods.fedavg(), fedfac.methods.fedfac(layers=["second"], head="personal")):
        result = fedfac.fit(
            model,
            federation,
            method=method,
            rounds=rounds,
            cohort=4,
            epochs=5,
            loss=F.mse_loss,
            out=None if out is None else out / method.name,
        )
        last = result.metrics.to_pylist()[-1]
        print(f"{method.name:8} MSE {last['mse']:.3f}, R² {last['r2']:.3f}")
    own = result.model("site 7")
    print("site 7 predicts", own(torch.zeros(1, 10)).item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.out)
