"""choose(): the way in. From Python with a model and a federation, or from a config that says "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedfac import experiment
from fedfac.anatomy import Anatomy
from fedfac.choosing.candidates import AUTO, TRIAL_ROUNDS, Candidate, candidates, needs_probe
from fedfac.choosing.choice import Choice
from fedfac.choosing.trials import FEDAVG, TRUNK, OnRound, Trials, beginnings, turns_cost
from fedfac.config import Config
from fedfac.data.federation import Federation
from fedfac.errors import ConfigError, DataError
from fedfac.method import Loss, Method, at_least_one
from fedfac.rounds import Session
from fedfac.settings import divided
from fedfac.tuning import automatic

VALIDATION_SHARE = 0.2
LEAST_ROUNDS = 10  # of the run: in fewer there is hardly more than the warm-up
_ENDLESS = 2**31  # a trial is stepped from outside, and evaluated there


def choose(
    model: nn.Module,
    federation: Federation,
    *,
    candidates: Sequence[Method] | None = None,
    rounds: int = 50,
    trial_rounds: int | None = None,
    rate: float | None = None,
    cohort: int | None = None,
    epochs: int = 5,
    batch_size: int = 32,
    lr: float = 1e-3,
    optimizer: str = "adam",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    newcomers: float = 0.0,
    lanes: int | None = None,
    device: str | torch.device | None = None,
    on_round: OnRound | None = None,
) -> Choice:
    """Choose a method for a federation from a few cheap rounds of each candidate, on validation samples only.

    ``fit(model, federation, method=choice.method, ...)`` follows. Test samples are not there while it chooses. A
    federation without validation samples lends a fifth of each client's training samples, for the trials only.

    Parameters
    ----------
    model, federation
        As for :func:`fedfac.fit`. The model is not changed.
    candidates
        Methods to choose from, the simpler ones first. By default FedAvg, FedAvg+, FedPer (with a warm-up and three
        epochs of refreshing), FedFac+ (a head that is refreshed, elements that are, elements of one's own) and local
        training.
    rounds
        Of the run that is to follow.
    trial_rounds
        What the choice may cost at most, in rounds of local training, what clients train before they are judged
        included. By default about as many as the run has; a short run's choice costs more than that, some 45.
    rate, cohort, epochs, batch_size, lr, optimizer, momentum, weight_decay, loss, seed, newcomers, lanes, device
        As for :func:`fedfac.fit`; give both the same.
    on_round
        Called after every round with the candidate's name, what the choice has cost so far and may cost, in rounds,
        and the round's record.

    >>> import torch, fedfac
    >>> x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    >>> clients = [(x[i::4], ((x[i::4, 0] > 0) ^ (i % 2 == 0)).long()) for i in range(4)]  # they contradict each other
    >>> model = fedfac.models.build("mlp", shape=(4,), classes=2, seed=0, hidden=8)
    >>> choice = fedfac.choose(model, Federation.from_arrays(clients), rounds=20, lr=0.01)
    >>> choice.method.name
    'local'
    """
    asked = {**locals(), "rounds": _ENDLESS, "evaluate_every": _ENDLESS}  # the arguments: nothing else has a name yet
    local, settings = divided(asked, without=("model", "federation", "candidates", "trial_rounds", "on_round"))
    held = for_trials(federation, seed=seed)
    return _choose(
        {"name": AUTO},
        model,
        lambda method: Session(model, held, method, local, settings),
        given=None if candidates is None else _named(candidates),
        rounds=rounds,
        epochs=epochs,
        trial_rounds=trial_rounds,
        on_round=on_round,
    )


def settle(
    config: Config,
    *,
    lanes: int | None = None,
    device: str | None = None,
    on_round: OnRound | None = None,
) -> Choice:
    """Choose what a config leaves open; ``replace(config, method=choice.asked)`` is what to train."""
    plain = replace(config, method={"name": "fedavg"})
    model, federation, _ = experiment.build(plain)
    held = for_trials(federation, seed=config.train.seed)

    def start(method: Method) -> Session:
        return experiment.session(
            plain,
            federation=held,
            method=method,
            lanes=lanes,
            device=device,
            rounds=_ENDLESS,
            evaluate_every=_ENDLESS,
        )

    return _choose(
        config.method,
        model,
        start,
        given=None,
        rounds=config.train.rounds,
        epochs=config.train.epochs,
        trial_rounds=config.method.get(TRIAL_ROUNDS),
        on_round=on_round,
    )


def for_trials(federation: Federation, *, seed: int) -> Federation:
    """The federation without its test samples, and with validation samples."""
    blind = federation.without_test()
    if blind.has_validation():
        return blind
    held = blind.with_validation(VALIDATION_SHARE, seed=seed)
    if not held.has_validation():
        raise DataError(
            "no client has samples enough to hold some out for validation, and a choice looks at nothing else: name a "
            "method, or cut the data into fewer clients"
        )
    return held


def _choose(
    asked: Mapping[str, Any],
    model: nn.Module,
    start: Callable[[Method], Session],
    *,
    given: Sequence[Candidate] | None,
    rounds: int,
    epochs: int,
    trial_rounds: int | None,
    on_round: OnRound | None,
) -> Choice:
    at_least_one(rounds=rounds, trial_rounds=trial_rounds)
    if rounds < LEAST_ROUNDS:
        raise ConfigError(
            f"a run of {rounds} rounds is too short to choose a method for: give it {LEAST_ROUNDS} rounds or more, or "
            "name the method, the layers and tau"
        )
    anatomy = Anatomy.of(model)
    probes = given is None and needs_probe(asked, anatomy)
    other = anatomy.numbered[0].name if probes else None  # for now: so that there are as many as there can be
    most = candidates(asked, anatomy, rounds=rounds, picked=other) if given is None else given
    trunks = beginnings([c.method for c in most], model)
    probing = automatic.ROUNDS if probes and FEDAVG not in trunks else 0
    turns = probing + turns_cost([c.method for c in most], model, epochs=epochs)
    cost = automatic.ROUNDS * len(trunks) + turns
    if trial_rounds is not None and trial_rounds < cost:
        raise ConfigError(
            f"trial_rounds is {trial_rounds}; up to {len(most)} candidates take {cost} rounds at least. Raise it, or "
            "leave less open: --layers and --tau take values, too"
        )
    budget = trial_rounds or max(rounds, cost)
    grown = TRUNK * budget if trial_rounds is None else min(TRUNK * budget, budget - turns)  # what is asked for is kept
    trunk = max(automatic.ROUNDS, int(grown / max(len(trunks), 1)))
    found: list[automatic.Choice] = []

    def on_record(number: int, record: Mapping[str, Any]) -> None:
        if probes and number == automatic.ROUNDS:
            found.append(automatic.pick(record, anatomy))

    with Trials(start, budget=budget, trunk=trunk, on_round=on_round) as trials:
        trials.grow(automatic.probe(), trunk if FEDAVG in trunks else probing, on_record)
        picked = found[0].layer if found else None
        final = candidates(asked, anatomy, rounds=rounds, picked=picked) if given is None else given
        return trials.decide(final, found[0].scores if found else {})


def _named(methods: Sequence[Method]) -> list[Candidate]:
    if not methods:
        raise ConfigError("candidates is empty: give at least one method, or leave it out for the short list")
    names = [method.name for method in methods]
    labels = [m.name if names.count(m.name) == 1 else str(m) for m in methods]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError(f"candidates has {twice[0]} twice: give each method once")
    return [Candidate(label, m.describe(), m) for label, m in zip(labels, methods, strict=True)]
