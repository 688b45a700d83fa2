"""A method of your own: a value that says what is shared, how clients train, and what becomes of newcomers.

This one, "gentle FedPer", keeps the head personal and pulls the body gently towards what the server sent, as FedProx
does. It has no loop of its own, and check_method tells whether it keeps the laws that all methods keep.

python examples/custom_method.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import fedfac
from fedfac import models
from fedfac.anatomy import Anatomy
from fedfac.data.digits import digits
from fedfac.errors import ConfigError
from fedfac.method import PERSONAL, Method, Phase, Plan, Step
from fedfac.split import Split
from fedfac.state import references


def gentle_fedper(*, mu: float = 0.05) -> Method:
    """The head stays with the client; the body trains with ½μ‖w − w_received‖² added to its loss."""
    if mu < 0:
        raise ConfigError(f"mu is {mu}; it is a number from 0 up")

    def plan(anatomy: Anatomy) -> Plan:
        head = anatomy.last(1)

        def objective(step: Step) -> Tensor:
            loss = step.loss(step.model(step.inputs), step.targets)
            body = {name: p for name, p in step.model.named_parameters() if name not in head}
            distance = sum((p - step.received[name]).square().sum() for name, p in body.items())
            return loss + mu / 2 * torch.as_tensor(distance)

        return Plan(
            split=Split.of(anatomy, personal=head),  # everything else is shared
            phases=(Phase(objective=objective),),  # one phase, all tensors, the run's epochs
            newcomer=(Phase(trains=PERSONAL),),  # who comes later trains its head only
        )

    return Method(name="gentle-fedper", plan=plan, options={"mu": mu})


def main(rounds: int) -> None:
    """Check it, then compare it with the method that it was made from."""
    fedfac.check_method(gentle_fedper())
    print("gentle-fedper keeps the laws")
    federation = digits().federation(clients=30, alpha=0.1)
    model = models.build("cnn", shape=(1, 8, 8), classes=10, seed=0)
    print(f"{sum(t.numel() for t in references(model).values()):,} numbers in the network")
    for method in (fedfac.methods.fedper(), gentle_fedper()):
        result = fedfac.fit(model, federation, method=method, rounds=rounds, cohort=6, batch_size=16)
        print(f"{method.name:14} accuracy {result.accuracy:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
