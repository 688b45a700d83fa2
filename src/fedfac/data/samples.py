"""Samples: a data set before it is cut into clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfac.data.federation import Federation, Index
from fedfac.data.pool import Augment, Pool
from fedfac.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Samples:
    """What a source gives: a pool of numbered samples, and what is known about each of them."""

    name: str
    pool: Pool
    fingerprint: str  # of the pool's contents
    labels: npt.NDArray[np.int64] | None  # of every sample; None where targets are real numbers
    classes: int | None
    owners: npt.NDArray[Any] | None = None  # the natural client of every sample (writer, person, hospital), as text
    fixed: Mapping[str, tuple[Index, Index]] | None = None  # clients whose (training, test) the data set itself decides
    augment: Augment | None = None
    class_names: tuple[str, ...] | None = None

    def federation(self, *, seed: int = 0, **options: Any) -> Federation:
        """Cut it into clients; the options are the keys of a config's ``[data]``.

        For example ``samples.federation(partition="pathological", clients=20, classes_per_client=2)``. Without any:
        its natural clients if it has them.
        """
        from fedfac.config import Config
        from fedfac.data.sources import federate

        return federate(self, Config.from_dict({"data": {"name": self.name, **options}}).data, seed=seed)


def class_order(found: Sequence[str], classes: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """All classes in order: those that were found, or those that ``classes`` names, of which some may not occur."""
    allowed = frozenset(classes or ())
    unknown = [name for name in found if classes is not None and name not in allowed]
    if classes is not None and unknown:
        raise DataError(f"{where} has the class {unknown[0]!r}. {did_you_mean(unknown[0], classes)}")
    return tuple(found if classes is None else classes)
