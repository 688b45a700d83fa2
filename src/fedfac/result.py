"""What a run leaves in your hands: a model for every client, the metrics, the splits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedfac.engine.store import Store
from fedfac.errors import DataError, RunError, did_you_mean
from fedfac.split import Split
from fedfac.state import State, load_state

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

    def model(self, client: int | str) -> nn.Module:
        """The client's personalised model, by number or name: a plain module in eval mode."""
        state = self.split.overlay(self.server, self.store.get(self._index(client)))
        model = copy.deepcopy(self.template)
        load_state(model, state)
        return model.eval()

    @property
    def splits(self) -> dict[int, Split]:
        """The split after every round."""
        return {number: self.split.with_masks(masks) for number, masks in self.masks.items()}

    @property
    def metrics(self) -> pa.Table:
        """One row per evaluated round; ``.to_pandas()`` if you like."""
        import pyarrow as pa

        rows = [
            {
                "round": r["round"],
                "train_loss": r.get("train_loss"),
                "shared_share": r["shared_share"],
                **r["test"],
            }
            for r in self.records
            if "test" in r
        ]
        return pa.Table.from_pylist(rows)

    @property
    def accuracy(self) -> float:
        """Weighted accuracy over all clients at the last evaluation."""
        for record in reversed(self.records):
            if "accuracy" in record.get("test", {}):
                return float(record["test"]["accuracy"])
        raise RunError("no round of this run has been evaluated for accuracy")

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
