"""A method of your own: a value that says what is shared, how clients train, and what becomes of newcomers.

This one, "gentle FedPer", keeps the head personal and pulls the body gently towards what the server sent, as FedProx
does. It has no loop of its own, and check_method tells whether it keeps the laws that all methods keep.

python examples/custom_method.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

import fedfac
from fedfac import models
from fedfac.anatomy import Anatomy
from fedfac.data.digits import digits
from fedfac.errors import ConfigError
from fedfac.method import PERSONAL, Method, Phase, Plan, Prediction, Step, Training
from fedfac.split import Split
from fedfac.state import references
from fedfac.switches import Refresh, Warmup


@dataclass(frozen=True)
class Near:
    """The loss, and ½μ‖w − w_received‖² over the body. A value: two methods with the same μ are seen to train alike."""

    mu: float
    head: frozenset[str]

    def __call__(self, step: Step) -> Tensor:
        """The loss of one batch."""
        loss = step.loss(step.model(step.inputs), step.targets)
        body = {name: p for name, p in step.model.named_parameters() if name not in self.head}
        distance = sum((p - step.received[name]).square().sum() for name, p in body.items())
        return loss + self.mu / 2 * torch.as_tensor(distance)


def gentle_fedper(*, mu: float = 0.05) -> Method:
    """The head stays with the client; the body trains with ½μ‖w − w_received‖² added to its loss."""
    if mu < 0:
        raise ConfigError(f"mu is {mu}; it is a number from 0 up")

    def base(anatomy: Anatomy) -> Plan:
        head = anatomy.last(1)
        return Plan(
            training=Training(
                split=Split.of(anatomy, personal=head),  # everything else is shared
                phases=(Phase(objective=Near(mu, head)),),  # one phase, all tensors, the run's epochs
            ),
            prediction=Prediction(newcomer=(Phase(trains=PERSONAL),)),  # who comes later trains its head only
        )

    return Method(name="gentle-fedper", base=base, options={"mu": mu})


def main(rounds: int) -> None:
    """Check it, then compare it with the method that it was made from."""
    fedfac.check_method(gentle_fedper())
    fedfac.check_method(gentle_fedper() | Refresh(2))  # what any method can have, yours can have too
    print("gentle-fedper keeps the laws")
    federation = digits().federation(clients=30, alpha=0.1)
    model = models.build("cnn", shape=(1, 8, 8), classes=10, seed=0)
    print(f"{sum(t.numel() for t in references(model).values()):,} numbers in the network")
    for method in (fedfac.methods.fedper(), gentle_fedper(), gentle_fedper() | Warmup(3)):
        result = fedfac.fit(model, federation, method=method, rounds=rounds, cohort=6, batch_size=16)
        print(f"{method!s:70} accuracy {result.accuracy:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
