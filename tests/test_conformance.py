"""check_method passes for every method that ships, and catches those that break a law."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.errors import MethodError
from fedfac.method import Method, Phase, Plan, Step, Training, check_method, supervised
from fedfac.split import Split


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_every_method_keeps_the_laws(name: str) -> None:
    check_method(methods.build(name))


@pytest.mark.parametrize(
    "options", [{"on": "updates"}, {"estimator": "leverage"}, {"norm": "personal"}, {"server_rate": 0.7}]
)
def test_the_options_of_fedfac_keep_the_laws(options: dict[str, object]) -> None:
    check_method(methods.build("fedfac", {"layers": [1, 2], **options}))


def test_a_users_own_method_is_one_value() -> None:
    """The body is shared and trained first, then the head alone, which is personal."""

    def base(anatomy: Anatomy) -> Plan:
        head = anatomy.head.tensors
        phases = (Phase(trains=frozenset(anatomy.shapes) - head, epochs=1), Phase(trains=head))
        return Plan(training=Training(split=Split.of(anatomy, personal=head), phases=phases))

    check_method(Method(name="body-then-head", base=base))


def test_a_method_that_depends_on_more_than_the_seed_is_caught() -> None:
    count = itertools.count()

    def drifting(step: Step) -> Tensor:
        return supervised(step) * (1 + next(count) / 100)

    def base(anatomy: Anatomy) -> Plan:
        return Plan(training=Training(split=Split.of(anatomy), phases=(Phase(objective=drifting),)))

    with pytest.raises(MethodError, match="with two lanes instead of one, the record differs"):
        check_method(Method(name="drifting", base=base))


def test_a_method_that_moves_what_it_does_not_train_is_caught() -> None:
    def meddling(step: Step) -> Tensor:
        with torch.no_grad():
            dict(step.model.named_parameters())["0.bias"].add_(0.1)
        return supervised(step)

    def base(anatomy: Anatomy) -> Plan:
        phase = Phase(trains=anatomy.head.tensors, objective=meddling)
        return Plan(training=Training(split=Split.of(anatomy), phases=(phase,)))

    with pytest.raises(MethodError, match=r"no phase trains \['0.bias'\]"):
        check_method(Method(name="meddling", base=base))


def test_a_method_whose_split_is_not_total_is_caught() -> None:
    def base(anatomy: Anatomy) -> Plan:
        shapes = dict(anatomy.shapes)
        shapes.pop("7.bias")
        return Plan(training=Training(split=Split(shapes)))

    with pytest.raises((MethodError, KeyError)):
        check_method(Method(name="partial", base=base))
