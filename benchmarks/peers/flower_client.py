# mypy: ignore-errors
"""The client of the job in Flower. A module of its own: Ray's actors import it once and keep job and network."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peer import CNN, Job

app = ClientApp()


@functools.cache
def kept(folder: str) -> tuple[Job, CNN]:
    """Read and built once in an actor's life."""
    job = Job(folder)
    return job, job.model()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001
    config = message.content["config"]
    job, model = kept(config["folder"])
    visit = job.visit(config["server-round"] - 1, config["place"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=job.lr, fused=config["fused"] or None)
    total = torch.zeros(())
    for inputs, targets in visit:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(targets)
    figures = MetricRecord({"loss": float(total) / visit.samples, "num-examples": visit.samples})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": figures}), reply_to=message)
