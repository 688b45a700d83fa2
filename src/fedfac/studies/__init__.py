"""The paper's studies, each one command: ``fedfac study NAME``.

A study is a function ``study(ask: Ask) -> Finding`` in a module of its own, entered in ``STUDIES``. It computes;
the frame (module ``frame``) writes tables, figures and the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Where a study is (the module and function below fedfac.studies) and what it is about, in a line."""

    where: str
    about: str


STUDIES: Mapping[str, Known] = {
    "motivation": Known("motivation.study", "what hidden units say on different clients (paper 1)"),
    "simulation": Known("simulation.study", "does factor analysis find the true decomposition? (paper 4.3)"),
    "theory": Known("theory.study", "the theorems' bounds beside what happens (paper 3.3)"),
    "ablation": Known("ablation.study", "elements masked at random, and random splits (paper 5.5)"),
    "features": Known("features.study", "feature maps of personal and shared channels (paper 5.6)"),
    "cost": Known("cost.study", "training loss, time and bytes against FedAvg (paper 5.4)"),
    "fairness": Known("fairness.study", "accuracy client by client, method by method (paper 5.2)"),
}
