"""Gathered values as one HTML file: markup, style, script and data in it, nothing fetched.

Names of clients, folders and methods come from users' data, so nothing of them is ever markup: what Python writes is
escaped, the data is JSON without a ``<``, and the script sets text only. Beyond that the page's own policy allows
just this style and this script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

SCRIPTS = ("dom.js", "charts.js", "curves.js", "clients.js", "partition.js", "explorer.js", "cost.js", "page.js")


def html(facts: Mapping[str, Any]) -> str:
    """The whole page."""
    style = _asset("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, SCRIPTS)) + "\n})();"
    return Template(_asset("page.html")).substitute(
        title=escape(facts["title"]),
        version=escape(facts["version"]),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        style=style,
        script=script,
        common=_definitions(facts["common"]),
        tables="\n".join(map(_table, facts["tables"])),
        note=escape(facts["note"]),
        data=_json(facts),
    )


def _asset(name: str) -> str:
    return (resources.files("fedfac.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(facts: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _definitions(pairs: list[list[str]]) -> str:
    return "\n".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in pairs)


def _table(table: Mapping[str, Any]) -> str:
    """A table of results; it is there without any script."""
    caption = f"<caption>{escape(table['setting'])}</caption>" if table["setting"] else ""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("method", "model", *table["columns"]))
    rows = []
    for row in table["rows"]:
        cells = "".join(
            f"<td{' class=best' if cell['best'] else ''}>{escape(cell['text'])}</td>" for cell in row["cells"]
        )
        rows.append(f'<tr><th scope="row">{escape(row["method"])}</th><td>{escape(row["model"])}</td>{cells}</tr>')
    body = "".join(rows)
    return f'<div class="scroll"><table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
