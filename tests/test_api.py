"""What people find when they look for it: dir(fedfac), a method by its name, a word for a wrong type."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from helpers import message

import fedfac
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.state import same

SETTINGS: dict[str, Any] = {"rounds": 1, "epochs": 1, "cohort": 3, "lanes": 1}


def test_the_public_names_are_found() -> None:
    names = dir(fedfac)
    assert {"fit", "load", "choose", "Federation", "Anatomy", "check_method", "methods", "switches"} <= set(names)
    for name in names:
        assert getattr(fedfac, name) is not None


def test_looking_for_names_does_not_import_pytorch() -> None:
    code = "import sys, fedfac; dir(fedfac); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_method_may_be_given_by_its_name() -> None:
    named = fedfac.fit(small_model(), small_federation(), method="fedper", **SETTINGS)
    built = fedfac.fit(small_model(), small_federation(), method=fedfac.methods.fedper(), **SETTINGS)
    assert same(named.server, built.server)
    assert "Did you mean 'fedper'" in message(
        ConfigError, lambda: fedfac.fit(small_model(), small_federation(), method="fedpr", **SETTINGS)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (fedfac.methods.fedper, "method is a function (call it: it is the builder of one); allowed: a Method"),
        (3, "method is a int; allowed: a Method, such as fedfac.methods.fedper(), or the name of one"),
    ],
)
def test_what_is_no_method_is_told_what_is_wanted(given: Any, said: str) -> None:
    assert said in message(ConfigError, lambda: fedfac.fit(small_model(), small_federation(), method=given, **SETTINGS))
