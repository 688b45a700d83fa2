"""One tree of exceptions. A message says what came, what is allowed, and the likely fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from fedfac.words import message, printable

_COMPARED = 1000  # names that are looked through for a near one
_LISTED = 50  # names that are listed if none is near


class FedfacError(Exception):
    """Base of every error that fedfac raises on purpose.

    What it quotes may come from a file: its text holds no control characters, and its length is bounded.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(message(str(text)))


class ConfigError(FedfacError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class LayerError(ConfigError):
    """A layer was named that the model does not have, or that has no hidden elements."""


class DataError(FedfacError, ValueError):
    """The data of a federation cannot be trained on."""


class ModelError(FedfacError, ValueError):
    """A model does not fit the data, the method or the checkpoint."""


class MethodError(FedfacError):
    """A method breaks a law that every method must keep; raised by ``check_method``."""


class RunError(FedfacError, RuntimeError):
    """A run directory is missing, damaged, in use, or belongs to another run."""


class TrainingError(FedfacError, RuntimeError):
    """Training cannot go on; the last whole round is saved."""


class EngineWarning(UserWarning):
    """Training goes on, but more slowly than it could."""


class TooFewRepliesError(FedfacError):
    """Too few clients of a cohort answered: the round is recorded and changes nothing.

    ``outcomes`` has what is known of the cohort by then, as ``Engine.train`` returns it.
    """

    def __init__(self, reason: str, outcomes: Mapping[int, Any]) -> None:
        super().__init__(reason)
        self.outcomes = outcomes


class UnsoundSumsError(FedfacError):
    """The sums of a round cannot be used: the round is recorded and changes nothing."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or everything that is known.

    >>> did_you_mean("fedfca", ["fedavg", "fedfac"])
    "Did you mean 'fedfac' or 'fedavg'?"
    >>> did_you_mean("zzz", ["fedavg", "fedfac"])
    'Known: fedavg, fedfac.'
    """
    names = [printable(one) for one in known]
    close = get_close_matches(printable(name), names[:_COMPARED], n=3, cutoff=0.6)
    if close:
        near = [f"'{name}'" for name in close]
        return f"Did you mean {' or '.join(near)}?"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"Known: {', '.join(names[:_LISTED]) if names else 'none'}{more}."
