"""Seeded damage to the bytes of a file, and the one rule for whoever reads it.

``FEDFAC_FUZZ=N`` tries N mutations of every target instead of the few of 'make test'.
"""

from __future__ import annotations

import os
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedfac.errors import FedfacError

VARIABLE = "FEDFAC_FUZZ"
MOST_GROWTH = 1500  # MB: what all mutations of a target together may add to the largest size of the process
MOST_SECONDS = 20.0  # of one mutation
_WORDS = (
    *(b"0", b"-1", b"1e999", b"NaN", b"null", b"\0", b"\xff\xfe", b"[", b"{", b'"', b"\n", b",", b"."),
    *(b"999999999999", b"18446744073709551616", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x80" * 4, b"\x1b[31m", b"../"),
)


def mutations(contents: Sequence[bytes], number: int, *, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """So many damaged versions of these contents, each with a name that makes it again."""
    for i in range(int(os.environ.get(VARIABLE, number))):
        draw = random.Random(f"{seed} {i}")
        content = bytearray(draw.choice(contents))
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            draw.choice(_WAYS)(content, draw)
        yield f"seed {seed}, mutation {i}", bytes(content)


def survives(read: Callable[[bytes], object], contents: Sequence[bytes], number: int, *, seed: int = 0) -> int:
    """Every mutation is read, or refused in fedfac's own words, soon and in bounded memory; how many were read."""
    before = _peak()
    with _bounded():
        good = _tried(read, mutations(contents, number, seed=seed))
    assert _peak() - before < MOST_GROWTH, f"{_peak() - before} MB"
    return good


def unharmed(read: Callable[[bytes], object], content: bytes) -> int:
    """The same for one content that is meant to do harm."""
    before = _peak()
    with _bounded():
        good = _tried(read, iter([("it", content)]))
    assert _peak() - before < MOST_GROWTH, f"{_peak() - before} MB"
    return good


def _tried(read: Callable[[bytes], object], damaged: Iterator[tuple[str, bytes]]) -> int:
    good = 0
    for name, content in damaged:
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a library may warn of what it makes do with
                read(content)
            good += 1
        except FedfacError as error:
            text = str(error)
            assert text.strip(), name
            assert not any(ord(c) < 32 and c not in "\n\t" for c in text), (name, text)
        except BaseException as error:
            raise AssertionError(f"{name} ({content[:200]!r}...): {type(error).__name__}: {error}") from error
        assert time.perf_counter() - start < MOST_SECONDS, name
    return good


@contextmanager
def _bounded() -> Iterator[None]:
    """The process may ask for a few GB more, and not for all of the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + 4 * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _flip(content: bytearray, draw: random.Random) -> None:
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _overwrite(content: bytearray, draw: random.Random) -> None:
    word = draw.choice(_WORDS)
    place = draw.randrange(len(content) + 1)
    content[place : place + len(word)] = word


def _insert(content: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(content) + 1)
    content[place:place] = draw.choice(_WORDS) * draw.choice((1, 1, 1, 3, 5000))


def _cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content) + 1) :]


def _remove(content: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(content) + 1)
    del content[place : place + draw.choice((1, 2, 8, 100))]


def _repeat(content: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(content) + 1)
    content[place:place] = content[place : place + draw.choice((1, 8, 100))] * draw.choice((1, 2, 50))


def _number(content: bytearray, draw: random.Random) -> None:
    """Another number in the place of one that is written in digits."""
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if places:
        place = draw.choice(places)
        content[place : place + 1] = draw.choice((b"0", b"-1", b"1e9", b"99999999", b"1" + b"0" * 30, b"0.5", b'"1"'))


_WAYS = (_flip, _flip, _overwrite, _insert, _cut, _remove, _repeat, _number, _number)
