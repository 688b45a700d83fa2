"""The line between clients and server.

A round is train, moments (only for rules that measure), collect, keep. What ``train`` makes stays with the
clients; what the other calls return are sums over clients and counts. In process nothing else crosses the line. Over a
network the sums are made at the server, where each client's contribution arrives by itself: there, one client's
moments and its shared part give its personal part, and nodes refuse to be measured (``fedfac.engine.flower.consent``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedfac.aggregate import Sums
from fedfac.evaluate import Score
from fedfac.moments import Additive
from fedfac.rules import Rule
from fedfac.split import Split
from fedfac.state import State
from fedfac.training import Outcome


class Engine(Protocol):
    """Where clients live."""

    def train(self, round: int, server: State, split: Split, cohort: Sequence[int]) -> dict[int, Outcome]:
        """Every client of the cohort composes its model and trains it; results stay with the clients.

        A client whose training failed reports its problem and takes no part in what follows.
        """

    def moments(self, rule: Rule) -> dict[str, Additive]:
        """By layer, the sum of what the rule measures on the clients that have just trained."""

    def collect(self, split: Split) -> Sums:
        """Σ n_k·(shared part) over the clients that have just trained.

        Over a network some of them may be gone by now: ``missing`` of the sums says who.
        """

    def keep(self, split: Split) -> None:
        """The clients store what is not shared as a whole."""

    def evaluate(self, round: int, server: State, split: Split, clients: Sequence[int]) -> dict[str, list[Score]]:
        """Each client tests its own model on its own held-out data: ``"test"``, and ``"validation"`` if any.

        A client that cannot be reached has no score.
        """

    def serve(self, server: State, split: Split, newcomers: Sequence[int]) -> list[Score]:
        """Clients that were never there adapt a copy of the server's model by the method's rule, and test it.

        Who has nothing to test it on has no score. Over a network nobody is kept out to be served: no scores at all.
        """

    def close(self) -> None:
        """Let go of threads and devices."""
