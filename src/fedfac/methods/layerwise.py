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

from fedfac.anatomy import Anatomy
from fedfac.method import PERSONAL, Method, Phase, Plan, Prediction, Training, at_least_one
from fedfac.split import Split
from fedfac.switches.refresh import Refresh

OWN = Prediction(newcomer=(Phase(trains=PERSONAL),))  # a new client trains what is personal


def fedper(*, personal_layers: int = 1) -> Method:
    """The last ``personal_layers`` layers stay with the client; 0 is FedAvg."""

    def base(anatomy: Anatomy) -> Plan:
        split = Split.of(anatomy, personal=anatomy.last(personal_layers))
        return Plan(training=Training(split=split), prediction=OWN)

    return Method(name="fedper", base=base, options={"personal_layers": personal_layers})


def fedrep(*, personal_layers: int = 1, head_epochs: int | None = None, body_epochs: int = 1) -> Method:
    """FedPer's split; first the head (by default for the run's local epochs), then the body."""
    at_least_one(head_epochs=head_epochs, body_epochs=body_epochs)

    def base(anatomy: Anatomy) -> Plan:
        head = anatomy.last(personal_layers)
        body = frozenset(anatomy.shapes) - head
        fit_head = Phase(trains=head, epochs=head_epochs)
        phases = (fit_head, Phase(trains=body, epochs=body_epochs))
        return Plan(
            training=Training(split=Split.of(anatomy, personal=head), phases=phases),
            prediction=Prediction(newcomer=(Phase(trains=PERSONAL, epochs=head_epochs),)),
            resolved={"head_epochs": head_epochs},
        )

    options = {"personal_layers": personal_layers, "head_epochs": head_epochs, "body_epochs": body_epochs}
    return Method(name="fedrep", base=base, options=options)


def lg_fedavg(*, local_layers: int | None = None) -> Method:
    """The first ``local_layers`` layers stay with the client (by default all but the last; 0 is FedAvg)."""

    def base(anatomy: Anatomy) -> Plan:
        number = len(anatomy.numbered) - 1 if local_layers is None else local_layers
        return Plan(
            training=Training(split=Split.of(anatomy, personal=anatomy.first(number))),
            prediction=Prediction(newcomer=OWN.newcomer, newcomer_rules=("ensemble", "adapt")),
            resolved={"local_layers": number},
        )

    return Method(name="lg-fedavg", base=base, options={"local_layers": local_layers})


def fedbn() -> Method:
    """Normalisation stays with the client."""

    def base(anatomy: Anatomy) -> Plan:
        return Plan(training=Training(split=Split.of(anatomy, personal=anatomy.norms)), prediction=OWN)

    return Method(name="fedbn", base=base)


def fedbabu() -> Method:
    """A body trained against a fixed random head; the client fine-tunes everything (or the head) to predict."""

    def base(anatomy: Anatomy) -> Plan:
        body = Phase(trains=frozenset(anatomy.shapes) - anatomy.last(1))
        return Plan(training=Training(split=Split.of(anatomy), phases=(body,)))

    return Method(name="fedbabu", base=base) | Refresh(epochs=None, trains="all")
