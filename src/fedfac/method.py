"""Method: a split of the state, a local schedule, and an aggregation, as one value.

A method is a base, made by a keyword-only builder in ``fedfac.methods`` with its paper's parameters, and a list of
switches (``fedfac.switches``), each a function from Plan to Plan. For a concrete model it makes a Plan: that is where
unknown layers fail, before any training starts. A Plan has two halves that are values: Training, which decides the
numbers that a training comes to, and Prediction, which does not. Two methods train alike if their Trainings are equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Protocol

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

    Parameters
    ----------
    trains
        Names of tensors (buffers too), or ``PERSONAL``: the numbers that the split of the moment calls personal, down
        to single elements (but no statistics of a normalisation of which a part is shared: batches would change what
        the shared part sees); or None: everything.
    also
        With ``PERSONAL``: further tensors.
    epochs
        None: the run's local epochs. With 0 only ``before`` happens.
    objective, before
        The loss of a batch; and what is done ahead of the first one. Values (functions of a module, frozen
        dataclasses), so that two methods that train alike are seen to do so.
    lr_scale
        The phase's learning rate is the run's times this.
    shrinkage
        The fraction by which trained weights return to their start afterwards.
    stacks
        A promise that the objective looks at nothing but tensors, and takes the mean over samples by ``step.loss``
        only, so that many clients may take the step as one. The plain objective does.
    """

    trains: frozenset[str] | Literal["personal"] | None = None
    also: frozenset[str] = frozenset()
    epochs: int | None = None
    objective: Callable[[Step], Tensor] = supervised
    before: Callable[[Begin], Any] | None = None
    lr_scale: float = 1.0
    shrinkage: float = 0.0
    stacks: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lr_scale < float("inf"):
            raise ConfigError(f"lr_scale is {self.lr_scale}; allowed: a positive number")
        if not 0 <= self.shrinkage < 1:
            raise ConfigError(
                f"shrinkage is {self.shrinkage}; the fraction of the way back is a number from 0 to below 1"
            )


