"""Write one self-contained HTML page for runs and comparisons: open it in any browser, send it to anybody.

It shows what was run, curves, clients, how layers were split round by round, who has which data, time and bytes.
"""

from __future__ import annotations

import argparse
import json

from fedfac import report
from fedfac.commands.show import wide_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac report``."""
    parser.add_argument("dirs", metavar="DIR", nargs="+", help="run directories, folders of comparisons, or both")
    parser.add_argument("--out", metavar="FILE", help="where the page goes (default: report.html in the first DIR)")
    parser.add_argument("--json", action="store_true", help="print where it is, and its size, as JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    path = report.write(arguments.dirs, arguments.out)
    size = path.stat().st_size
    if arguments.json:
        print(json.dumps({"path": str(path), "bytes": size}))
    else:
        wide_console().print(f"in {path} ({size / 1e6:.1f} MB)", highlight=False, markup=False, soft_wrap=True)
    return 0
