"""Bounds on what a file may make of memory, and the reading of small JSON files.

A data set may take ``FEDFAC_MAX_BYTES`` bytes once it is read (default: 8 GiB, or half of the machine's memory if that
is less). Without that variable, what a file unpacks to must also be below 1 GiB or below a hundred times the file's
own size. Sizes are compared before anything of that size is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedfac.errors import ConfigError, DataError, FedfacError, did_you_mean
from fedfac.words import quoted

VARIABLE = "FEDFAC_MAX_BYTES"
MOST = 8 * 2**30
UNSUSPICIOUS = 2**30  # bytes: what a file may unpack to, however small it is
RATIO = 100
PIXELS = 2**26  # of one image
NAME = 1000  # characters of the name of a client, a class or a column
DEPTH = 32  # tables or lists inside each other
SETTINGS = 16 * 2**20  # bytes of a file of settings
WHOLE = 2**63  # whole numbers are below it

Kind = TypeVar("Kind")


def most_bytes() -> int:
    """What a data set may take, in bytes."""
    asked = os.environ.get(VARIABLE)
    return _default() if asked is None else _number(asked)


def check_memory(size: int, what: str, error: type[FedfacError] = DataError) -> None:
    """Refuse what would take more memory than a data set may."""
    if size > most_bytes():
        raise error(f"{what} would take {_shown(size)}; allowed: {_shown(most_bytes())}. {_raise(size)}")


def check_unpacked(size: int, stored: int, what: str) -> None:
    """Refuse a file of ``stored`` bytes that unpacks to far more than files of data do."""
    check_memory(size, what)
    if VARIABLE not in os.environ and size > max(UNSUSPICIOUS, RATIO * stored):
        raise DataError(
            f"{what} has {_shown(stored)} and unpacks to {_shown(size)}; allowed: {RATIO} times as much, "
            f"or {_shown(UNSUSPICIOUS)}. {_raise(size)}"
        )


def check_name(name: str, what: str) -> str:
    """A name that can be held a million times over, and told from others."""
    if len(name) > NAME or "\0" in name:
        why = "a NUL character in it" if "\0" in name else f"{len(name)} characters"
        raise DataError(f"{what} {quoted(name)} has {why}; allowed: {NAME} characters, none of them NUL")
    return name


def file_bytes(path: Path, most: int = SETTINGS) -> bytes:
    """The content of a file that is small; OSError as it comes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size or SETTINGS  # a pipe has no size
        content = file.read(min(size, most) + 1)
    if len(content) > min(size, most):
        raise ValueError(f"it has more than {_shown(most)}")
    return content


def read_json(path: Path, kind: type[Kind], *, what: str, error: type[FedfacError]) -> Kind:
    """A JSON file whose content has this type; else an error that says what is wrong with it, and where."""
    try:
        value = msgspec.json.decode(file_bytes(path), type=kind)
        check_depth(msgspec.to_builtins(value))
    except (OSError, ValueError, RecursionError) as wrong:
        raise error(f"{path} is not {what}: {reason(wrong)}; nothing was changed") from wrong
    return value


def fitting(value: Mapping[str, Any], kind: type[Kind], where: str) -> Kind:
    """A table of a file as a ``msgspec.Struct``; an unknown key fails with the nearest known one."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise ConfigError(f"unknown key {quoted(key)} in {where}. {did_you_mean(key, known)}")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as wrong:
        raise ConfigError(f"{where} does not fit: {reason(wrong)}") from wrong


def check_depth(value: object) -> None:
    """Fail on tables and lists inside each other without end, and on numbers that nothing can hold."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise ValueError(f"tables or lists lie more than {DEPTH} deep inside each other")
        for one in level:
            if isinstance(one, int) and abs(one) >= WHOLE:
                raise ValueError(f"a whole number of {one.bit_length()} bits is in it; allowed: 63 bits")
        level = [inner for one in level for inner in _inside(one)]


def reason(error: BaseException) -> str:
    """What another library says is wrong, in a line."""
    if isinstance(error, RecursionError):
        return f"tables or lists lie more than {DEPTH} deep inside each other"
    return str(error) or type(error).__name__


def _inside(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _default() -> int:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return MOST
    return min(MOST, memory // 2)


def _number(text: str) -> int:
    """Bytes, from a number with or without K, M, G or T.

    >>> _number("2G"), _number("1.5 m"), _number("1000")
    (2147483648, 1572864, 1000)
    """
    plain = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = plain[-1:] if plain[-1:] in ("K", "M", "G", "T") else ""
    try:
        size = int(float(plain.removesuffix(unit)) * 1024 ** " KMGT".index(unit or " "))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{VARIABLE} is {text!r}; give bytes: {VARIABLE}=16G, for example") from error
    if size < 1:
        raise ConfigError(f"{VARIABLE} is {text!r}; it must be above 0")
    return size


def _shown(size: int) -> str:
    """A number of bytes for people.

    >>> _shown(700), _shown(4_500_000_000)
    ('700 bytes', '4.5 GB')
    """
    for unit, least in (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= least:
            return f"{size / least:.1f} {unit}" if size < 10**18 else "more than 1000 PB"
    return f"{size} bytes"


def _raise(size: int) -> str:
    return f"If the file is what you expect, allow it: {VARIABLE}={max(1, -(-size // 2**30))}G"
