"""Method: a split of the state, a local schedule, and an aggregation, as one value.

A method is made by a keyword-only builder in ``fedfac.methods`` and holds its client half and its server
half together. ``plan`` turns it into names of a concrete model: that is where unknown layers fail, before
any training starts.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.func import vmap

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.rules import Rule
from fedfac.split import Split
from fedfac.state import State

if TYPE_CHECKING:
    from fedfac.data.federation import Federation
    from fedfac.data.pool import ClientData

Loss = Callable[[Any, Tensor], Tensor]


PERSONAL: Literal["personal"] = "personal"


@dataclass(frozen=True)
class Begin:
    """What a phase's ``before`` sees: the client's model and data, ahead of the phase's first batch."""

    model: nn.Module
    data: ClientData
    loss: Loss

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model in evaluation mode; afterwards each of its parts is in the mode that it was in."""
        modes = {module: module.training for module in self.model.modules()}
        try:
            yield self.model.eval()
        finally:
            for module, mode in modes.items():
                module.training = mode


@dataclass(frozen=True)
class Step:
    """What an objective sees of one batch."""

    model: nn.Module
    inputs: Any
    targets: Tensor
    loss: Loss
    received: State  # the tensors as they were when the client began this round
    index: Tensor  # which of the client's training samples these are: 0..n_k-1
    context: Any = None  # what the phase's ``before`` returned


def supervised(step: Step) -> Tensor:
    """The plain local objective: the loss of the model's output."""
    return step.loss(step.model(step.inputs), step.targets)


def per_sample(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean loss, taken of every sample by itself."""
    if "reduction" in inspect.signature(loss).parameters:
        each = loss(outputs, targets, reduction="none")  # type: ignore[call-arg]
        if each.ndim == 1:
            return each
    one: Tensor = vmap(lambda o, t: loss(o[None], t[None]))(outputs, targets)
    return one


def weighted(loss: Loss, weights: Tensor) -> Loss:
    """A mean loss as a weighted mean over samples: what has weight 0 does not count."""

    def mean(outputs: Any, targets: Tensor) -> Tensor:
        return (per_sample(loss, outputs, targets) * weights).sum() / weights.sum()

    return mean


def at_least_one(**numbers: int | None) -> None:
    """Whole numbers from 1 up; None stands for a default."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}; it is a whole number from 1 up")


def at_least_zero(**numbers: int) -> None:
    """Whole numbers from 0 up; 0 switches something off."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} is {value!r}; it is a whole number from 0 (off) up")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some epochs of local training on some tensors; what a phase does not train is not stepped.

    ``trains`` names tensors (buffers too), or is ``PERSONAL``: the numbers that the split of the moment calls
    personal, down to single elements (but no statistics of a normalisation of which a part is shared: batches would
    change what the shared part sees), and the tensors in ``beside``; or None: everything. ``epochs`` None means the
    run's local epochs; with 0 only ``before`` happens. Its learning rate is the run's times ``gentle``. Afterwards,
    what it has trained moves ``back`` that share of the way to where it began. ``stacks`` promises that the objective
    looks at nothing but tensors, and takes the mean over samples by ``step.loss`` only, so that many clients may take
    the step as one; the plain objective does.
    """

    trains: frozenset[str] | Literal["personal"] | None = None
    beside: frozenset[str] = frozenset()
    epochs: int | None = None
    objective: Callable[[Step], Tensor] = supervised
    before: Callable[[Begin], Any] | None = None
    gentle: float = 1.0
    back: float = 0.0
    stacks: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.gentle < float("inf"):
            raise ConfigError(
                f"the learning rate of a refresh is {self.gentle} times the run's; allowed: a positive number"
            )
        if not 0 <= self.back < 1:
            raise ConfigError(f"shrinkage is {self.back}; the share of the way back is a number from 0 to below 1")


def refreshed(epochs: int, phase: Phase = Phase(trains=PERSONAL)) -> tuple[Phase, ...]:  # noqa: B008 (frozen)
    """A plan's ``refresh``: what is personal is trained (or what ``phase`` says), the rest frozen; none at 0 epochs."""
    return (replace(phase, epochs=epochs),) if epochs else ()


