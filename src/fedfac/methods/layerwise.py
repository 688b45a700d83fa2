"""Methods that keep whole layers personal.

- FedPer (Arivazhagan et al. 2019): the last layers are personal, all is trained jointly. The paper names no rule
  for newcomers; ours trains the personal layers only. In the paper all clients train in every round, and each begins
  with random personal layers of its own; here they begin with the common ones.
- FedRep (Collins et al., ICML 2021): the same split; a client first fits its head with the body frozen, then the
  body with the head frozen. Frozen means *not stepped*: a zeroed gradient would still move under momentum and weight
  decay, and a frozen normalisation keeps its statistics. Official CIFAR-10 runs: 10 head epochs and 1 body epoch
  (here the run's local epochs and 1), SGD with momentum, and a last round in which all clients train (not here).
- LG-FedAvg (Liang et al. 2020): the other way round, the *first* layers are personal and the last ones shared. A
  newcomer gets the mean of the probabilities of all clients that have trained. The official code averages logits, of
  all clients; its server's mean is not weighted, ours is by n_k; it starts from a FedAvg checkpoint (to do so, give
  ``fit`` a model with those weights); and it keeps each client's best model on test data, which nothing here does.
- FedBN (Li et al., ICLR 2021): normalisation layers are personal, parameters and statistics; found by module type. The
  official code takes batch normalisation by its name, all clients in every round, and a mean without weights.
- FedBABU (Oh et al., ICLR 2022): only the body is trained and shared; the head stays at its random start, and before
  a client predicts, a copy is fine-tuned on its data: here by the run's optimiser for its local epochs. The official
  code's mean is not weighted.

All of it: docs/deviations.md.
"""

from __future__ import annotations

from typing import Any

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import PERSONAL, Method, Phase, Plan, at_least_one, at_least_zero, refreshed
from fedfac.methods.averaging import held_near
from fedfac.methods.common_prior import with_frequencies
from fedfac.methods.own_statistics import with_statistics
from fedfac.split import Split


def fedper(
    *,
    personal_layers: int = 1,
    warmup: int = 0,
    refresh_epochs: int = 0,
    refresh_lr: float = 1.0,
    shrinkage: float = 0.0,
    mu: float | None = 0.0,
    prior: float = 0.0,
    smoothing: str = "fixed",
    average: float = 0.0,
    statistics: float = 0.0,
    server_momentum: float = 0.0,
    eta_g: float = 1.0,
) -> Method:
    """The last ``personal_layers`` layers stay with the client; 0 is FedAvg.

    Not in the paper, and off by default: ``warmup`` rounds that share everything, ``refresh_epochs`` on the
    personal layers (of a copy) before a client predicts, their ``refresh_lr`` (times the run's) and ``shrinkage`` of
    what they change, FedProx's ``mu``, class frequencies as a ``prior`` (:mod:`fedfac.methods.prior`) with their
    ``smoothing`` (:mod:`fedfac.methods.common_prior`), predictions with an ``average`` over rounds, normalisation by a
    client's own ``statistics`` (:mod:`fedfac.methods.own_statistics`) and a server with momentum: FedFac+'s switches.
    """
    at_least_zero(warmup=warmup, refresh_epochs=refresh_epochs)

    def plan(anatomy: Anatomy) -> Plan:
        split = Split.of(anatomy, personal=anatomy.last(personal_layers))
        refresh = refreshed(refresh_epochs, Phase(trains=PERSONAL, gentle=refresh_lr, back=shrinkage))
        return Plan(split=split, warmup=warmup, refresh=refresh, average=average, newcomer=(Phase(trains=PERSONAL),))

    options: dict[str, Any] = {"personal_layers": personal_layers, "warmup": warmup, "refresh_epochs": refresh_epochs}
    options |= {"refresh_lr": refresh_lr, "shrinkage": shrinkage, "prior": prior, "smoothing": smoothing}
    options |= {"mu": mu, "average": average, "statistics": statistics, "server_momentum": server_momentum}
    method = Method(
        name="fedper",
        plan=plan,
        server_rate=eta_g,
        server_momentum=server_momentum,
        options={**options, "eta_g": eta_g},
        predicts=frozenset({"refresh_epochs", "refresh_lr", "shrinkage", "average", "statistics"}),
    )
    return with_statistics(held_near(with_frequencies(method, prior, smoothing), mu), statistics)


