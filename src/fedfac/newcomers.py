"""Clients that were never there (paper 3.2, last paragraphs).

*Adapt* (the paper's LocalTrain, for FedFac): the newcomer starts from the server's values and trains by the
method's own rule, for FedFac its personal elements only, the shared ones frozen. *Ensemble*: for a newcomer that
cannot train, the mean of the existing clients' predicted probabilities. The paper assumes that the newcomer has
access to their personalised models; an ensemble is therefore the one thing here for which personal parts have to
leave their clients, and is only made when it is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfac import evaluate
from fedfac.data.federation import Federation
from fedfac.data.pool import ClientData
from fedfac.engine.lanes import LaneEngine, pick_device
from fedfac.engine.store import CachedStore, MemoryStore, Store
from fedfac.errors import RunError, TrainingError
from fedfac.method import Phase
from fedfac.numerics import CPU, Numerics
from fedfac.split import Split
from fedfac.state import State, clone, load_state, references
from fedfac.training import Local, noise_of, train_client

if TYPE_CHECKING:
    from fedfac.result import Result


def trained_copy(
    template: nn.Module,
    start: State,
    split: Split,
    phases: Sequence[Phase],
    local: Local,
    data: ClientData,
    *,
    seed: int,
    client: int,
    round: int = 0,
    purpose: str,
) -> nn.Module:
    """A copy of the model that went from ``start`` through some phases on one client's data, in eval mode."""
    with _as_in_a_lane():
        numerics = Numerics.choose(template, CPU)
        model = numerics.place(copy.deepcopy(template))
        load_state(model, start)
        outcome = train_client(
            model,
            references(model),
            data,
            phases,
            local,
            received=clone(start),
            split=split,
            seeded=noise_of(model, phases, local, data),
            seed=seed,
            round=round,
            client=client,
            purpose=purpose,
            numerics=numerics,
        )
    if outcome.problem is not None:
        raise TrainingError(f"the client's model did not stay finite ({outcome.problem}): lower the learning rate")
    return model.eval()


@contextmanager
def _as_in_a_lane() -> Iterator[None]:
    """One intra-op thread, and gradients whatever the caller has switched off: the same bits as in a round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def for_epochs(phases: Sequence[Phase], epochs: int | None) -> tuple[Phase, ...]:
    """The phases, each that trains at all for that many epochs; None leaves them as they are."""
    return tuple(p if epochs is None or p.epochs == 0 else replace(p, epochs=epochs) for p in phases)


class Ensemble(nn.Module):
    """The mean of the clients' predicted probabilities, as its logarithm (so that it is a classifier's output).

    For real targets it is the mean of their outputs.
    """

    def __init__(
        self,
        template: nn.Module,
        server: State,
        split: Split,
        store: Store,
        clients: Sequence[int],
        *,
        classes: bool = True,
    ) -> None:
        super().__init__()
        self.template = copy.deepcopy(template).eval()
        self._server, self._split, self._store = server, split, store
        self.clients = list(clients)
        self.classes = classes
        if not self.clients:
            raise RunError("no client has trained yet, so there is nothing to make an ensemble of")

    def forward(self, inputs: Tensor) -> Tensor:
        """log of the mean of softmax over clients; for real targets the mean of the outputs."""
        total: Tensor | float = 0.0
        for state in self._states():
            output: Tensor = functional_call(self.template, state, (inputs,))
            total = total + (output.softmax(1) if self.classes else output)
        mean = torch.as_tensor(total) / len(self.clients)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if self.classes else mean

    def _states(self) -> Iterator[State]:
        for client in self.clients:
            yield self._split.overlay(self._server, self._store.get(client))


def serve(
    result: Result,
    *,
    epochs: int | None = None,
    rule: str | None = None,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    precision: str = "auto",
    layout: str = "auto",
    deterministic: bool = False,
    stack: bool | None = None,
) -> dict[str, dict[str, Any]]:
    """How the clients that were kept out of training fare, by each of the method's rules for newcomers.

    With a ``rule`` only by that one, if the method has it.

    Each newcomer adapts to its own training samples (or, for the ensemble, to nothing) and is tested on its own test
    samples; one whose adaptation does not stay finite keeps the server's model. ``epochs`` of adaptation default to
    those of the run; the rest says where and how it is computed, as for :func:`fedfac.fit`.
    """
    plan, federation, local = result.plan, result.federation, result.local
    if plan is None or federation is None or local is None:
        raise RunError("serving newcomers needs the run's method, federation and loss: fedfac.load(path, model, ...)")
    if not result.newcomers:
        raise RunError("no client was kept out of training: train with newcomers=0.1 (--newcomers 0.1)")
    numerics = Numerics.choose(
        result.template, pick_device(device), precision=precision, layout=layout, deterministic=deterministic
    )
    result = replace(result, server={name: tensor.to(numerics.device) for name, tensor in result.server.items()})
    metrics = evaluate.named_metrics(None, federation.classes)
    figures: dict[str, dict[str, Any]] = {}
    for own in plan.prediction.newcomer_rules:
        if rule not in (None, own):
            continue
        if own == "ensemble":
            figures[own] = evaluate.summary(_together(result, federation.to(numerics.device), local, metrics), own)
            continue
        engine = LaneEngine(
            result.template,
            federation,
            replace(plan, prediction=replace(plan.prediction, newcomer=for_epochs(plan.prediction.newcomer, epochs))),
            local if epochs is None else replace(local, epochs=epochs),
            MemoryStore(),  # newcomers have stored nothing
            seed=result.seed,
            lanes=lanes,
            numerics=numerics,
            stack=stack,
            metrics=metrics,
        )
        with closing(engine):
            scores = engine.serve(result.server, result.split, result.newcomers)
        figures[own] = evaluate.summary(scores, plan.adapts(result.split))
    return figures


def _together(
    result: Result, federation: Federation, local: Local, metrics: Mapping[str, evaluate.Metric]
) -> list[evaluate.Score]:
    """The newcomers' scores by the ensemble, where the server's state and the samples are."""
    device = next(iter(result.server.values())).device
    ensemble = replace(result, store=CachedStore(result.store, device)).ensemble().to(device)
    scores = []
    for client in result.newcomers:
        data = federation.client(client)
        scores.append(evaluate.score(ensemble, client, data.pool, data.test, local.loss, federation.classes, metrics))
    return scores
