"""The golden record's cases: a name that stays, and how this version spells what it stands for.

Names are compared between versions, spellings are not: when an option is renamed, its spelling changes here, and the
name and the recorded numbers stay. ``method`` is what ``fedfac compare --methods`` takes; ``options`` are those that a
text cannot spell; ``settings`` are arguments of ``fedfac.fit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIGITS, IMAGES, SEQUENCES, NUMBERS = "digits", "images", "sequences", "numbers"  # see problems.py


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run by ``fedfac.fit``, recorded with one lane, with two, and with a stop after round 1."""

    method: str
    on: str = SEQUENCES
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Together:
    """A comparison of methods that train alike, recorded together and each by itself."""

    methods: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What 'auto' chooses, and the run that follows."""

    on: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """A run over nodes in this process; every message goes through its bytes."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


AnyCase = Case | Together | Chosen | Network

METHODS = {
    "fedavg": "fedavg",
    "fedavg, fine-tuned": "fedavg+",
    "fedprox": "fedprox:mu=0.1",
    "fedprox, fine-tuned": "fedprox+:mu=0.1",
    "local": "local",
    "fedper": "fedper",
    "fedrep": "fedrep",
    "lg-fedavg": "lg-fedavg",
    "fedem": "fedem",
    "fedbn": "fedbn",
    "fedbabu": "fedbabu",
    "ditto": "ditto",
    "apfl": "apfl",
    "pfedme": "pfedme",
    "fedfac, dynamic": "fedfac",
    "fedfac, static": "fedfac-static",
    "fedfac-plus": "fedfac-plus",
    "random split": "random",
    "random split, redrawn": "random-redrawn",
    "all personal": "all-personal",
    "variance split": "variance",
}

