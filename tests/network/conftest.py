"""One SuperLink with TLS and node authentication, three SuperNodes with a CSV file each: real processes on loopback."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfac.deploy.app import write_app
from fedfac.deploy.certs import write_certs
from fedfac.deploy.processes import Network
from fedfac.deploy.trial import whole_records
from fedfac.run import RunDirectory
from fedfac.seeds import stream

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers

NAMES = ("east", "north", "west")
FEATURES = 5
CONFIG: dict[str, dict[str, Any]] = {
    "deploy": {"out": "run", "clients": 3, "deadline": 90.0, "minimum": 0.5},
    "data": {"name": "own", "label": "ill", "classes": "no,yes", "test_share": 0.25},
    "model": {"name": "mlp", "hidden": 8},
    "method": {"name": "fedfac", "layers": "1", "tau": "50%"},
    "train": {"rounds": 3, "cohort": 3, "epochs": 2, "batch_size": 8, "lr": 1e-2, "seed": 7, "evaluate_every": 3},
}

# The app's own server: everything that it receives is written down as it came.
SERVER = '''
import json
from pathlib import Path

from flwr.serverapp import ServerApp
from flwr.app import ArrayRecord

from fedfac.engine.flower import server
from fedfac.engine.flower.settings import Deployment

app = ServerApp()


class Watched:
    """Flower's grid; every reply is written down before anybody looks at it."""

    def __init__(self, grid, folder):
        self.grid, self.folder, self.count = grid, folder, 0

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def pull_messages(self, ids):
        replies = list(self.grid.pull_messages(ids))
        for reply in replies:
            self.count += 1
            about = {"type": reply.metadata.message_type, "from": str(reply.metadata.src_node_id)}
            if reply.has_content():
                for name, record in reply.content.items():
                    if isinstance(record, ArrayRecord):
                        for key, array in record.items():
                            (self.folder / f"{self.count:03d}.{name}.{key}").write_bytes(array.data)
                    else:
                        about[name] = {key: repr(value) for key, value in record.items()}
            else:
                about["error"] = str(reply.error)
            (self.folder / f"{self.count:03d}.json").write_text(json.dumps(about))
        return replies


@app.main()
def main(grid, context):
    run = Deployment.read(context.run_config)
    folder = Path(run.deploy.out).with_name(Path(run.deploy.out).name + "-received")
    folder.mkdir(exist_ok=True)
    server.train(Watched(grid, folder), run)
'''

# The app's own client: a node that is started with garbage=true answers with it.
CLIENT = """
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedfac.engine.flower.client import answer

app = ClientApp()


@app.query("hello")
@app.train("train")
@app.train("collect")
@app.evaluate("evaluate")
def reply(message, context):
    if context.node_config.get("garbage") and message.metadata.message_type == "train.train":
        junk = Array(dtype="uint8", shape=(4,), stype="safetensors", data=b"junk")
        content = {"values": ConfigRecord({"json": "{}"}), "tensors": ArrayRecord({"state": junk})}
        return Message(RecordDict(content), reply_to=message)
    return answer(message, context)
"""


class Hospitals:
    """The network, and what the tests ask it for."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.app = folder / "hospitals"
        self.numbers: dict[str, int] = {}

    def start_node(self, name: str, **config: Any) -> None:
        config = {"client": name, "data": str(self.folder / f"{name}.csv"), "folder": str(self.state(name)), **config}
        config["share-weights"] = True  # FedFac measures, and nothing is masked
        self.network.start_node(name, self.network.keys / "nodes" / name, config)

    def restart_node(self, name: str) -> None:
        """As a supervisor does: again and again, since the SuperLink takes a minute to notice that a node has died."""
        network, seen = self.network, self.network.log(name).count("SuperNode ID")
        end = time.monotonic() + 120
        while network.log(name).count("SuperNode ID") == seen:
            if name not in network.processes or network.processes[name].poll() is not None:
                assert time.monotonic() < end, network.log(name)[-2000:]
                network.end(name)
                self.start_node(name)
            time.sleep(0.5)

    def state(self, name: str) -> Path:
        return self.folder / f"{name}-state"

    def start(self, out: str, **config: Any) -> None:
        self.network.start_run(self.app, {"deploy.out": out, **{k.replace("__", "."): v for k, v in config.items()}})

    def records(self, out: str) -> list[dict[str, Any]]:
        return whole_records(self.folder / out / "metrics.jsonl")

    def wait_for_round(self, out: str, number: int) -> None:
        done = lambda: any(r["round"] >= number for r in self.records(out))  # noqa: E731
        self.network.wait(done, f"no round {number}", "run", seconds=480)

    def finish(self, out: str, rounds: int) -> RunDirectory:
        self.wait_for_round(out, rounds)
        self.network.wait(lambda: self.network.processes["run"].poll() is not None, "the run does not end")
        self.network.end("run")
        return RunDirectory.read(self.folder / out)


def write_csv(path: Path, client: int) -> None:
    """Visits of one hospital: who is ill follows another rule in each."""
    draws = stream(0, "hospital", client)
    x = draws.normal(client, 1.0 + client, (24 + 8 * client, FEATURES))
    ill = x[:, client] + x[:, 3] > x[:, 4] + client
    header = ",".join([*(f"x{i}" for i in range(FEATURES)), "ill"])
    rows = [",".join([*(f"{v:.9f}" for v in row), "yes" if flag else "no"]) for row, flag in zip(x, ill, strict=True)]
    assert len(np.unique(ill)) == 2
    path.write_text("\n".join([header, *rows]) + "\n")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    folder = tmp_path_factory.mktemp("network")
    write_app(folder / "hospitals", CONFIG)
    (folder / "hospitals" / "hospitals" / "server_app.py").write_text(SERVER)
    (folder / "hospitals" / "hospitals" / "client_app.py").write_text(CLIENT)
    write_certs(folder / "keys", hosts=["127.0.0.1"], nodes=[*NAMES, "liar"])
    for number, name in enumerate(NAMES):
        write_csv(folder / f"{name}.csv", number)
    with Network(folder, folder / "keys") as network:
        made = Hospitals(folder, network)
        network.start_link()
        for name in NAMES:
            made.numbers[name] = network.register(network.keys / "nodes" / f"{name}.pub")
        for name in NAMES:
            made.start_node(name)
        yield made
