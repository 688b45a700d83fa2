"""Flower's ServerApp: the one round loop, on a roster of SuperNodes.

Its state is a run directory, as in process. Killed and started again with the same command, it goes on from the last
whole round with the same clients.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedfac.data.federation import numbers
from fedfac.engine.flower.engine import NetworkEngine, Terms
from fedfac.engine.flower.grid import GridTransport, roster_of
from fedfac.engine.flower.settings import Deployment
from fedfac.engine.flower.wire import Limits
from fedfac.errors import RunError
from fedfac.method import Plan
from fedfac.progress import RoundProgress
from fedfac.records import Record
from fedfac.result import Result
from fedfac.roster import Roster
from fedfac.rounds import Session
from fedfac.run import read_config
from fedfac.settings import Settings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What ``flwr run`` starts."""
    train(grid, Deployment.read(context.run_config))


def train(grid: Grid, run: Deployment) -> Result:
    """Start the run, or go on with it."""
    out = Path(run.deploy.out)
    resume = (out / "config.json").exists()
    transport = GridTransport(grid, run.deploy.deadline, Limits(samples=run.deploy.most_samples))
    with RoundProgress(run.config.method_name, run.config.train.rounds) as progress:
        roster = _known_roster(run, transport, out) if resume else _new_roster(run, transport, progress)
        model = run.model(tuple(roster.about["shape"]), roster.classes, start=True)
        asked = {
            f.name: getattr(run.config.train, f.name) for f in fields(Settings) if hasattr(run.config.train, f.name)
        }
        settings = Settings(**asked, out=out, resume=resume, device="cpu")
        session = Session(model, roster, run.method, run.local(roster.classes), settings)
        done = session.next_round - 1
        progress.say(f"{out}: going on after round {done}" if resume else f"{out}: {', '.join(roster.names)}")
        result = session.drive(lambda record: _write_now(session, record, progress))
        _hand_out(session)
        return result


def _write_now(session: Session, record: Record, progress: RoundProgress) -> None:
    """A round is on disk before the next one is asked for: nodes do not train a round that lies further back."""
    if session.run is not None:
        session.run.flush()
    progress(record)


def _hand_out(session: Session) -> None:
    """Clients that are not tested have not seen the last model: they get it now."""
    rest = [client for client in session.participants if client not in session.tested]
    if rest and isinstance(session.engine, NetworkEngine):
        session.engine.hand_out(session.next_round - 1, session.server, session.split, rest)


def _new_roster(run: Deployment, transport: GridTransport, progress: RoundProgress) -> Roster:
    wanted = run.deploy.clients
    progress.say(f"waiting for {wanted} nodes")
    there = transport.wait_for(wanted)
    if len(there) < wanted:
        refused = "; ".join(f"node {node}: {why}" for node, why in sorted(transport.reasons.items()))
        raise RunError(
            f"{len(there)} of {wanted} nodes came within {run.deploy.deadline:g} s ({', '.join(sorted(there))}). "
            + (f"Not taken in: {refused}. " if refused else "")
            + "Start the others, or make clients in [deploy] smaller; a longer deadline waits longer"
        )
    names, shape, classes = roster_of({name: transport.hellos[node] for name, node in there.items()})
    about = {
        "run": secrets.token_hex(8),
        "shape": list(shape),
        "classes": classes,
        "nodes": {name: there[name] for name in names},
        "samples": [transport.hellos[there[name]].samples for name in names],
        "config": dict(run.flat),
    }
    return _roster(run, transport, names, about)


def _known_roster(run: Deployment, transport: GridTransport, out: Path) -> Roster:
    found = read_config(out)
    if "remote" not in found:
        raise RunError(f"{out} holds a run that was made in one process; give deploy.out another folder")
    names = found["names"] or list(numbers(found["settings"]["clients"]))
    roster = _roster(run, transport, names, found["remote"])
    transport.wait_for(len(names), names)
    return roster


def _roster(run: Deployment, transport: GridTransport, names: Sequence[str], about: Mapping[str, Any]) -> Roster:
    classes: int | None = about["classes"]
    terms = Terms(
        run=about["run"],
        names=names,
        classes=classes,
        metrics=list(run.metrics(classes)),
        minimum=run.deploy.minimum,
        most_samples=run.deploy.most_samples,
        announced=dict(enumerate(about.get("samples", ()))),
    )
    transport.bind(names, about["nodes"] if run.deploy.keys else {})

    def connect(model: nn.Module, plan: Plan, records: Sequence[Mapping[str, Any]]) -> NetworkEngine:
        return NetworkEngine(model, plan, records, transport, terms)

    fingerprint = f"on nodes: samples of {about['shape']}, classes: {classes}"
    return Roster(names, classes, fingerprint, connect, about)