PLUS = "fedfac-plus:joint=false"  # FedFac+ whose split layers are split in training
OPTIONS = {
    # global models
    "fedavg / averaged predictions": "fedavg:average=0.5",
    "fedavg / averaged predictions, short memory": "fedavg:average=0.1",
    "fedavg / server momentum": "fedavg:server_momentum=0.5",
    "fedavg / server rate": "fedavg:server_rate=0.5",
    "fedavg, fine-tuned / epochs, rate, shrinkage": "fedavg+:refresh=2:refresh_shrinkage=0.25",
    "fedavg, fine-tuned / averaged, momentum": "fedavg+:average=0.5:server_momentum=0.5:server_rate=0.9",
    "fedprox / averaged, momentum": "fedprox:mu=1:average=0.5:server_momentum=0.5:server_rate=0.9",
    "fedprox, fine-tuned / epochs, rate, shrinkage": "fedprox+:mu=1:refresh=2:refresh_shrinkage=0.25",
    "fedprox, fine-tuned / averaged, momentum": "fedprox+:average=0.5:server_momentum=0.5:server_rate=0.9",
    # whole layers
    "fedper / two layers": "fedper:personal_layers=2",
    "fedper / no layer": "fedper:personal_layers=0",
    "fedper / warm-up": "fedper:warmup=1",
    "fedper / refresh": "fedper:refresh=2",
    "fedper / refresh at half the rate, shrunk": "fedper:refresh=2:refresh_shrinkage=0.25",
    "fedper / proximal": "fedper:proximal=0.1",
    "fedper / prior": "fedper:prior=1",
    "fedper / learned prior": "fedper:prior=1:prior_smoothing=learned",
    "fedper / averaged predictions": "fedper:average=0.5",
    "fedper / own statistics": "fedper:statistics=0.5",
    "fedper / server momentum": "fedper:server_momentum=0.5:server_rate=0.9",
    "fedper / everything": "fedper:warmup=1:refresh=2:refresh_shrinkage=0.25:proximal=0.1:prior=0.5"
    ":prior_smoothing=learned:average=0.5:statistics=0.5:server_momentum=0.5",
    "fedrep / epochs": "fedrep:head_epochs=2:body_epochs=2",
    "fedrep / two layers, warm-up, refresh": "fedrep:personal_layers=2:warmup=1:refresh=2",
    "fedrep / averaged, momentum": "fedrep:average=0.5:server_momentum=0.5:server_rate=0.9",
    "lg-fedavg / one layer": "lg-fedavg:local_layers=1:server_rate=0.9",
    "fedbn / server rate": "fedbn:server_rate=0.9",
    "fedbabu / only the head": "fedbabu:refresh_trains=head:refresh=2:server_rate=0.9",
    # two models or several
    "fedem / two components": "fedem:components=2:component_seed=3:server_rate=0.9",
    "fedem / one component": "fedem:components=1",
    "ditto / epochs": "ditto:lam=1:personal_epochs=2:server_rate=0.9",
    "apfl / epochs": "apfl:mix=0.25:personal_epochs=2:server_rate=0.9",
    "pfedme / weaker": "pfedme:lam=1:server_rate=0.9",
    # FedFac
    "fedfac / all but the first layer": "fedfac:layers=2+3",
    "fedfac / recurrent layer": "fedfac:layers=1",
    "fedfac / threshold 0": "fedfac:tau=0",
    "fedfac / threshold 0 %": "fedfac:tau=0%",
    "fedfac / threshold 25 %": "fedfac:tau=25%",
    "fedfac / threshold 100 %": "fedfac:tau=100%",
    "fedfac / threshold inf": "fedfac:tau=inf",
    "fedfac / absolute threshold": "fedfac:tau=0.6",
    "fedfac / few factors": "fedfac:kappa=0.4",
    "fedfac / principal component": "fedfac:estimator=principal-component",
    "fedfac / leverage": "fedfac:estimator=leverage",
    "fedfac / cold solver": "fedfac:solver=cold",
    "fedfac / of updates": "fedfac:on=updates",
    "fedfac / norm shared": "fedfac:norm=shared",
    "fedfac / norm personal": "fedfac:norm=personal",
    "fedfac / personal head": "fedfac:head=personal",
    "fedfac / split head": "fedfac:layers=-2+-1",
    "fedfac / refreshed elements": "fedfac:joint=true:refresh=1",
    "fedfac / warm-up": "fedfac:warmup=1",
    "fedfac / decay": "fedfac:decay=0.5",
    "fedfac / hysteresis": "fedfac:layers=1+2:on=updates:hysteresis=0.2",
    "fedfac / absolute threshold with hysteresis": "fedfac:layers=1+2:tau=0.9:hysteresis=0.1",
    "fedfac / refresh": "fedfac:refresh=2",
    "fedfac / refresh and head": "fedfac:refresh=1:refresh_trains=head",
    "fedfac / refresh of all": "fedfac:refresh=1:refresh_trains=all:refresh_shrinkage=0.25",
    "fedfac / proximal": "fedfac:proximal=0.1",
    "fedfac / prior": "fedfac:prior=1",
    "fedfac / learned prior": "fedfac:prior=1:prior_smoothing=learned",
    "fedfac / averaged predictions": "fedfac:average=0.5",
    "fedfac / own statistics": "fedfac:statistics=1",
    "fedfac / server momentum": "fedfac:server_momentum=0.5:server_rate=0.9",
    "fedfac / static, all clients probed": "fedfac:schedule=static:probe_all=true",
    "fedfac / static, warm-up, decay": "fedfac-static:warmup=1:decay=0.5",
    "fedfac-plus / warm-up": "fedfac-plus:warmup=1",
    "fedfac-plus / static": "fedfac-plus:schedule=static",
    "fedfac-plus / no threshold, head": "fedfac-plus:tau=0:refresh_trains=head",
    "fedfac-plus / without prior": "fedfac-plus:prior=0",
    "fedfac-plus / learned prior, shrunk": "fedfac-plus:prior_smoothing=learned:refresh_shrinkage=0.25",
    "fedfac-plus / personal elements": PLUS,
    "fedfac-plus / personal elements, warm-up": f"{PLUS}:warmup=1:refresh_trains=head",
    "fedfac-plus / all off": f"{PLUS}:decay=0:hysteresis=0:refresh=0:proximal=0:prior=0:average=0:statistics=0"
    ":server_momentum=0",
    # the controls
    "random split / switches": "random:tau=25%:head=personal:warmup=1:refresh=1:prior=1:server_rate=0.9",
    "random split, redrawn / norm": "random-redrawn:layers=1+2:norm=shared",
    "all personal / switches": "all-personal:norm=shared:head=personal:warmup=1:refresh=1:prior=1:server_rate=0.9",
    "variance split / switches": "variance:tau=25%:warmup=1:hysteresis=0.2:refresh=1:server_rate=0.9",
    "all personal / two layers": "all-personal:layers=1+2",
    "variance split / static": "variance:schedule=static:layers=1+2:norm=personal:head=personal",
}

STACKED = (  # of METHODS: those whose clients can be trained as one, and one that cannot
    "fedavg",
    "fedavg, fine-tuned",
    "fedprox",
    "local",
    "fedper",
    "fedrep",
    "fedbabu",
    "ditto",
    "fedfac, dynamic",
    "fedfac, static",
    "fedfac-plus",
    "variance split",
)
ON_IMAGES = ("fedavg", "fedavg, fine-tuned", "fedbn", "fedem", "ditto", "fedfac, dynamic", "fedfac-plus")
ON_NUMBERS = ("fedavg, fine-tuned", "fedper", "ditto", "fedfac, dynamic", "fedfac-plus")
WITH_NEWCOMERS = ("fedavg, fine-tuned", "fedper", "lg-fedavg", "fedem", "apfl", "fedfac, dynamic", "fedfac-plus")

