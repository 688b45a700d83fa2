"""The benchmark against other simulators: they get exactly our job, and a time only for the same results."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import bitwise, message
from torch import Tensor

from fedfac import methods, models
from fedfac.bench import contestants
from fedfac.bench.jobs import Job
from fedfac.bench.race import Runner
from fedfac.bench.race import race as take_turns
from fedfac.data.federation import Federation
from fedfac.data.pool import ArrayPool
from fedfac.errors import ConfigError
from fedfac.numerics import CPU
from fedfac.state import state_of
from fedfac.training import Local

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import job as files  # noqa: E402
import peer  # noqa: E402
import race  # noqa: E402
import watched  # noqa: E402

SIZES = (17, 5, 33, 16, 40, 2)  # of these, 17 and 33 leave one sample over, which joins the batch before it
ROUNDS = 2


@dataclass(frozen=True)
class Recording(ArrayPool):
    """A pool that writes down which samples it is asked for."""

    asked: list[list[int]] = field(default_factory=list)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(index.tolist())
        return super().batch(index)

    def to(self, device: torch.device) -> ArrayPool:
        return self


@pytest.fixture
def work() -> Job:
    """Six clients with 62 classes, four a round; pixels are bytes, made floats as they are asked for."""
    rng = np.random.default_rng(0)
    total = sum(SIZES)
    ends = np.cumsum(SIZES)
    samples = rng.permutation(total)
    nothing = np.empty(0, dtype=np.int64)
    parts: Any = {
        str(i): (samples[end - size : end], nothing) for i, (size, end) in enumerate(zip(SIZES, ends, strict=True))
    }
    pool = Recording(
        torch.from_numpy(rng.integers(0, 256, (total, 1, 28, 28), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 62, total)),
        lambda x: x.float() / 255 - 0.5,
    )
    federation = Federation.from_pool(pool, parts, classes=62, fingerprint="")
    model = models.build("femnist-cnn", shape=(1, 28, 28), classes=62, seed=0)
    return Job("small", federation, model, Local(epochs=1, batch_size=16), 4, (2,), "made up")


@pytest.fixture
def theirs(work: Job, tmp_path: Path) -> peer.Job:
    files.write(work, ROUNDS, tmp_path)
    return peer.Job(str(tmp_path))


def asked_of(work: Job) -> list[list[int]]:
    pool = work.federation.pool
    assert isinstance(pool, Recording)
    return pool.asked


def test_the_files_have_the_batches_that_we_train_on(work: Job, theirs: peer.Job) -> None:
    step = contestants.ours(work, CPU, methods.fedavg(), lanes=1)
    for number, cohort in enumerate(theirs.rounds, start=1):
        asked_of(work).clear()
        step(number)
        written = [batch for visit in cohort for batch in visit["batches"]]
        assert asked_of(work) == written
        assert [visit["samples"] for visit in cohort] == [SIZES[visit["client"]] for visit in cohort]
    lengths = {len(batch) for cohort in theirs.rounds for visit in cohort for batch in visit["batches"]}
    assert lengths >= {16, 17}
    assert theirs.rounds[0] != theirs.rounds[1]


def test_samples_and_start_are_ours(work: Job, theirs: peer.Job) -> None:
    pool = work.federation.pool
    assert isinstance(pool, Recording)
    inputs, targets = pool.batch(torch.arange(sum(SIZES)))
    assert bitwise({"x": theirs.inputs, "y": theirs.targets}, {"x": inputs, "y": targets})
    assert bitwise(theirs.start, state_of(work.model))
    model = theirs.model()
    assert bitwise(model.state_dict(), state_of(work.model))
    assert sum(p.numel() for p in model.parameters()) == 608_702
    assert model.training
    assert model.dropout.p == 0.5
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs[:4]), work.model.eval()(inputs[:4]))


def test_a_loop_over_the_files_has_our_losses(work: Job, theirs: peer.Job) -> None:
    """Federated averaging by hand, with PyTorch's own dropout and Adam: what a peer does."""
    step = contestants.ours(work, CPU, methods.fedavg(), layout="contiguous")
    server = theirs.start
    model = theirs.model()
    for number, cohort in enumerate(theirs.rounds):
        sums = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        weight, total = 0, 0.0
        for place in range(len(cohort)):
            visit = theirs.visit(number, place)
            model.load_state_dict(server)
            optimizer = torch.optim.Adam(model.parameters(), lr=theirs.lr)
            for inputs, targets in visit:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += float(loss.detach()) * len(targets)
            weight += visit.samples
            sums = {name: sums[name] + tensor * visit.samples for name, tensor in model.state_dict().items()}
        server = {name: tensor / weight for name, tensor in sums.items()}
        assert step(number + 1) == pytest.approx(total / weight, rel=1e-4)


