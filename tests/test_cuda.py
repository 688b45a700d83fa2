"""The same engine on a GPU. Run where there is one: ``pytest tests/test_cuda.py``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedfac
from fedfac import comparison, experiment, methods
from fedfac.conformance import small_federation, small_model
from fedfac.engine import graphs
from fedfac.engine.graphs import GraphSteps, GraphSums, Recorder
from fedfac.method import Method
from fedfac.newcomers import serve
from fedfac.run import RunDirectory
from fedfac.seeds import global_stream, stream
from fedfac.state import same
from fedfac.switches import Joint, Prior, Proximal, Warmup
from fedfac.training import eager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


METHODS: list[Method] = [
    *(methods.build(name) for name in sorted(methods.METHODS)),
    methods.fedfac_plus() | Warmup(1),
    methods.fedfac_plus() | Joint(False) | Warmup(1),
    methods.fedfac_plus() | Prior(smoothing="learned"),
    methods.fedfac_plus() | Prior(smoothing="learned") | Proximal(0.1),
]


def smooth_model() -> nn.Module:
    """No dropout and no batch normalisation: rounding is all that differs between devices."""
    with global_stream(0, "cuda"):
        return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: str(m.name))
def test_a_gpu_gives_what_a_cpu_gives(method: Method) -> None:
    results = [
        fedfac.fit(
            smooth_model(),
            small_federation(),
            method=method,
            rounds=3,
            cohort=3,
            epochs=1,
            batch_size=8,
            optimizer="sgd",
            lr=0.05,
            device=device,
            precision="fp32",
        )
        for device in ("cpu", "cuda")
    ]
    for name, tensor in results[0].server.items():
        torch.testing.assert_close(results[1].server[name], tensor, rtol=1e-3, atol=1e-4)
    assert results[1].accuracy == pytest.approx(results[0].accuracy, abs=0.1)


def test_dropout_on_a_gpu_is_seeded_and_resume_works(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "method": methods.fedfac(layers=[1]),
        "cohort": 3,
        "epochs": 1,
        "batch_size": 8,
        "device": "cuda",
        "deterministic": True,
    }
    straight = fedfac.fit(small_model(), small_federation(), rounds=3, **arguments)
    fedfac.fit(small_model(), small_federation(), rounds=1, out=tmp_path / "r", **arguments)
    resumed = fedfac.fit(small_model(), small_federation(), rounds=3, out=tmp_path / "r", resume=True, **arguments)
    assert resumed.records == straight.records
    assert same(resumed.server, straight.server)
    assert next(resumed.model(0).parameters()).device.type == "cpu"


def one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that never capture anything."""
    monkeypatch.setattr(GraphSteps, "__call__", lambda self, work, batches: eager(work, batches))
    monkeypatch.setattr(GraphSums, "__call__", lambda self, pool, numbers: False)


