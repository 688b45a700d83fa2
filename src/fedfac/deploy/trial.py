"""``fedfac deploy try``: the whole of it on this machine, with real processes, to see it work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedfac.deploy.app import DEFAULTS, write_app
from fedfac.deploy.certs import write_certs
from fedfac.deploy.processes import HOST, Network
from fedfac.errors import ConfigError, RunError
from fedfac.progress import RoundProgress, Steps

STRANGER = "stranger"


def attempt(
    folder: Path,
    *,
    nodes: int,
    rounds: int,
    method: str,
    shares_weights: bool = False,
    stranger: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """A SuperLink, ``nodes`` SuperNodes with a part of the digits each, and a run; returns what came out.

    The app is the one that ``fedfac deploy init`` writes, and the nodes agree to what nodes agree to unasked, unless
    they say ``share-weights``. ``stranger`` starts one more node, whose key nobody has registered, to see it refused.
    """
    folder = folder.resolve()  # the processes run in a folder of their own
    if nodes < 1 or rounds < 1:
        raise ConfigError(f"{nodes} nodes and {rounds} rounds were asked for; at least one of each is needed")
    names = [str(number) for number in range(nodes)]
    tables = {section: dict(table) for section, table in DEFAULTS.items()}
    tables["deploy"] |= {"clients": nodes, "deadline": 120.0}
    tables["data"] |= {"clients": nodes, "partition": "dirichlet", "alpha": 0.5}
    tables["train"] |= {"rounds": rounds, "cohort": nodes}
    if method != tables["method"]["name"]:
        tables["method"] = {"name": method, **({"layers": "1", "tau": "50%"} if method == "fedfac" else {})}
    with Steps("setting up", 4 + stranger, quiet=quiet) as steps:
        app = write_app(folder / "trial", tables)
        keys = folder / "keys"
        write_certs(keys, hosts=[HOST, "localhost"], nodes=[*names, STRANGER])
        steps.step("an app and keys")
        with Network(folder, keys) as network:
            network.start_link()
            steps.step(f"a SuperLink on port {network.port}, TLS, only nodes with registered keys")
            for name in names:
                network.register(keys / "nodes" / f"{name}.pub")
            steps.step(f"{nodes} keys registered")
            for name in names:
                config: dict[str, Any] = {"client": name, "folder": str(network.folder / f"node-{name}")}
                config |= {"share-weights": True} if shares_weights else {}
                network.start_node(f"node-{name}", keys / "nodes" / name, config)
            if stranger:
                network.start_node(STRANGER, keys / "nodes" / STRANGER, {"client": "0"})
            steps.step(f"{nodes} SuperNodes")
            refused = stranger and _was_refused(network)
            if stranger:
                steps.step("one more node, with a key that is not registered: refused")
            out = network.folder / "run"
            network.start_run(app, {})
            with RoundProgress(method, rounds, quiet=quiet) as progress:
                _follow(network, out / "metrics.jsonl", rounds, progress)
            network.wait(lambda: network.processes["run"].poll() is not None, "the run does not end", seconds=60)
    return {"run": str(out), "app": str(app), "nodes": names, "stranger_refused": refused if stranger else None}


def _was_refused(network: Network) -> bool:
    """Wait for Flower to turn the stranger away."""
    network.wait(lambda: "Exit Code: 305" in network.log(STRANGER), "the stranger was not refused", seconds=60)
    return True


def _follow(network: Network, metrics: Path, rounds: int, progress: Callable[[dict[str, Any]], None]) -> None:
    """Show every round as the server records it."""
    shown = 0
    while True:
        ended = network.processes["run"].poll() is not None
        records = whole_records(metrics)
        for record in records[shown:]:
            progress(record)
        shown = len(records)
        if records and records[-1]["round"] >= rounds:
            return
        if ended:
            raise RunError(f"the run ended after {shown} of {rounds} rounds:\n{network.log('run')[-3000:]}")
        time.sleep(0.5)


def whole_records(metrics: Path) -> list[dict[str, Any]]:
    """The records that are wholly written; another process may be writing the next one."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
