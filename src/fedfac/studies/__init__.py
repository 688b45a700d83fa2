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
}
