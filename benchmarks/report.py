"""How large the page of a large run is, and how long Chromium takes to open it.

python benchmarks/report.py            # 100 clients, 500 rounds, two layers of 512 elements, four runs
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedfac import report
from fedfac.anatomy import Anatomy
from fedfac.run import RunDirectory
from fedfac.split import Split
from fedfac.state import state_of


def big_run(path: Path, *, method: str, clients: int = 100, rounds: int = 500, elements: int = 512) -> None:
    """A run directory as a real run of that size leaves it, with made-up figures."""
    draws = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Linear(2, elements), nn.ReLU(), nn.Linear(elements, 2), nn.Linear(2, elements), nn.Linear(elements, 2)
    )
    anatomy = Anatomy.of(model)
    split = Split.of(anatomy, layers=anatomy.select(["0", "3"]))
    state = state_of(model)
    settings = {
        "method": {"name": method, "layers": ["0", "3"], "tau": "50%"},
        "local": {"epochs": 5, "batch_size": 32, "lr": 0.001, "optimizer": "adam", "loss": "cross_entropy"},
        "cohort": 10,
        "seed": 0,
        "evaluate_every": 1,
        "newcomers": 0.0,
        "clients": clients,
        "data": "made up",
    }
    config = {
        "version": "0.1.0",
        "rounds": rounds,
        "settings": settings,
        "tensors": {name: [list(t.shape), "float32"] for name, t in state.items()},
        "split": split.to_json(),
        "names": None,
        "origin": None,
    }
    parts = {str(i): {"train": list(range(480)), "test": list(range(120))} for i in range(clients)}
    counts = draws.integers(0, 120, (clients, 10)).tolist()
    partition = json.dumps({"fingerprint": "made up", "clients": parts, "counts": counts})
    run = RunDirectory.create(path, config, partition=partition)
    for number in range(1, rounds + 1):
        scores = {layer: draws.random(elements).tolist() for layer in split.masks}
        split = split.with_masks({layer: [v >= 0.5 for v in values] for layer, values in scores.items()})
        accuracy = float(1 - np.exp(-number / 100) + 0.02 * draws.standard_normal())
        test = {"model": "personal", "clients": clients, "samples": 12000, "loss": 1 - accuracy, "accuracy": accuracy}
        test |= dict.fromkeys(("mean", "std", "median", "worst_decile", "jain"), accuracy)
        notes = {"elements": elements, "kept": 0.8, "tau": 0.5, "factors": 300, "converged": True, "dead": 0}
        record: dict[str, Any] = {
            "round": number,
            "cohort": list(range(10)),
            "left_out": {},
            "samples": 4800,
            "train_loss": 1 - accuracy,
            "shared_share": split.shared_share,
            "split": {layer: {**notes, "shared": sum(mask)} for layer, mask in split.masks.items()},
            "test": test,
        }
        rows = [
            {"client": str(i), "samples": 120, "loss": 0.5, "accuracy": float(draws.random())} for i in range(clients)
        ]
        timing = {"train": 1.0, "moments": 0.1, "decide": 0.2, "aggregate": 0.1, "evaluate": 0.5}
        run.commit(record, state, split, scores=scores, clients=rows, timing=timing)
    run.close()


def chromium(*flags: str) -> Any:
    """Headless Chromium with its own driver; selenium would else look for one on the internet."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", *flags):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / name for name in ("fedavg", "fedper", "fedfac-static", "fedfac")]
        for path in runs:
            big_run(path, method=path.name)
        start = time.perf_counter()
        page = report.write(runs, Path(folder) / "page.html")
        print(f"written in {time.perf_counter() - start:.1f} s, {page.stat().st_size / 1e6:.2f} MB")
        browser = chromium()
        try:
            for _ in range(3):
                browser.get(page.as_uri())
                took = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
                print(f"opened in {browser.execute_script(took) / 1000:.2f} s")
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
