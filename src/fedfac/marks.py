"""Which methods of a table are worse than its best one by more than seeds differ.

The replicates are seeds: a seed draws the partition, the start and the cohorts anew, and all methods of a seed have the
same ones. The clients of one run share all of these, so a test over clients would take one seed's luck for evidence.
Which method is the best is read off the same figures; therefore all pairs of methods count as tested, not only those
with the best one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

LEVEL = 0.05
FEWEST_SEEDS = 3
EQUAL = 1e-12  # what rounding makes of equal differences

Scores = Mapping[int, float]  # a headline per seed


def worse_than_best(scores: Mapping[str, Scores]) -> set[str]:
    """The methods whose headline is below that of the best one by a paired t-test over seeds, Holm over all pairs.

    If all methods are equal, the chance that any is named is 5 % at most. Only the seeds count that all of them have.

    >>> close = {"a": {0: 0.90, 1: 0.91, 2: 0.92}, "b": {0: 0.89, 1: 0.91, 2: 0.90}}
    >>> worse_than_best(close), worse_than_best({**close, "c": {0: 0.10, 1: 0.12, 2: 0.11}})
    (set(), {'c'})
    """
    seeds = common_seeds(scores)
    if len(seeds) < FEWEST_SEEDS:
        return set()
    values = {method: [own[seed] for seed in seeds] for method, own in scores.items()}
    best = max(values, key=lambda method: math.fsum(values[method]))
    return {method for pair in _told_apart(values) if best in pair for method in pair if method != best}


def common_seeds(scores: Mapping[str, Scores]) -> list[int]:
    """The seeds that all methods have; none where there is nothing to compare."""
    return sorted(set.intersection(*(set(own) for own in scores.values()))) if len(scores) > 1 else []


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """The paired t-test, two-sided; 1 where all differences are the same, which leaves no spread to test against."""
    from scipy.special import stdtr

    differences = [a - b for a, b in zip(one, other, strict=True)]
    spread = statistics.stdev(differences)
    if spread < EQUAL:
        return 1.0
    t = statistics.fmean(differences) / spread * math.sqrt(len(differences))
    return float(2 * stdtr(len(differences) - 1, -abs(t)))


def least_difference(methods: int, seeds: int) -> float:
    """How large a difference must be to be marked, in standard deviations over seeds of that difference.

    >>> round(least_difference(2, 3), 1), round(least_difference(5, 3), 1), round(least_difference(5, 10), 1)
    (2.5, 8.1, 1.2)
    """
    from scipy.special import stdtrit

    return float(stdtrit(seeds - 1, 1 - LEVEL / (2 * math.comb(methods, 2)))) / math.sqrt(seeds)


def _told_apart(values: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str]]:
    """The pairs of methods that Holm's procedure tells apart."""
    pairs = list(itertools.combinations(values, 2))
    tested = sorted((p_value(values[one], values[other]), one, other) for one, other in pairs)
    for place, (value, one, other) in enumerate(tested):
        if value * (len(pairs) - place) >= LEVEL:
            return
        yield one, other
