"""Text from outside, made safe for a terminal, a log or a file name."""

from __future__ import annotations

import hashlib
import re

NAME = 80  # characters of a name that are shown
MESSAGE = 4000  # characters of an error that are shown


def printable(text: object, most: int = NAME) -> str:
    r"""One line of at most ``most`` characters without any control character: those are escaped.

    >>> printable("ward \x1b[31m7\n")
    'ward \\x1b[31m7\\n'
    >>> printable("a" * 300, 8)
    'aaaaa...'
    """
    whole = str(text)
    shown = "".join(_escaped(c) for c in whole[: most + 1])
    return shown if len(shown) <= most else shown[: max(0, most - 3)] + "..."


def quoted(text: object, most: int = NAME) -> str:
    """A name from outside in quotes, as :func:`printable` shows it."""
    return f"'{printable(text, most)}'"


def message(text: str, most: int = MESSAGE) -> str:
    """An error's text: lines stay lines, other control characters are escaped, and its length is bounded."""
    shown = "".join(c if c in "\n\t" else _escaped(c) for c in text[:most])
    return shown if len(text) <= most else f"{shown}... ({len(text) - most} characters more)"


def unstyled(text: object, most: int = NAME) -> str:
    r"""The same for ``rich``, which takes words in square brackets for a style.

    >>> unstyled("ward [red]7\x1b")
    'ward \\[red]7\\x1b'
    """
    from rich.markup import escape

    return escape(printable(text, most))


def file_stem(text: str, most: int = 120) -> str:
    """Text as a part of a file name: letters, digits and ``.=+_-``; a long one is cut and ends in a checksum.

    >>> file_stem("ward 7/b"), len(file_stem("x" * 300))
    ('ward_7_b', 120)
    """
    stem = re.sub(r"[^A-Za-z0-9.=+_-]+", "_", text)
    if len(stem) <= most:
        return stem
    check = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{stem[: most - len(check) - 1]}-{check}"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
