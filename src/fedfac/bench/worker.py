"""One contestant in a process of its own: a line in, a round, a line out.

It is started as ``python -m fedfac.bench.worker``; the driver (``race``) tells it when to run, so that contestants
take turns and a busy moment of the machine hits them all.
"""

from __future__ import annotations

import json
import resource
import sys
from time import perf_counter

STARTED = perf_counter()


def main(job: str, contestant: str, device: str, data_dir: str = "") -> None:
    """Set up, then one round for every line read."""
    import torch

    from fedfac.bench import contestants, jobs

    where = torch.device(device)
    work = jobs.build(job, data_dir or None, where)
    step = contestants.build(contestant, work, where)
    answer({"ready": perf_counter() - STARTED, "data": work.data})
    for number, _ in enumerate(sys.stdin, start=1):
        start = perf_counter()
        loss = step(number)
        if where.type == "cuda":
            torch.cuda.synchronize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer({"seconds": perf_counter() - start, "loss": loss, "peak_mb": peak})


def answer(values: dict[str, object]) -> None:
    """One line of JSON."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
