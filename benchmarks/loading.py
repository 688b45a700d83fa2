"""Time and peak memory of loading one data set, in a process that does nothing else.

python benchmarks/loading.py cifar10 DIR     # twice: cold, then from the cache
"""

from __future__ import annotations

import resource
import sys
import time

from fedfac.config import DataConfig
from fedfac.data.sources import load_samples


def megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(name: str, folder: str) -> None:
    before, start = megabytes(), time.perf_counter()
    load_samples(DataConfig(name=name, data_dir=folder))
    print(f"{name}: {time.perf_counter() - start:.2f} s, peak {megabytes()} MB, of which {before} MB before it began")


if __name__ == "__main__":
    main(*sys.argv[1:])
