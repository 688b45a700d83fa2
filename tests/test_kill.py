"""kill -9 at random moments: what is left can be resumed to exactly the run that was never killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RUN = ["run", "--clients", "8", "--rounds", "60", "--cohort", "4", "--epochs", "1", "--batch-size", "16", "--quiet"]
KILLS = int(os.environ.get("FEDFAC_KILLS", "3"))  # thirty by 'make soak'


def fedfac(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import sys; from fedfac.cli import main; sys.exit(main())", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(*arguments: str) -> None:
    out, err = (process := fedfac(*arguments)).communicate(timeout=240)
    assert process.returncode == 0, (out, err)


def tables(folder: Path) -> dict[str, list[Any]]:
    """Every row of the state, tensors as their bytes."""
    with sqlite3.connect(folder / "state.sqlite") as db:
        return {
            t: db.execute(f"SELECT * FROM {t} ORDER BY 1").fetchall()
            for t in ("rounds", "server", "memory", "personal")
        }


@pytest.mark.parametrize("method", ["fedfac", "fedfac-static"])
def test_it_is_killed_again_and_again_and_the_run_is_the_same(tmp_path: Path, method: str) -> None:
    kills = KILLS if method == "fedfac" else 2
    finish(*RUN, "--method", method, "--out", str(tmp_path / "straight"))
    killed = tmp_path / "killed"
    moments = random.Random(f"{method}")
    hits = 0
    seen = []
    while hits < kills:
        started = (killed / "config.json").exists()
        process = fedfac(
            *(["resume", str(killed), "--quiet"] if started else [*RUN, "--method", method, "--out", str(killed)])
        )
        # wait until it writes, so that the kill falls into training and not into the import of PyTorch
        before = _rounds(killed)
        deadline = time.monotonic() + 60
        while process.poll() is None and _rounds(killed) == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        if process.poll() is not None:
            process.communicate()
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hits += 1
        seen.append(_rounds(killed))
    assert hits == kills, f"the run ended after {hits} kills, at rounds {seen}"
    finish("resume", str(killed), "--quiet")
    assert (killed / "metrics.jsonl").read_bytes() == (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert tables(killed) == tables(tmp_path / "straight")


def _rounds(folder: Path) -> int:
    """Whole rounds so far, read while another process writes."""
    if not (folder / "config.json").exists():
        return 0
    try:
        with sqlite3.connect(f"file:{folder / 'state.sqlite'}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM rounds").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