def test_only_the_same_results_get_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    ours = Runner("fedfac", [], seconds=[1.0, 1.0], losses=[4.0, 2.0])
    same = Runner("pfl", [], seconds=[3.0, 2.0], losses=[4.0, 2.01], start_up=6.0, peak_mb=400.0)
    other = Runner("flower", [], seconds=[0.1, 0.1], losses=[4.0, 2.03])
    broken = Runner("eager", [], seconds=[0.1, 0.1], losses=[float("nan"), 2.0])
    everyone = [ours, same, other, broken]
    found = {runner.name: race.judged(runner, everyone) for runner in everyone}
    assert found["flower"].keys() == found["eager"].keys() == {"parity"}
    peers = {"pfl": {"pfl": "0.6.0", "torch": "2"}, "flower": {"flwr": "1.41.0", "torch": "2"}}
    whole = {"job": "j", "data": "d", "turns": 2, "peers": peers, "machine": {"cores": 2}, "workers": 2}
    race.show({**whole, "contestants": found})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "j: d, 2 turns; pfl 0.6.0, torch 2, flwr 1.41.0, 2 cores, 2 pfl workers"
    assert "| pfl | 0.50% ≤ 1% | 2.50 (2.25–2.75) | 2.5 | 6.0 | 400 |" in printed
    assert "| flower | 1.50% > 1% | no time | no time | no time | no time |" in printed
    assert "flower gets no time: its loss in round 2 is 2.0300, fedfac's 2.0000" in printed
    assert "eager gets no time: its loss in round 1 is nan, fedfac's 4.0000" in printed


CONTESTANT = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from peer import Referee
referee = Referee()
print("noise")
child = subprocess.Popen([sys.executable, "-c", "x = b'x' * 90_000_000; input()"], stdin=subprocess.PIPE)
referee.ready("words")
for loss in (3.0, 2.0, 1.0):
    referee.wait()
    import time; time.sleep(0.4)
    referee.done(loss)
child.communicate(b"\\n")
print("good bye")
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the memory of processes is Linux's to tell")
def test_a_contestant_counts_with_its_children(tmp_path: Path) -> None:
    started: list[str] = []
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", CONTESTANT, str(PEERS)]
        runner = watched.Watched("family", command, log=log, on_start=started.append)
        take_turns([runner], 1, 2, lambda turn: None)
    assert runner.losses == [3.0, 2.0, 1.0]
    assert len(runner.seconds) == 1
    assert runner.data == "words"
    assert 90 < runner.peak_mb < 2000
    assert started == ["family"]
    assert (tmp_path / "log").read_text() == "noise\ngood bye\n"  # and it ended by itself


def test_what_cannot_be_raced_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert race.main(["--contestants", "flowr"]) == 1
    assert capsys.readouterr().err == "error: there is no contestant 'flowr'. Did you mean 'flower'?\n"
    assert race.main(["--warm-up", "1"]) == 1
    assert "turns is 7 and warm-up 1; allowed: from 1 and from 2 up" in capsys.readouterr().err
    missing = tmp_path / "python"
    assert race.main(["--contestants", "pfl", "--pfl", str(missing)]) == 1
    assert capsys.readouterr().err == (
        f"error: {missing} is no Python with pfl, torch. Run benchmarks/peers/setup, say where there is one "
        "(--pfl PYTHON), or leave pfl out (--contestants)\n"
    )
    missing.write_text("#!/bin/sh\necho pfl 0.6.0\necho torch 1.0.0+cpu\n")
    missing.chmod(0o755)
    text = message(ConfigError, lambda: race.versions_in("pfl", missing))
    assert text.startswith("the environment of pfl has torch 1.0.0, fedfac's has ")
    lazy = Federation.lazy(3, lambda i: (np.zeros((4, 2)), np.zeros(4), np.zeros((1, 2)), np.zeros(1)))
    job = Job("lazy", lazy, torch.nn.Linear(2, 1), Local(), 2, (1,), "")
    text = message(ConfigError, lambda: files.write(job, 1, tmp_path))
    assert text == "the peers cannot run 'lazy': they know jobs on arrays, with plain Adam"


def test_the_peers_get_our_torch() -> None:
    ours = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    for name in race.PACKAGES:
        assert ours in (PEERS / f"{name}.txt").read_text().splitlines()


def test_the_description_is_plain_json(work: Job, theirs: peer.Job, tmp_path: Path) -> None:
    described = json.loads((tmp_path / "job.json").read_text())
    assert {name: described[name] for name in ("clients", "lr", "batch_size", "dropout")} == {
        "clients": 6,
        "lr": 1e-3,
        "batch_size": 16,
        "dropout": 0.5,
    }
    assert len(described["rounds"]) == ROUNDS
