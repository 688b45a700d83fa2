"""Everything that can fail before training starts fails here, and nothing has been written by then."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedfac.data.federation import Federation
from fedfac.disk import worded
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Plan, at_least_one
from fedfac.seeds import stream
from fedfac.training import Local

ALONE = "the sums of one client, with its shared weights, give all its personal weights"
ALLOW = "Take a larger cohort, or allow it (cohort_of_one=True, --cohort-of-one)"


def cohort_size(clients: int, rate: float | None, cohort: int | None) -> int:
    """K = max(1, ⌊rate·C⌋), or the number asked for.

    >>> cohort_size(100, 0.1, None), cohort_size(4, None, None), cohort_size(1000, None, None)
    (10, 4, 100)
    """
    if cohort is not None:
        if rate is not None:
            raise ConfigError(f"both rate={rate} and cohort={cohort} were given; give one of them")
        if not 1 <= cohort <= clients:
            raise ConfigError(f"a cohort of {cohort} clients was asked for; the federation has {clients} to train with")
        return cohort
    if rate is None:
        return min(clients, max(10, clients // 10))
    if not 0 < rate <= 1:
        raise ConfigError(f"rate is {rate}; it is the share of clients in a round, above 0 and at most 1")
    return max(1, math.floor(rate * clients + 1e-9))


def tells_personal_weights(plan: Plan) -> bool:
    """Whether what is measured on one client, and its shared rows, give its personal weights.

    With G = ZZᵀ of the rows Z of a layer and the shared ones of them, the others follow by least squares. Where all
    rows are sent anyway, or none is personal, there is nothing to be found out.
    """
    if plan.rule is None or not plan.rule.measures:
        return False
    return bool(plan.split.cut) and not all(tau.shares_all for tau in plan.rule.tau.values())


def check_cohort(plan: Plan, size: int, participants: int, *, allowed: bool) -> None:
    """Fail if a rule would measure one client alone, unless that was asked for."""
    measured = participants if plan.probe_all and not plan.every_round else size
    if measured == 1 and not allowed and tells_personal_weights(plan):
        raise ConfigError(
            f"a cohort of one client was asked for (of {participants} that train), and the method measures layers of "
            f"which a part is personal: {ALONE}. {ALLOW}"
        )


def hold_out_newcomers(clients: int, share: float, seed: int) -> tuple[range | list[int], list[int]]:
    """(Those who train, those who come later): a random share of the clients never takes part in training."""
    if not 0 <= share < 1:
        raise ConfigError(f"newcomers is {share}; it is the share of clients kept out of training, from 0 to below 1")
    number = math.floor(share * clients + 1e-9)
    if number == 0:
        return range(clients), []
    late = sorted(stream(seed, "newcomers").choice(clients, number, replace=False, shuffle=False).tolist())
    absent = set(late)
    return [client for client in range(clients) if client not in absent], late


def tested_clients(clients: range | list[int], number: int | None, seed: int) -> list[int]:
    """The clients that are evaluated: all, or a fixed random choice."""
    if number is None or number >= len(clients):
        return list(clients)
    at_least_one(evaluate_clients=number)
    chosen = stream(seed, "tested").choice(len(clients), number, replace=False, shuffle=False)
    return sorted(clients[i] for i in chosen.tolist())


def draw_cohort(participants: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """The clients of one round, in ascending order (sums are taken in this order)."""
    chosen = stream(seed, "cohort", round).choice(len(participants), size, replace=False, shuffle=False)
    return sorted(participants[i] for i in chosen.tolist())


def evaluation_interval(federation: Federation, tested: Sequence[int], cohort: int, epochs: int) -> int:
    """Test every so many rounds that it costs a fifth of the training at most, but every tenth round at least.

    Costs are counted in samples: a training step is worth three forward passes. The sizes of the first clients stand
    for all, so that this is a function of the data and never of a clock. It is the same for every method, or their
    figures could not be compared; what a method trains before it predicts comes on top.
    """
    clients = [federation.client(client) for client in tested[:20]]
    train = sum(data.size for data in clients)
    held = sum(len(data.test) + len(data.validation) for data in clients)
    testing, training = len(tested) * held, 3 * epochs * cohort * train
    return min(10, max(1, math.ceil(5 * testing / training - 1e-9)))


def is_due(number: int, *, rounds: int, every: int, first: int, by_default: bool) -> bool:
    """Whether a round is tested: every so many from ``first`` on, and the last one.

    If the interval is a default, three of the last ten rounds are tested whatever it is: the headline is their mean.

    >>> [n for n in range(1, 31) if is_due(n, rounds=30, every=10, first=1, by_default=True)]
    [10, 20, 22, 26, 30]
    """
    if number == rounds:
        return True
    return number >= first and (number % every == 0 or (by_default and number in (rounds - 8, rounds - 4)))


@torch.no_grad()
def check_fits(model: nn.Module, federation: Federation, local: Local) -> None:
    """Run two samples through a copy of the model and fail now rather than in round one."""
    data = federation.client(0)
    inputs, targets = data.pool.batch(data.train[:2])
    trial = copy.deepcopy(model).eval()
    given = f"inputs of shape {tuple(inputs.shape)} and type {inputs.dtype}"
    try:
        outputs = trial(inputs)
    except Exception as error:
        raise ModelError(
            f"the model cannot be run on the data: {given} gave {type(error).__name__}: {error}"
        ) from error
    classes = federation.classes
    if classes is not None:
        if not isinstance(outputs, torch.Tensor):
            raise ModelError(
                f"the model's output is a {type(outputs).__name__}; with classes it is one tensor, with a row for "
                "every sample: wrap the model in a module that returns that tensor only"
            )
        shape = tuple(outputs.shape)
        if len(shape) < 2 or shape[0] != len(inputs) or shape[1] < classes:
            raise ModelError(
                f"the model's output does not fit the classes: {given} gave {shape}, but {classes} classes "
                f"need ({len(inputs)}, {classes}) or more columns"
            )
    try:
        value = local.loss(outputs, targets)
    except Exception as error:
        raise ModelError(
            f"the loss {name_of(local.loss)} cannot be taken of the model's output and targets of shape "
            f"{tuple(targets.shape)} and type {targets.dtype}: {error}"
        ) from error
    if value.numel() != 1:
        raise ModelError(f"the loss {name_of(local.loss)} gives {tuple(value.shape)}; it must give one number, a mean")
    _check_single(trial, federation, local)


def _check_single(trial: nn.Module, federation: Federation, local: Local) -> None:
    """Fail if there will be batches of one sample, and a normalisation cannot train on one."""
    norms = [module for module in trial.modules() if isinstance(module, _NormBase)]
    if not norms:
        return
    alone = [name for client, name in enumerate(federation.names) if federation.client(client).size == 1]
    if not alone and local.batch_size > 1:
        return
    for module in norms:
        module.train()
    data = federation.client(0)
    try:
        trial(data.pool.batch(data.train[:1])[0])
    except ValueError as error:
        few = ", ".join(alone[:3]) + ", ..." * (len(alone) > 3)
        whose = f"these clients have one training sample each: {few}" if alone else "batch_size is 1"
        raise ModelError(
            f"{whose}; the model's normalisation cannot train on a batch of one sample: {error}. Leave such clients "
            "out, take larger batches, or a normalisation that is not over the batch (GroupNorm)"
        ) from error


def name_of(function: object) -> str:
    """A function's name, for records and messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def json_like(value: Any) -> Any:
    """The value as it will be read back from JSON, so that comparisons are exact; an infinite option is a word.

    >>> json_like({"tau": float("inf"), "layers": (1, 2)})
    {'tau': 'inf', 'layers': [1, 2]}
    """
    try:
        return json.loads(json.dumps(worded(value), allow_nan=False))
    except TypeError as error:
        raise ConfigError(f"the options of a method must be plain values that JSON can hold: {error}") from error
