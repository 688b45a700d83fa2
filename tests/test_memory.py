"""Peak memory does not grow with the number of clients in the federation."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
import torch
from torch import nn
import fedfac
from fedfac.seeds import generator

def load(client):
    draws = generator(0, "client", client)
    x = torch.randn(24, 32, generator=draws)
    y = (x[:, client % 8] > 0).long()
    return x[:16], y[:16], x[16:], y[16:]

federation = fedfac.Federation.lazy(int(sys.argv[1]), load, classes=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
result = fedfac.fit(model, federation, method=fedfac.methods.fedfac(layers=[1]), rounds=5, cohort=50, epochs=1,
                    evaluate_clients=50, out=sys.argv[2])
assert len(result.records) == 5 and len(result.names) == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(clients: int, out: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(clients), out], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


def test_a_hundred_thousand_clients_need_little_more_than_a_thousand(tmp_path: object) -> None:
    small, large = peak(1_000, f"{tmp_path}/small"), peak(100_000, f"{tmp_path}/large")
    assert large <= 1.2 * small, (small, large)