def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says what is recorded."""
    made: list[str] = []
    record = Recorder.record

    def watched(self: Recorder, run: Any) -> Any:
        made.append(threading.current_thread().name)
        return record(self, run)

    monkeypatch.setattr(Recorder, "record", watched)
    return made


@pytest.mark.parametrize("method", METHODS, ids=lambda m: str(m.name))
@pytest.mark.parametrize("kind", ["plain", "dropout and batch norm"])
def test_replays_are_the_eager_steps(method: Method, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = captured(monkeypatch)
    model = smooth_model() if kind == "plain" else small_model()
    arguments: dict[str, Any] = {
        "rounds": 3, "cohort": 4, "epochs": 2, "batch_size": 8, "device": "cuda", "precision": "fp32",
        "deterministic": True, "stack": False, "evaluate_every": 1,
    }  # fmt: skip
    replayed = fedfac.fit(model, small_federation(), method=method, lanes=3, **arguments)
    assert made
    one_batch_at_a_time(monkeypatch)
    eagerly = fedfac.fit(model, small_federation(), method=method, lanes=1, **arguments)
    for client in range(3):
        for tensor, value in eagerly.state(client).items():
            torch.testing.assert_close(replayed.state(client)[tensor], value, rtol=1e-3, atol=1e-4)
    for a, b in zip(replayed.records, eagerly.records, strict=True):
        if a["round"]:
            assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-3)
            assert a["test"]["loss"] == pytest.approx(b["test"]["loss"], abs=1e-3)
            assert a["test"]["samples"] == b["test"]["samples"]
            assert a["test"]["accuracy"] == pytest.approx(b["test"]["accuracy"], abs=0.05)


def test_last_batches_of_all_sizes_share_a_graph_if_no_sample_sees_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 11 to 22 samples in batches of 8: two graphs for every lane, with dropout too."""
    rng = stream(0, "sizes")
    clients = []
    for n in range(11, 23):
        x, y = rng.normal(size=(n, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, n)
        clients.append((x, y, x, y))
    with global_stream(0, "model"):
        plain = smooth_model()
    noisy = nn.Sequential(plain, nn.Dropout(0.3))
    arguments: dict[str, Any] = {
        "rounds": 3, "cohort": 12, "epochs": 2, "batch_size": 8, "device": "cuda", "precision": "fp32",
        "deterministic": True, "stack": False, "evaluate_every": 3, "method": methods.fedavg(),
    }  # fmt: skip
    data = fedfac.Federation.from_arrays(clients, classes=3)
    monkeypatch.setattr(GraphSums, "__call__", lambda self, pool, numbers: False)
    made = captured(monkeypatch)
    one, three = (fedfac.fit(noisy, data, lanes=lanes, **arguments) for lanes in (1, 3))
    assert len(made) == 2 + 3 * 2
    assert same(one.server, three.server)
    filled = fedfac.fit(plain, data, lanes=2, **arguments)
    one_batch_at_a_time(monkeypatch)
    eagerly = fedfac.fit(plain, data, lanes=1, **arguments)
    for name, tensor in eagerly.server.items():
        torch.testing.assert_close(filled.server[name], tensor, rtol=1e-3, atol=1e-4)
    assert filled.records[-1]["train_loss"] == pytest.approx(eagerly.records[-1]["train_loss"], abs=1e-4)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedfac"])
def test_scores_are_rows_of_a_table_that_may_be_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with no test samples, with few, and with more than a batch; validation samples; three rows at a time."""
    rng = stream(0, "rows")
    clients = []
    for tested in (0, 1, 40, 513, 1100, 7, 32, 33):
        x, y = rng.normal(size=(30 + tested, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, 30 + tested)
        clients.append((x[:30], y[:30], x[30:], y[30:]))
    data = fedfac.Federation.from_arrays(clients, classes=3).with_validation(0.2)
    arguments: dict[str, Any] = {
        "rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cuda", "precision": "fp32",
        "deterministic": True, "stack": False, "evaluate_every": 1, "method": methods.build(name),
    }  # fmt: skip
    plenty = fedfac.fit(smooth_model(), data, lanes=2, **arguments)
    monkeypatch.setattr(graphs, "ROWS", 3)
    few = fedfac.fit(smooth_model(), data, lanes=2, **arguments)
    assert few.records == plenty.records
    one_batch_at_a_time(monkeypatch)
    eagerly = fedfac.fit(smooth_model(), data, lanes=2, **arguments)
    for a, b in zip(plenty.records, eagerly.records, strict=True):
        for part in ("test", "validation") if a["round"] else ():
            assert a[part]["loss"] == pytest.approx(b[part]["loss"], abs=1e-3)
            assert a[part]["samples"] == b[part]["samples"] == (1726 if part == "test" else 48)
    for a, b in zip(plenty.clients, eagerly.clients, strict=True):
        assert (a["client"], a["samples"]) == (b["client"], b["samples"])
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.04) if a["samples"] else a["accuracy"] is None


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavg+", "fedper", "fedfac", "fedfac-plus", "fedem", "lg-fedavg", "ditto"]
)
def test_newcomers_are_served_by_replays_as_a_cpu_serves_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {
        "rounds": 2, "cohort": 3, "epochs": 2, "batch_size": 8, "optimizer": "sgd", "lr": 0.05, "newcomers": 0.4,
        "precision": "fp32", "deterministic": True,
    }  # fmt: skip
    cpu, gpu = (
        fedfac.fit(smooth_model(), small_federation(), method=methods.build(name), device=device, **arguments)
        for device in ("cpu", "cuda")
    )
    here, there = (result.records[-1]["newcomers"]["adapt"] for result in (cpu, gpu))
    assert (there["model"], there["samples"]) == (here["model"], here["samples"])
    assert there["loss"] == pytest.approx(here["loss"], abs=5e-3)
    made = captured(monkeypatch)
    again = serve(cpu, device="cuda", precision="fp32", deterministic=True)
    assert made
    wanted = serve(cpu, device="cpu")
    assert again.keys() == wanted.keys()
    for rule, figures in wanted.items():
        assert again[rule]["loss"] == pytest.approx(figures["loss"], abs=1e-3)
    one_batch_at_a_time(monkeypatch)
    eagerly = serve(cpu, device="cuda", precision="fp32", deterministic=True, lanes=1)
    assert again["adapt"]["loss"] == pytest.approx(eagerly["adapt"]["loss"], abs=1e-3)


def test_any_number_of_lanes_gives_the_same_bits_if_asked_to() -> None:
    arguments: dict[str, Any] = {"rounds": 2, "cohort": 5, "epochs": 1, "batch_size": 8, "deterministic": True}
    one, four = (
        fedfac.fit(small_model(), small_federation(), method=methods.fedper(), lanes=n, device="cuda", **arguments)
        for n in (1, 4)
    )
    assert same(one.server, four.server)
    assert one.records == four.records


class Waits(nn.Module):
    """Looks at its own numbers, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.body = smooth_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y if float(y.detach().sum()) > -1e9 else -y


def test_a_model_that_cannot_be_captured_runs_eagerly_with_a_note() -> None:
    arguments: dict[str, Any] = {"rounds": 2, "cohort": 3, "epochs": 1, "batch_size": 8, "precision": "fp32"}
    with pytest.warns(fedfac.errors.EngineWarning, match="cannot be captured as a CUDA graph and runs eagerly"):
        result = fedfac.fit(Waits(), small_federation(), method=methods.fedavg(), device="cuda", lanes=2, **arguments)
    plain = fedfac.fit(Waits(), small_federation(), method=methods.fedavg(), device="cpu", **arguments)
    for name, tensor in plain.server.items():
        torch.testing.assert_close(result.server[name], tensor, rtol=1e-3, atol=1e-3)


def test_lazy_clients_are_captured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = captured(monkeypatch)
    arrays = []
    for number in range(6):
        rng = stream(0, "lazy", number)
        n = 15 + number
        x, y = rng.normal(size=(n, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, n)
        arrays.append((x[4:], y[4:], x[:4], y[:4]))
    data = fedfac.Federation.lazy(6, lambda i: arrays[i], classes=3)
    arguments: dict[str, Any] = {"rounds": 3, "cohort": 4, "epochs": 2, "batch_size": 8, "precision": "fp32"}
    results = [
        fedfac.fit(smooth_model(), data, method=methods.fedper(), device=device, **arguments)
        for device in ("cpu", "cuda")
    ]
    assert made
    for name, tensor in results[0].server.items():
        torch.testing.assert_close(results[1].server[name], tensor, rtol=1e-3, atol=1e-3)


def test_stacked_clients_on_a_gpu() -> None:
    with global_stream(0, "mlp"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 3))
    arguments: dict[str, Any] = {"rounds": 3, "cohort": 4, "epochs": 2, "batch_size": 8, "stack": True}
    cpu, gpu = (
        fedfac.fit(model, small_federation(), method=methods.fedfac(layers=[1]), device=device, **arguments)
        for device in ("cpu", "cuda")
    )
    assert cpu.splits == gpu.splits
    for name, tensor in cpu.server.items():
        torch.testing.assert_close(gpu.server[name], tensor, rtol=1e-3, atol=1e-4)


def test_convolutions_are_in_bf16_and_channels_last_by_themselves() -> None:
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return nn.functional.cross_entropy(outputs.float(), targets)

    result = fedfac.fit(
        smooth_model(), small_federation(), method=methods.fedavg(), rounds=1, cohort=2, epochs=1, batch_size=8,
        device="cuda", loss=loss,
    )  # fmt: skip
    assert torch.bfloat16 in seen
    assert result.server["0.weight"].dtype == torch.float32


def test_augmentation_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfac.data.pool import ArrayPool

    def shift(inputs: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        return inputs + torch.randn(inputs.shape, generator=draws, device=inputs.device)

    rng = stream(0, "augment")
    pool = ArrayPool(
        torch.from_numpy(rng.normal(size=(90, 2, 6, 6)).astype(np.float32)), torch.from_numpy(rng.integers(0, 3, 90))
    )
    parts = {str(i): (range(i * 15, i * 15 + 12), range(i * 15 + 12, i * 15 + 15)) for i in range(6)}
    data = fedfac.Federation.from_pool(pool, parts, classes=3, fingerprint="x", augment=shift)
    arguments: dict[str, Any] = {
        "rounds": 2, "cohort": 4, "epochs": 2, "batch_size": 8, "precision": "fp32", "deterministic": True,
    }  # fmt: skip
    graphs = fedfac.fit(smooth_model(), data, method=methods.fedavg(), device="cuda", **arguments)
    again = fedfac.fit(smooth_model(), data, method=methods.fedavg(), device="cuda", **arguments)
    assert same(graphs.server, again.server)
    one_batch_at_a_time(monkeypatch)
    eagerly = fedfac.fit(smooth_model(), data, method=methods.fedavg(), device="cuda", lanes=1, **arguments)
    for name, tensor in eagerly.server.items():
        torch.testing.assert_close(graphs.server[name], tensor, rtol=1e-3, atol=1e-4)


ALIKE = [
    ["fedavg:server_momentum=0.5", "fedavg+:refresh=1:server_momentum=0.5", "fedfac-plus:proximal=0:prior=0"],
    [
        "fedfac-plus",
        "fedfac-plus:tau=inf:refresh=7",
        "fedfac-plus:layers=2:average=0",
        "fedfac-plus:refresh_trains=head",
    ],
]


@pytest.mark.parametrize("labels", ALIKE, ids=lambda labels: labels[0])
def test_methods_that_train_alike_share_lanes_and_graphs(
    labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the run that it is alone, and steps of one kind are recorded once, whoever takes them."""
    tables: dict[str, Any] = {
        "data": {"clients": 6},
        "model": {"name": "cnn"},
        "method": {"layers": [1]},
        "train": {"rounds": 3, "cohort": 3, "epochs": 2, "batch_size": 16, "newcomers": 0.2, "precision": "fp32"},
    }
    recorded = []
    usually = graphs._Slot.__init__

    def counts(self: Any, recorder: Recorder, *rest: Any) -> None:
        recorded.append(recorder)
        usually(self, recorder, *rest)

    monkeypatch.setattr(graphs._Slot, "__init__", counts)
    together = comparison.plan(tmp_path / "together", methods=labels, tables=tables)
    assert comparison.train(together, device="cuda", lanes=2) == {}
    shared = len(recorded)
    for number, cell in enumerate(together.cells):
        experiment.run(cell.config, out=tmp_path / str(number), device="cuda", lanes=2)
        one, other = (RunDirectory.read(folder).records() for folder in (cell.folder, tmp_path / str(number)))
        assert [r["cohort"] for r in one] == [r["cohort"] for r in other]
        for mine, alone in zip(one, other, strict=True):
            for part in ("test", "newcomers"):
                if part in mine:
                    found, wanted = (r[part].get("adapt", r[part])["loss"] for r in (mine, alone))
                    assert found == pytest.approx(wanted, rel=1e-2)
    assert shared < len(recorded) - shared