NEWCOMER_RULES = ("adapt", "ensemble")
Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server's step: W ← W + rate·(mean − W), with ``momentum`` times its last step."""

    rate: float = 1.0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """Who decides about elements, and when: after every round's training, or once."""

    rule: Rule
    every_round: bool = False
    probe_all: bool = False  # the once-only decision looks at all clients, not at one cohort
    after: int = 0  # the first decision comes after so many rounds

    @property
    def first(self) -> int:
        """The round of the first decision; 0 is before the first round."""
        return 0 if not self.every_round and not self.after else self.after + 1

    def due(self, round: int, *, decided: bool) -> bool:
        """Whether the rule is asked in a round; a decision that is made once waits for a round in which it can be."""
        return round >= self.first and (self.every_round or not decided)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides the numbers that a training comes to. Methods with equal Trainings train alike."""

    split: Split  # before any decision
    deciding: Deciding | None = None
    warmup: int = 0  # so many rounds share everything; the split comes after them
    own: frozenset[str] = frozenset()  # tensors that stay personal even then
    phases: tuple[Phase, ...] = (Phase(),)
    server: Server = field(default_factory=Server)
    models: int = 1  # how many copies of the user's network a client trains
    wraps: tuple[Wrap, ...] = ()  # what was done to the user's model


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a client does before it predicts, and how a new client gets a model. It changes no number of a training.

    ``split`` and ``deciding`` are here where all clients train every element together, and each makes some of them its
    own before it predicts: then the split says nothing about training.
    """

    split: Split | None = None
    deciding: Deciding | None = None
    average: float = 0.0  # clients predict with a mean of the server's states, in which the past has this weight
    refresh: tuple[Phase, ...] = ()  # on a copy of the client's model before it is evaluated or handed out
    newcomer: tuple[Phase, ...] = ()  # how a new client makes a model its own; none: it gets the global model
    newcomer_rules: tuple[str, ...] = ("adapt",)  # the ways to serve one, the method's own first

    def __post_init__(self) -> None:
        unknown = set(self.newcomer_rules) - set(NEWCOMER_RULES)
        if unknown or not self.newcomer_rules:
            raise ConfigError(f"newcomer_rules is {self.newcomer_rules}; allowed: {', '.join(NEWCOMER_RULES)}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A method for one concrete model."""

    training: Training
    prediction: Prediction = field(default_factory=Prediction)
    by_element: bool = False  # a method that splits layers by element, also if its τ leaves nothing to decide
    resolved: Mapping[str, Any] = field(default_factory=dict)  # options left as None; None again: the run's epochs

    @property
    def split(self) -> Split:
        """The split that clients predict with, before any decision."""
        return self.training.split if self.prediction.split is None else self.prediction.split

    @property
    def deciding(self) -> Deciding | None:
        """Who decides, wherever the decision is used."""
        return self.training.deciding or self.prediction.deciding

    @property
    def rule(self) -> Rule | None:
        """The rule that decides, if one does."""
        return None if self.deciding is None else self.deciding.rule

    @property
    def every_round(self) -> bool:
        """Whether the rule is asked after every round's training."""
        return self.deciding is not None and self.deciding.every_round

    @property
    def probe_all(self) -> bool:
        """Whether the once-only decision looks at all clients."""
        return self.deciding is not None and self.deciding.probe_all

    @property
    def shares_nothing(self) -> bool:
        """Whether every client is by itself."""
        return self.deciding is None and self.split.shared_numel() == 0

    @property
    def warmup(self) -> int:
        """The rounds in which everything is shared."""
        return max(self.training.warmup, 0 if self.deciding is None else self.deciding.after)

    @property
    def first_decision(self) -> int:
        """The round of the first decision; 0 is before the first round."""
        return self.warmup + 1 if self.deciding is None else self.deciding.first

    def split_in(self, round: int, masks: Mapping[str, Sequence[bool]] | None = None) -> Split:
        """The split of a round: (nearly) everything is shared while the method warms up."""
        if self.warmup and round <= self.warmup:
            return Split(self.split.shapes, self.training.own)
        return self.split if masks is None else self.split.with_masks(masks)

    def decides(self, round: int, *, decided: bool) -> bool:
        """Whether the rule is asked in a round; ``decided``: it has been before."""
        return self.deciding is not None and self.deciding.due(round, decided=decided)

    def decides_as(self, other: Plan) -> bool:
        """Whether two methods that train alike come to the same decisions."""
        return self.rule == other.rule and self.first_decision == other.first_decision

    def evaluates(self, round: int) -> str:
        """Which model is evaluated in a round: the global one, the client's personal one, or a fine-tuned copy."""
        warming = self.warmup and round <= self.warmup
        refresh = self.prediction.refresh
        trained = [phase for phase in refresh if phase.epochs != 0]
        if any(not warming or phase.trains != PERSONAL or phase.also for phase in trained):
            return "fine-tuned"
        prepared = any(phase.before is not None for phase in refresh)
        kept = self.training.own if warming else self.split.kept
        return "personal" if prepared or kept else "global"

    def adapts(self, split: Split) -> str:
        """Which model a newcomer gets under a split: an adapted one, or the global one if there is nothing to adapt."""
        newcomer = self.prediction.newcomer
        moves = any(p.before is not None or p.trains != PERSONAL or p.also or split.own for p in newcomer)
        return "adapted" if moves else "global"


class Switch(Protocol):
    """What can be added to any method: a function from Plan to Plan, as a frozen dataclass (``fedfac.switches``)."""

    name: ClassVar[str]
    changes: ClassVar[str]
    paper: ClassVar[str]

    @property
    def is_on(self) -> bool:
        """Whether it does anything with these values."""

    @property
    def wrap(self) -> Wrap | None:
        """What it does to the user's network before there is an anatomy: a copy of it; names of tensors stay."""

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """The plan with the switch; a switch that cannot apply fails with a reason."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train a federation: a base with its paper's parameters, and switches."""

    name: str
    base: Callable[[Anatomy], Plan]
    wrap: Wrap | None = None  # a base that needs more than one copy of the model
    options: Mapping[str, Any] = field(default_factory=dict)  # of the base, for the record
    switches: tuple[Switch, ...] = ()

    def __or__(self, switch: Switch) -> Method:
        """The method with a switch; one of the same name is replaced, one that is off is left out."""
        from fedfac.switches import SWITCHES, in_order

        if isinstance(switch, type):
            raise ConfigError(f"{switch.__name__} has no values yet; write {self.name} | {switch.__name__}()")
        if not callable(getattr(switch, "apply", None)):
            names = ", ".join(kind.__name__ for kind in SWITCHES.values())
            raise ConfigError(f"{switch!r} is not a switch, such as those of fedfac.switches: {names}")
        others = [own for own in self.switches if own.name != switch.name]
        return replace(self, switches=in_order([*others, switch] if switch.is_on else others))

    def plan(self, anatomy: Anatomy) -> Plan:
        """The method for a model that has been wrapped (:meth:`wrapped`)."""
        plan = self.base(anatomy)
        plan = replace(plan, training=replace(plan.training, wraps=self.wraps))
        for switch in self.switches:
            try:
                plan = switch.apply(plan, anatomy)
            except ConfigError as error:
                raise ConfigError(f"{self.name} with {error}") from error
        return plan

    @property
    def wraps(self) -> tuple[Wrap, ...]:
        """What is done to the user's network: by switches first, then by the base."""
        return tuple(wrap for wrap in (*(switch.wrap for switch in self.switches), self.wrap) if wrap is not None)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The module that the method trains; the model itself where nothing is added to it."""
        for wrap in self.wraps:
            model = wrap(model)
        return model

    def describe(self) -> dict[str, Any]:
        """Name, options and switches, for the record of a run."""
        from fedfac.switches import options_of

        described = {"name": self.name, **self.options}
        for switch in self.switches:
            described |= options_of(switch)
        return described

    def resolved(self, plan: Plan, epochs: int) -> dict[str, Any]:
        """The options left as None, and what they are in a run: by its network, or by its local epochs."""
        options = self.describe()
        left_open = [name for name in plan.resolved if name in options and options[name] is None]
        return {name: epochs if plan.resolved[name] is None else plan.resolved[name] for name in left_open}

    def __str__(self) -> str:
        name, *options = self.describe().items()
        return f"{name[1]}({', '.join(f'{k}={v!r}' for k, v in options)})"


Parameters = ParamSpec("Parameters")


def with_switches(builder: Callable[Parameters, Method], *switches: Switch, name: str) -> Callable[Parameters, Method]:
    """A builder of the same method with switches, under a name of its own; its parameters are those of ``builder``."""

    @wraps(builder)
    def build(*given: Parameters.args, **options: Parameters.kwargs) -> Method:
        method = builder(*given, **options)
        for switch in switches:
            method = method | switch
        return replace(method, name=name)

    return build


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
