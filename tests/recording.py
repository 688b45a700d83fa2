"""Sums that clients sent in a real run, for tests of what is made of them."""

from __future__ import annotations

from fedfac import experiment
from fedfac.config import Config
from fedfac.conformance import Watched
from fedfac.engine.protocol import Engine
from fedfac.moments import Moments


def moments_of_a_run(model: str) -> list[Moments]:
    """The sums of ``fc1`` in a short run of FedFac on the digits, round by round."""
    watched: list[Watched] = []

    def watch(inner: Engine) -> Engine:
        watched.append(Watched(inner))
        return watched[-1]

    config = {
        "data": {"name": "digits", "clients": 20},
        "model": {"name": model},
        "method": {"name": "fedfac", "layers": ["fc1"]},
        "train": {"rounds": 12, "cohort": 6, "epochs": 2, "batch_size": 16, "evaluate_every": 12},
    }
    experiment.session(Config.from_dict(config), engine=watch).drive()
    sums = [made["fc1"] for made in watched[0].moments_seen]
    return [total for total in sums if isinstance(total, Moments)]
