"""What a node has answered in a run, and what it will therefore answer next.

A server that may ask for anything, in any order, learns more than a run tells: two parts of one round for two splits
are the whole layer, and a few evaluations of states made for it are a client's label histogram. So:

- a run is one run: method, model, data, local training and the client's number are those with which it began;
- rounds go forward. A round that was trained may be asked for again (the server was killed) with the same state and
  masks, so that it gives the same numbers; a server is never further behind, as it writes a round before the next;
- the part of a round leaves for one split only, and that of a method that decides once for one split in the run;
- a round is evaluated once, and only the newest; to the same request the answer is the same.

With its owner's word (``go-back``) a node begins again from an earlier round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.structs import replace as changed

from fedfac.engine.flower import wire
from fedfac.engine.flower.wire import RefusedError, Request
from fedfac.state import digest

Masks = Mapping[str, str]


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client's ledger of one run."""

    run: str = ""  # what the run is
    trained: int = -1  # the newest round that was trained
    asked: str = ""  # for which request
    masks: dict[str, str] | None = None  # for which its part has left
    fixed: dict[str, str] | None = None  # those of a method that decides once
    evaluated: int = -1  # the newest round that was evaluated
    question: str = ""  # for which request
    answer: dict[str, Any] = {}

    def of_run(self, run: str) -> Ledger:
        """The ledger of a run that is what it was."""
        if self.run not in ("", run):
            raise RefusedError(wire.CHANGED, "another run of the same name")
        return changed(self, run=run)

    def trains(self, request: Request, *, goes_back: bool) -> Ledger:
        """The round is trained now."""
        number, asked = request.round, fingerprint(request)
        if number == self.trained and asked == self.asked:
            return self
        if number > max(self.trained, self.evaluated):
            return changed(self, trained=number, asked=asked, masks=None)
        if not goes_back:
            raise RefusedError(wire.ROUND, f"round {number}, after round {max(self.trained, self.evaluated)}")
        earlier = min(self.evaluated, number - 1)
        return changed(self, trained=number, asked=asked, masks=None, fixed=None, evaluated=earlier)

    def releases(self, round: int, masks: Masks, *, once: bool) -> Ledger:
        """The part of the newest round leaves for these masks."""
        if round != self.trained:
            raise RefusedError(wire.ROUND, f"the part of round {round}, while round {self.trained} is the newest")
        for before in (self.masks, self.fixed if once else None):
            if before is not None and before != masks:
                raise RefusedError(wire.MASKS, f"round {round}: a part has already left for other masks")
        return changed(self, masks=dict(masks), fixed=dict(masks) if once and masks else self.fixed)

    def answers(self, request: Request) -> bool:
        """Whether this very evaluation has been answered before."""
        return request.round == self.evaluated and fingerprint(request) == self.question

    def evaluates(self, request: Request, *, goes_back: bool) -> Ledger:
        """The round is evaluated now; :meth:`answered` has what came out."""
        number = request.round
        if (number <= self.evaluated or number < self.trained) and not goes_back:
            raise RefusedError(wire.EVALUATION, f"round {number}: trained {self.trained}, evaluated {self.evaluated}")
        return changed(self, evaluated=number, question=fingerprint(request), answer={})

    def answered(self, values: Mapping[str, Any]) -> Ledger:
        """With the answer to the newest evaluation."""
        return changed(self, answer=dict(values))


def fingerprint(request: Request) -> str:
    """A digest of what is asked for: state, masks and all, but not of the number that is used once."""
    text, data = replace(request, nonce="").packet().pack()
    return digest(text.encode() + data)