def fedrep(
    *,
    personal_layers: int = 1,
    head_epochs: int | None = None,
    body_epochs: int = 1,
    warmup: int = 0,
    refresh_epochs: int = 0,
    average: float = 0.0,
    server_momentum: float = 0.0,
    eta_g: float = 1.0,
) -> Method:
    """FedPer's split; first the head (by default for the run's local epochs), then the body.

    ``warmup``, ``refresh_epochs``, ``average`` and ``server_momentum`` are FedPer's.
    """
    at_least_one(head_epochs=head_epochs, body_epochs=body_epochs)
    at_least_zero(warmup=warmup, refresh_epochs=refresh_epochs)

    def plan(anatomy: Anatomy) -> Plan:
        head = anatomy.last(personal_layers)
        body = frozenset(anatomy.shapes) - head
        fit_head = Phase(trains=head, epochs=head_epochs)
        return Plan(
            split=Split.of(anatomy, personal=head),
            phases=(fit_head, Phase(trains=body, epochs=body_epochs)),
            warmup=warmup,
            refresh=refreshed(refresh_epochs),
            average=average,
            newcomer=(fit_head,),
            settled={"head_epochs": head_epochs},
        )

    options: dict[str, Any] = {"personal_layers": personal_layers, "head_epochs": head_epochs}
    options |= {"body_epochs": body_epochs, "warmup": warmup, "refresh_epochs": refresh_epochs, "average": average}
    return Method(
        name="fedrep",
        plan=plan,
        server_rate=eta_g,
        server_momentum=server_momentum,
        options={**options, "server_momentum": server_momentum, "eta_g": eta_g},
        predicts=frozenset({"refresh_epochs", "average"}),
    )


def lg_fedavg(*, local_layers: int | None = None, eta_g: float = 1.0) -> Method:
    """The first ``local_layers`` layers stay with the client (by default all but the last; 0 is FedAvg)."""

    def plan(anatomy: Anatomy) -> Plan:
        number = len(anatomy.numbered) - 1 if local_layers is None else local_layers
        return Plan(
            split=Split.of(anatomy, personal=anatomy.first(number)),
            newcomer=(Phase(trains=PERSONAL),),
            newcomer_rules=("ensemble", "adapt"),
            settled={"local_layers": number},
        )

    return Method(
        name="lg-fedavg", plan=plan, server_rate=eta_g, options={"local_layers": local_layers, "eta_g": eta_g}
    )


def fedbn(*, eta_g: float = 1.0) -> Method:
    """Normalisation stays with the client."""

    def plan(anatomy: Anatomy) -> Plan:
        return Plan(split=Split.of(anatomy, personal=anatomy.norms), newcomer=(Phase(trains=PERSONAL),))

    return Method(name="fedbn", plan=plan, server_rate=eta_g, options={"eta_g": eta_g})


def fedbabu(*, finetune_epochs: int | None = None, finetune: str = "all", eta_g: float = 1.0) -> Method:
    """A body trained against a fixed random head; the client fine-tunes ``"all"`` or only the ``"head"``."""
    at_least_one(finetune_epochs=finetune_epochs)
    if finetune not in ("all", "head"):
        raise ConfigError(f"finetune is {finetune!r}; allowed: all, head")

    def plan(anatomy: Anatomy) -> Plan:
        head = anatomy.last(1)
        tuning = (Phase(trains=head if finetune == "head" else None, epochs=finetune_epochs),)
        body = Phase(trains=frozenset(anatomy.shapes) - head)
        settled = {"finetune_epochs": finetune_epochs}
        return Plan(split=Split.of(anatomy), phases=(body,), refresh=tuning, newcomer=tuning, settled=settled)

    options = {"finetune_epochs": finetune_epochs, "finetune": finetune, "eta_g": eta_g}
    return Method(
        name="fedbabu", plan=plan, server_rate=eta_g, options=options, predicts=frozenset(options) - {"eta_g"}
    )
