"""What a run leaves in your hands: a model for every client, models for newcomers, the metrics, the splits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from fedfac import evaluate
from fedfac.data.federation import Federation, one_client
from fedfac.data.pool import ClientArrays, ClientData
from fedfac.engine.store import Store
from fedfac.errors import DataError, RunError, did_you_mean
from fedfac.method import Plan
from fedfac.newcomers import Ensemble, for_epochs, trained_copy
from fedfac.split import Split
from fedfac.state import State, load_state
from fedfac.training import Local

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Result:
    """The end of a run (or of the part that was run)."""

    template: nn.Module
    server: State
    split: Split
    store: Store
    names: Sequence[str]
    records: list[dict[str, Any]]
    masks: Mapping[int, Mapping[str, tuple[bool, ...]]]
    clients: list[dict[str, Any]]  # the last evaluation, a row per client
    path: Path | None
    finished: bool
    seed: int = 0
    plan: Plan | None = None
    local: Local | None = None
    federation: Federation | None = None
    newcomers: Sequence[int] = ()  # clients that were kept out of training

    def model(self, client: int | str) -> nn.Module:
        """The client's personalised model, by number or name: a plain module in eval mode.

        For a method that fine-tunes before it predicts (FedAvg+), that is done here, on the client's data.
        """
        number = self._index(client)
        state = self.state(number)
        tuned = any(r.get("test", {}).get("model") == "fine-tuned" for r in self.records)
        if not tuned and (self.plan is None or not self.plan.prediction.refresh):
            model = copy.deepcopy(self.template)
            load_state(model, state)
            return model.eval()
        plan, local = self._known()
        if self.federation is None:
            raise RunError("this method fine-tunes on the client's data: load the run with federation=...")
        return trained_copy(
            self.template,
            state,
            self.split,
            plan.prediction.refresh,
            local,
            self.federation.client(number),
            seed=self.seed,
            client=number,
            round=max(r["round"] for r in self.records),
            purpose="refresh",
        )

    def state(self, client: int | str) -> State:
        """The client's tensors: shared ones from the server, personal ones as it last trained them."""
        number = self._index(client)
        own = self.store.get(number) if self.split.kept else None
        return self.split.overlay(self.server, own)

    def adapt(
        self, train_data: ClientArrays | Dataset[Any] | ClientData, *, epochs: int | None = None, client: int = -1
    ) -> nn.Module:
        """A model for a client that was never there, from its own labelled samples, by the method's own rule.

        ``train_data`` is ``(x, y)`` or a ``Dataset``; ``epochs`` defaults to those of the run; ``client`` is the
        newcomer's number in the random streams. A newcomer without labels cannot train: use :meth:`ensemble`.
        """
        plan, local = self._known()
        if isinstance(train_data, torch.Tensor | np.ndarray) or (isinstance(train_data, tuple) and len(train_data) < 2):
            raise DataError("these samples have no labels, so nothing can be trained on them: use result.ensemble()")
        classes = None if self.federation is None else self.federation.classes
        data = train_data if isinstance(train_data, ClientData) else one_client(train_data, classes)
        local = local if epochs is None else replace(local, epochs=epochs)
        return trained_copy(
            self.template,
            self.server,
            self.split,
            for_epochs(plan.prediction.newcomer, epochs),
            local,
            data,
            seed=self.seed,
            client=client,
            purpose="adapt",
        )

    def ensemble(self) -> Ensemble:
        """The mean of all trained clients' predictions: for a newcomer that has no labels or cannot train."""
        absent = set(self.newcomers)
        everyone = [client for client in range(len(self.names)) if client not in absent]
        if self.split.kept:
            chosen = [client for client in everyone if self.store.get(client) is not None]
        else:
            trained = any(r["round"] > 0 for r in self.records)
            chosen = everyone[:1] if trained else []  # one global model: every member would be the same
        tests = [r["test"] for r in self.records if "loss" in r.get("test", {})]
        classes = all("accuracy" in test for test in tests)
        return Ensemble(self.template, self.server, self.split, self.store, chosen, classes=classes)

    @property
    def splits(self) -> dict[int, Split]:
        """The split after every round; while a method warms up, everything is shared."""
        if self.plan is None:
            return {number: self.split.with_masks(masks) for number, masks in self.masks.items()}
        return {number: self.plan.split_in(number, masks) for number, masks in self.masks.items()}

    @property
    def metrics(self) -> pa.Table:
        """One row per evaluated round; ``.to_pandas()`` if you like."""
        import pyarrow as pa

        rows = [
            {"round": r["round"], "train_loss": r.get("train_loss"), "shared_share": r.get("shared_share"), **r["test"]}
            for r in self.records
            if "test" in r
        ]
        try:
            return pa.Table.from_pylist(rows)
        except (pa.ArrowException, TypeError) as error:
            raise RunError(f"the figures of this run's rounds are not of one kind: {error}") from error

    @property
    def accuracy(self) -> float:
        """Weighted accuracy over all clients at the last evaluation."""
        for record in reversed(self.records):
            if "accuracy" in record.get("test", {}):
                return float(record["test"]["accuracy"])
        raise RunError("no round of this run has been evaluated for accuracy")

    @property
    def headline(self) -> evaluate.Headline:
        """``last``: accuracy over the last ten rounds, a mean of ``evaluations`` in the rounds of ``window``.

        ``best`` is the paper's: the best mean of ten consecutive rounds, picked on test data.
        """
        return evaluate.headline_of(self.records)

    def _known(self) -> tuple[Plan, Local]:
        if self.plan is None:
            raise RunError("the run was loaded without its method: fedfac.load(path, model, method=...)")
        if self.local is None:
            raise RunError("the run was loaded without its loss: fedfac.load(path, model, loss=...)")
        return self.plan, self.local

    def _index(self, client: int | str) -> int:
        if isinstance(client, str):
            if client not in self.names:
                raise DataError(f"there is no client {client!r}. {did_you_mean(client, list(self.names)[:1000])}")
            return list(self.names).index(client)
        if not 0 <= client < len(self.names):
            raise DataError(f"there is no client {client}; the federation has {len(self.names)}, numbered from 0")
        return client

    def __repr__(self) -> str:
        done = max((r["round"] for r in self.records), default=0)
        return f"Result({len(self.names)} clients, {done} rounds, path={str(self.path) if self.path else None!r})"
