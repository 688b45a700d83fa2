"""The server's arithmetic: W ← W + η_g (Σ n_k W_k / Σ n_k − W) on what is shared (paper, algorithms 1 and 2).

The server never sees a client's state: it is handed weighted sums. It keeps the last shared value of every
element, also while the element is personal. A number that is not finite, or out of the range of its type, is never
taken: the step is refused as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedfac.errors import UnsoundSumsError
from fedfac.moments import Additive, Moments, Spread
from fedfac.split import Split
from fedfac.state import State, is_finite

LARGEST = 1e150  # of a moment: its square is still a number
FORGETTING = 8  # how fast a mean over rounds forgets the first ones


@dataclass(frozen=True)
class Sums:
    """Σ n_k·W_k over a cohort, of the shared numbers only and in double precision, and Σ n_k."""

    values: State
    weight: float
    missing: Mapping[int, str] = field(default_factory=dict)  # who trained but is not in the sums, and why


@torch.no_grad()
def aggregate(server: State, sums: Sums, split: Split, *, before: Split, rate: float) -> State:
    """The server's next state.

    An element that has just become shared takes the mean of the cohort's weights as it is: the server's own
    value of it is old, and the paper's sum of updates from that value is not defined.
    """
    if not (math.isfinite(sums.weight) and sums.weight > 0):
        raise UnsoundSumsError(f"the sum of the clients' weights is {sums.weight}; it must be a positive number")
    shared = split.shared(server)
    new: State = {}
    counters: State = {}
    for name, old in shared.items():
        mean = sums.values[name] / sums.weight
        if rate != 1:
            moved = old.double() + rate * (mean - old.double())
            if name in split.cut and name in before.cut:
                mask = split.mask(name, mean.device)
                fresh = (mask & ~before.mask(name, mean.device))[mask]
                moved = torch.where(fresh, mean, moved)
            mean = moved
        if not old.is_floating_point():
            mean = counters[name] = _in_range(mean.round(), old.dtype)
        new[name] = mean.to(old.dtype)
    check_sound("the aggregate", {**new, **counters})
    return split.compose(new, split.personal(server))


def check_sound(what: str, state: Mapping[str, Tensor]) -> None:
    """Fail if a number of the state is not finite; one that its type cannot hold is infinite by then."""
    if not is_finite(state):  # by name only now: on a GPU each question waits
        names = [name for name, tensor in state.items() if not is_finite({name: tensor})]
        more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
        raise UnsoundSumsError(f"{what} of {', '.join(names[:3])}{more} is not finite, or out of the range of its type")


def check_measured(sums: Mapping[str, Additive]) -> None:
    """Fail if what a rule is to decide from cannot be squared: it is not finite, or beyond all weights."""
    for layer, value in sums.items():
        held = list(getattr(value, "__dict__", {}).values())
        numbers = [torch.as_tensor(found) for found in held if isinstance(found, int | float | Tensor)]
        sound = all(bool((found.abs() < LARGEST).all()) for found in numbers)
        clients = value.n if isinstance(value, Moments) else value.clients if isinstance(value, Spread) else 1
        if not sound or clients <= 0:
            raise UnsoundSumsError(
                f"the sum of what clients measured on layer {layer!r} is not finite, beyond {LARGEST:g}, or of nothing"
            )


def _in_range(values: Tensor, kind: torch.dtype) -> Tensor:
    """Whole numbers, and NaN in place of those that the type cannot hold."""
    if kind is torch.bool or kind.is_complex:
        return values
    limits = torch.iinfo(kind)
    return torch.where((values >= limits.min) & (values < float(limits.max) + 1), values, torch.nan)


@torch.no_grad()
def with_momentum(
    old: State, new: State, velocity: State, *, momentum: float, moved: Iterable[str], split: Split, before: Split
) -> tuple[State, State]:
    """The server's step from ``old`` to ``new``, and ``momentum`` times the step before it: v ← βv + Δ, W ← W + v.

    With few clients a round, each round sees other data; a step that goes on for a while sees more of it (FedAvgM,
    Hsu et al. 2019). Returns the state and v. Only the tensors in ``moved`` have a v (statistics are no weights), and
    only elements that were shared before as well: a personal one stands still at the server, one that has just become
    shared begins here.
    """
    state, kept = dict(new), {}
    for name in moved:
        if name in split.personal_tensors:
            continue
        step = new[name] - old[name]
        if name in velocity:
            step = step.add(velocity[name], alpha=momentum)
        state[name] = old[name] + step
        if name in split.cut:
            goes_on = split.mask(name, step.device)
            if name in before.cut:
                goes_on = goes_on & before.mask(name, step.device)
            state[name] = torch.where(goes_on, state[name], new[name])
            step = step * goes_on
        kept[name] = step
    return state, kept


def weight_of_newest(past: float, number: int) -> float:
    """What round ``number`` counts in a mean over rounds in which the past weighs ``past``.

    At .9 the mean is over about ten rounds; at the beginning, when a round is far better than the one before it, over
    a ninth of those so far (polynomial decay: Shamir and Zhang, ICML 2013), so that short runs do not lag behind.

    >>> [round(weight_of_newest(0.9, number), 2) for number in (1, 2, 10, 28, 82, 100)]
    [1.0, 0.9, 0.5, 0.25, 0.1, 0.1]
    """
    return max(1 - past, (FORGETTING + 1) / (number + FORGETTING))


@torch.no_grad()
def running_mean(mean: State, server: State, weight: float) -> State:
    """The mean over rounds with a new one in it, which gets ``weight``; counters and the like have no mean.

    With few clients a round the server's state goes to and fro; its mean over rounds lies in between.
    """
    new = {name: tensor for name, tensor in server.items() if tensor.is_floating_point()}
    if not mean:
        return {name: tensor.clone() for name, tensor in new.items()}
    names = list(new)
    moved = torch._foreach_lerp([mean[name] for name in names], [new[name] for name in names], weight)
    return dict(zip(names, moved, strict=True))
