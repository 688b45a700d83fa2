"""``fedfac deploy export``: a node's personalised model, for use: safetensors and a config.

It is made on the node, from what the server last sent for an evaluation and what the client keeps; nothing is sent.
``fedfac.load`` reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedfac import __version__
from fedfac.engine.flower import data as node_data
from fedfac.engine.flower.folder import Folder, found_in
from fedfac.engine.flower.node import own_state
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.errors import RunError
from fedfac.exported import CONFIG, FORMAT, WEIGHTS
from fedfac.newcomers import trained_copy
from fedfac.run import atomic_write
from fedfac.split import mask_of
from fedfac.state import references, to_bytes


def export(base: Path, out: Path, *, run: str | None = None, client: str | None = None) -> dict[str, Any]:
    """Write the model of a client to ``out``; returns what its config says."""
    run, client = _chosen(base, run, client)
    folder = Folder(base, run, client)
    with folder.lock():
        found = folder.model()
        if found is None:
            raise RunError(f"{folder.path} has no model yet: it comes with the first evaluation of a run")
        about, server = found
        deployment = Deployment.read(about.run)
        template, plan = deployment.plan(deployment.model(tuple(about.shape), about.classes))
        masks = {layer: mask_of(text) for layer, text in about.masks.items()}
        split = plan.split_in(about.round, masks)
        own = own_state(folder, split, about.last, plan, begins_anew=False)
        state = split.overlay(server, own)
    if plan.prediction.refresh:  # a method that fine-tunes before it predicts
        node = NodeConfig.read(about.node, 0)
        data, _ = node_data.load(deployment, node, client=about.client)
        tuned = trained_copy(
            template,
            state,
            split,
            plan.prediction.refresh,
            deployment.local(about.classes),
            data,
            seed=deployment.config.train.seed,
            client=about.client,
            round=about.round,
            purpose="refresh",
        )
        state = references(tuned)
    config = {
        "format": FORMAT,
        "version": __version__,
        "client": client,
        "run": run,
        "round": about.round,
        "model": {"name": deployment.model_name, **{k: v for k, v in deployment.config.model.items() if k != "name"}},
        "method": {"name": deployment.config.method_name, **deployment.config.method_options},
        "shape": about.shape,
        "classes": about.classes,
        "split": split.to_json(),
    }
    if (out / CONFIG).exists():
        raise RunError(f"{out} already holds a model: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / WEIGHTS, to_bytes(state))
    atomic_write(out / CONFIG, json.dumps(config, indent=1) + "\n")
    return config


def _chosen(base: Path, run: str | None, client: str | None) -> tuple[str, str]:
    """The one run and client that are meant; the newest run, if none is named."""
    there = found_in(base)
    if not there:
        raise RunError(f"{base} has no model of any run: give the folder that the node's config names (folder=...)")
    fitting = [(r, c) for r, c in there if run in (None, r) and client in (None, c)]
    if not fitting:
        listed = ", ".join(f"client {c!r} of run {r}" for r, c in there)
        raise RunError(f"{base} has no model of run {run or 'any'} and client {client or 'any'}. It has {listed}")
    newest = [(r, c) for r, c in fitting if r == fitting[0][0]]
    if len(newest) > 1:
        raise RunError(f"{base} has several clients: say which one, --client {' or '.join(c for _, c in newest)}")
    return newest[0]
