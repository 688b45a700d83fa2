"""fedfac's job as plain files, for environments that have no fedfac.

``inputs.npy``, ``targets.npy``: the samples, ready for the network. ``start.npz``: the start weights by name.
``job.json``: the settings, and for every round and every client of its cohort the number of its samples (n_k), the
seed of its dropout, and its batches as lists of sample numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedfac.bench.jobs import Job
from fedfac.data.pool import ArrayPool
from fedfac.errors import ConfigError
from fedfac.preflight import draw_cohort
from fedfac.seeds import generator
from fedfac.state import state_of
from fedfac.training import schedule

SEED = 0  # that of the bench's own contestants


def write(job: Job, rounds: int, folder: Path) -> None:
    """Write the first rounds of a job into a folder."""
    pool = job.federation.pool
    if not isinstance(pool, ArrayPool) or job.local.optimizer != "adam" or job.local.weight_decay:
        raise ConfigError(f"the peers cannot run {job.name!r}: they know jobs on arrays, with plain Adam")
    inputs, targets = pool.batch(torch.arange(len(pool.targets)))
    np.save(folder / "inputs.npy", inputs.numpy())
    np.save(folder / "targets.npy", targets.numpy())
    start = {name: tensor.numpy() for name, tensor in state_of(job.model).items()}
    np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
    described = {
        "data": job.data,
        "clients": len(job.federation),
        "lr": job.local.lr,
        "batch_size": job.local.batch_size,
        "dropout": max((m.p for m in job.model.modules() if isinstance(m, nn.Dropout)), default=0.0),
        "rounds": [_cohort(job, number) for number in range(1, rounds + 1)],
    }
    (folder / "job.json").write_text(json.dumps(described))


def _cohort(job: Job, round: int) -> list[dict[str, Any]]:
    cohort = draw_cohort(range(len(job.federation)), job.cohort, SEED, round)
    return [{"client": client, **_visit(job, round, client)} for client in cohort]


def _visit(job: Job, round: int, client: int) -> dict[str, Any]:
    data = job.federation.client(client)
    if data.augment is not None:
        raise ConfigError(
            f"the peers cannot run {job.name!r}: its images are augmented, the files hold them as they are"
        )
    batches = schedule(data.size, job.local.epochs, job.local, SEED, "train", round, client, 0)
    return {
        "samples": data.size,
        "seed": generator(SEED, "noise", "train", round, client).initial_seed(),
        "batches": [data.train[index].tolist() for index in batches],
    }