SPELLED: dict[str, Case] = {
    "given split": Case(method="given", options={"masks": {"fc": "00111010", "lstm.l0": "010101"}}),
    "given split / norm shared": Case(method="given", options={"masks": {"fc": "00111010"}, "norm": "shared"}),
    "variance split / hysteresis": Case(
        method="variance", on=DIGITS, options={"hysteresis": 0.2}, settings={"stack": False}
    ),
    "fedfac / by layer": Case(
        method="fedfac",
        options={"layers": [1, 2], "tau": {1: "25%", 2: "75%"}, "kappa": {1: 0.5, 2: 0.9}},
    ),
}

SETTINGS: dict[str, Case] = {
    "setting / sgd": Case(
        method="fedfac", settings={"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    ),
    "setting / share of clients": Case(method="fedper", settings={"cohort": None, "rate": 0.5}),
    "setting / epochs, batches, seed": Case(method="fedfac", settings={"epochs": 2, "batch_size": 5, "seed": 11}),
    "setting / evaluation": Case(
        method="fedavg+", settings={"evaluate_every": 2, "evaluate_from": 2, "evaluate_clients": 3}
    ),
    "setting / metrics": Case(method="fedper", on=NUMBERS, settings={"metrics": ["mae", "r2"]}),
    "setting / bf16": Case(method="fedfac", on=IMAGES, settings={"precision": "bf16"}),
    "setting / contiguous": Case(method="fedfac", on=IMAGES, settings={"layout": "contiguous"}),
    "setting / deterministic": Case(method="fedfac", on=IMAGES, settings={"deterministic": True}),
}

OTHERS: dict[str, AnyCase] = {
    "comparison / fedavg": Together(
        methods={
            "plain": "fedavg",
            "averaged": "fedavg:average=0.9",
            "fine-tuned": "fedavg+:refresh=1",
            "refreshed elements": "fedfac:joint=true:proximal=0:refresh=1",
        }
    ),
    "comparison / fedper": Together(
        methods={"plain": "fedper:warmup=1", "refreshed": "fedper:warmup=1:refresh=1:average=0.5"}
    ),
    "comparison / fedfac-plus": Together(
        methods={
            "default": "fedfac-plus",
            "other factors": "fedfac-plus:decay=0:hysteresis=0:kappa=0.6",
            "all personal": "fedfac-plus:tau=inf",
            "warm-up": "fedfac-plus:warmup=2:tau=75%",
        }
    ),
    "auto": Chosen(on=SEQUENCES),
    "network / fedavg": Network(method="fedavg"),
    "network / fedper": Network(method="fedper"),
    "network / ditto": Network(method="ditto"),
    "network / fedfac": Network(method="fedfac"),
    "network / fedfac, static": Network(method="fedfac-static"),
    "network / fedfac-plus": Network(method="fedfac-plus", options={"warmup": 1}),
    "network / fedfac-plus, personal elements": Network(method="fedfac-plus", options={"warmup": 1, "joint": False}),
}

CASES: dict[str, AnyCase] = {
    **{name: Case(method=spelled) for name, spelled in (METHODS | OPTIONS).items()},
    **{f"{name} @ digits": Case(method=METHODS[name], on=DIGITS, settings={"stack": False}) for name in METHODS},
    **{f"{name} @ digits, stacked": Case(method=METHODS[name], on=DIGITS) for name in STACKED},
    **{f"{name} @ images": Case(method=METHODS[name], on=IMAGES) for name in ON_IMAGES},
    **{f"{name} @ numbers": Case(method=METHODS[name], on=NUMBERS) for name in ON_NUMBERS},
    **{f"{name} @ newcomers": Case(method=METHODS[name], settings={"newcomers": 0.34}) for name in WITH_NEWCOMERS},
    **SPELLED,
    **SETTINGS,
    **OTHERS,
}
SMALL = (  # what 'make test' trains: every kind of case once, and the paths that differ most
    "fedfac-plus",
    "fedrep",
    "fedfac / warm-up",
    "fedem @ digits",
    "fedfac, dynamic @ digits, stacked",
    "fedfac, static @ digits",
    "ditto @ images",
    "apfl @ newcomers",
    "setting / evaluation",
    "comparison / fedper",
    "network / fedfac",
)
