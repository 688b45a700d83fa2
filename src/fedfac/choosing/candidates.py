"""What is tried: the short list of ``--method auto``, or one method with ``--layers auto`` or ``--tau auto``.

The short list is what docs/digits.md, docs/fedfac-plus.md and docs/results.md leave standing: one global model, the
same fine-tuned by each client, a personal head, FedFac+ and no federation at all. Λ is the last hidden layer (the
default) or the one that two rounds of :mod:`fedfac.tuning.automatic` pick.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import Method

AUTO = methods.AUTO
TRIAL_ROUNDS = "trial_rounds"
SHORTLIST = ("fedavg", "fedavg+", "fedper", "fedfac-plus", "local")
NO_SPLIT = "0"  # τ: every element is shared, whatever Λ is
TAUS = (NO_SPLIT, "25%", "50%", "75%")  # of one method
REFRESH_EPOCHS = 3
WARMUP = (2, 10)  # at least, at most; between them a tenth of the run


@dataclass(frozen=True)
class Candidate:
    """A method, and what a config file would say to have it."""

    label: str
    asked: Mapping[str, Any]  # name and options
    method: Method

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> Candidate:
        """By name; the label is what ``fedfac compare --methods`` takes."""
        words = [f"{key}={'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in options.items()]
        return cls(":".join([name, *words]), {"name": name, **options}, methods.build(name, options))


def is_open(asked: Mapping[str, Any]) -> bool:
    """Whether a config's [method] leaves something to be chosen."""
    return asked.get("name") == AUTO or any(_is_auto(asked.get(key)) for key in ("layers", "tau"))


def needs_probe(asked: Mapping[str, Any], anatomy: Anatomy) -> bool:
    """Whether Λ is to be chosen, and there is more than one hidden layer to choose from."""
    wanted = asked.get("layers", AUTO if asked["name"] == AUTO else None)
    return _is_auto(wanted) and len(anatomy.numbered) > 2


def warmup_of(rounds: int) -> int:
    """Rounds that share everything, where the user does not say: a tenth of the run, 2 at least and 10 at most."""
    return max(WARMUP[0], min(WARMUP[1], rounds // 10))


def options_known() -> set[str]:
    """The options that some method of the short list has, and that of the choice itself."""
    return {TRIAL_ROUNDS}.union(*(methods.options_of(name) for name in SHORTLIST))


def candidates(asked: Mapping[str, Any], anatomy: Anatomy, *, rounds: int, picked: str | None) -> list[Candidate]:
    """Every candidate once, the simpler ones first; ``picked`` is the layer that the probe found."""
    options = {key: value for key, value in asked.items() if key not in ("name", TRIAL_ROUNDS)}
    if asked["name"] != AUTO:
        return _grid(asked["name"], options, anatomy, picked)
    for option in options.keys() - options_known():
        raise ConfigError(
            f"none of the methods that 'auto' chooses from ({', '.join(SHORTLIST)}) has an option {option!r}. "
            f"{did_you_mean(option, sorted(options_known()))}"
        )
    found = []
    hidden = len(anatomy.numbered) > 1
    for name in SHORTLIST:
        if not hidden and name in ("fedper", "fedfac-plus"):  # the head is all there is: FedPer would be local
            continue
        own = {key: value for key, value in options.items() if methods.takes(name, key)}
        if _is_auto(own.get("tau")):
            del own["tau"]  # the variants have some
        for variant in _variants(name, warmup_of(rounds)):
            found += _grid(name, {**variant, **own}, anatomy, picked)
    return list({candidate.label: candidate for candidate in found}.values())


def _variants(name: str, warmup: int) -> list[dict[str, Any]]:
    """How a method of the short list is tried. The first two of FedFac+ train alike."""
    if name == "fedper":
        return [{"warmup": warmup, "refresh": REFRESH_EPOCHS}]
    if name == "fedfac-plus":
        return [
            {"tau": NO_SPLIT, "refresh_trains": "head"},  # a head that is refreshed
            {"layers": AUTO},  # as it comes: elements that are
            {"layers": AUTO, "joint": False, "refresh_trains": "head", "warmup": warmup},  # elements of one's own
        ]
    return [{}]


def _grid(name: str, options: Mapping[str, Any], anatomy: Anatomy, picked: str | None) -> list[Candidate]:
    """One candidate for every Λ and τ that are left open; without a split Λ does not matter."""
    values: dict[str, list[Any]] = {key: [value] for key, value in options.items()}
    if _is_auto(options.get("layers")):
        if len(anatomy.numbered) < 2:
            raise ConfigError("layers is 'auto', but the model has no hidden layer to split: use another method")
        last = anatomy.numbered[-2].name
        values["layers"] = [[anatomy.layer(name).key] for name in dict.fromkeys([last, picked or last])]
    if _is_auto(options.get("tau")):
        values["tau"] = list(TAUS)
    found = [dict(zip(values, combined, strict=True)) for combined in itertools.product(*values.values())]
    return [
        Candidate.of(name, asked)
        for asked in found
        if asked.get("tau") != NO_SPLIT or asked.get("layers") == values.get("layers", [None])[0]
    ]


def _is_auto(value: Any) -> bool:
    return value in (AUTO, [AUTO])