NEWCOMER_RULES = ("adapt", "ensemble")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A method for one concrete model."""

    split: Split  # before any decision
    rule: Rule | None = None
    every_round: bool = False  # decide after every round's training, or once before the first round
    probe_all: bool = False  # the once-only decision looks at all clients, not at one cohort
    warmup: int = 0  # so many rounds share everything; the split, and the first decision, come after them
    own: frozenset[str] = frozenset()  # tensors that stay personal even then
    average: float = 0.0  # clients predict with a mean of the server's states, in which the past weighs so much
    phases: tuple[Phase, ...] = (Phase(),)
    refresh: tuple[Phase, ...] = ()  # on a copy of the client's model before it is evaluated or handed out
    newcomer: tuple[Phase, ...] = ()  # how a client that was never there makes a model its own
    newcomer_rules: tuple[str, ...] = ("adapt",)  # the ways to serve one, the method's own first
    settled: Mapping[str, Any] = field(default_factory=dict)  # options that were left open; None: the run's epochs

    def __post_init__(self) -> None:
        unknown = set(self.newcomer_rules) - set(NEWCOMER_RULES)
        if unknown or not self.newcomer_rules:
            raise ConfigError(f"newcomer_rules is {self.newcomer_rules}; allowed: {', '.join(NEWCOMER_RULES)}")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average is {self.average}; the weight of the past is a number from 0 (off) to below 1")

    @property
    def first_decision(self) -> int:
        """The round of the first decision; 0 is before the first round."""
        return 0 if self.rule is not None and not self.every_round and not self.warmup else self.warmup + 1

    def split_in(self, round: int, masks: Mapping[str, Sequence[bool]] | None = None) -> Split:
        """The split of a round: (nearly) everything is shared while the method warms up."""
        if self.warmup and round <= self.warmup:
            return Split(self.split.shapes, self.own)
        return self.split if masks is None else self.split.with_masks(masks)

    def decides(self, round: int) -> bool:
        """Whether the rule is asked in a round."""
        if self.rule is None:
            return False
        return round == self.first_decision or (self.every_round and round > self.first_decision)

    def decides_as(self, other: Plan) -> bool:
        """Whether two methods that train alike come to the same decisions."""
        return self.rule == other.rule and self.first_decision == other.first_decision

    def evaluates(self, round: int) -> str:
        """Which model is evaluated in a round: the global one, the client's personal one, or a fine-tuned copy."""
        warming = self.warmup and round <= self.warmup
        trained = [phase for phase in self.refresh if phase.epochs != 0]
        if any(not warming or phase.trains != PERSONAL or phase.beside for phase in trained):
            return "fine-tuned"
        prepared = any(phase.before is not None for phase in self.refresh)
        return "personal" if prepared or (self.own if warming else self.split.kept) else "global"

    def adapts(self, split: Split) -> str:
        """Which model a newcomer gets under a split: an adapted one, or the global one if there is nothing to adapt."""
        moves = any(p.before is not None or p.trains != PERSONAL or p.beside or split.own for p in self.newcomer)
        return "adapted" if moves else "global"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train a federation."""

    name: str
    plan: Callable[[Anatomy], Plan]
    server_rate: float = 1.0  # η_g
    server_momentum: float = 0.0  # how much of the server's last step it takes once more
    wrap: Callable[[nn.Module], nn.Module] | None = None  # a method that needs more than one copy of the model
    options: Mapping[str, Any] = field(default_factory=dict)  # for the record
    predicts: frozenset[str] = frozenset()  # options that change decisions or predictions, and no number of a training
    trains_as: str | None = None  # the method that it trains as, if it goes by another name

    def __post_init__(self) -> None:
        if not 0 < self.server_rate < float("inf"):
            raise ConfigError(f"eta_g is {self.server_rate}; the server's rate is a positive number, usually 1")
        if not 0 <= self.server_momentum < 1:
            raise ConfigError(f"server_momentum is {self.server_momentum}; it is a number from 0 (off) to below 1")

    def describe(self) -> dict[str, Any]:
        """Name and options, for the record of a run."""
        return {"name": self.name, **self.options}

    def settled(self, plan: Plan, epochs: int) -> dict[str, Any]:
        """The options that nobody gave, and what they are in a run: by its network, or by its local epochs."""
        left_open = [name for name in plan.settled if name in self.options and self.options[name] is None]
        return {name: epochs if plan.settled[name] is None else plan.settled[name] for name in left_open}

    @property
    def training(self) -> str:
        """What two methods have in common that train alike, whatever they decide and predict with.

        >>> from fedfac.methods import fedavg, fedavg_plus
        >>> fedavg().training == fedavg_plus(finetune_epochs=3).training
        True
        """
        options = {name: value for name, value in self.options.items() if name not in self.predicts}
        server = self.server_rate, self.server_momentum
        return json.dumps([self.trains_as or self.name, server, options], sort_keys=True, default=repr)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def check_method(
    method: Method, *, model: nn.Module | None = None, federation: Federation | None = None, seed: int = 0
) -> None:
    """Run a method through the laws that every method keeps; raise ``MethodError`` at the first breach.

    Two rounds on a small federation (or on yours): same result with one lane and with two, same result
    when stopped and resumed in between, the split total and equal after a JSON round trip, personal numbers
    never in the sums that cross to the server, and tensors that no phase trains unchanged bit by bit.
    """
    from fedfac.conformance import run_checks

    run_checks(method, model=model, federation=federation, seed=seed)
