"""fedfac: personalised federated learning by factor analysis.

Everything public is here or in the module that its name shows. Imports are lazy: ``import fedfac`` does not
import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedfac import methods, switches
    from fedfac.anatomy import Anatomy
    from fedfac.choosing.choose import choose
    from fedfac.data.federation import Federation
    from fedfac.errors import FedfacError
    from fedfac.experiment import load
    from fedfac.factor import factor_analysis
    from fedfac.method import Method, check_method
    from fedfac.moments import Moments
    from fedfac.result import Result
    from fedfac.rounds import fit
    from fedfac.split import Split

_HOMES = {
    "Anatomy": "anatomy",
    "Federation": "data.federation",
    "choose": "choosing.choose",
    "FedfacError": "errors",
    "load": "experiment",
    "factor_analysis": "factor",
    "Method": "method",
    "check_method": "method",
    "Moments": "moments",
    "Result": "result",
    "fit": "rounds",
    "Split": "split",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fedfac.{_HOMES[name]}"), name)
    try:
        return importlib.import_module(f"fedfac.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"fedfac.{name}":
            raise
        raise AttributeError(f"module 'fedfac' has no attribute {name!r}") from error


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "Anatomy",
    "Federation",
    "FedfacError",
    "Method",
    "Moments",
    "Result",
    "Split",
    "check_method",
    "choose",
    "factor_analysis",
    "fit",
    "load",
    "methods",
    "switches",
]
