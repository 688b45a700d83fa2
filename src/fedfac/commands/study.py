"""Run one of the paper's studies again: its tables, its figures, and a page that says what came out.

The full setting takes minutes; --quick takes less than a minute and shows the same figures, smaller.
"""

from __future__ import annotations

import argparse
import json

from rich.markdown import Markdown

from fedfac.commands.flags import add_running_flags, free_folder
from fedfac.commands.show import wide_console
from fedfac.studies import STUDIES
from fedfac.studies.frame import PAGE, Ask
from fedfac.studies.frame import run as run_study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac study``."""
    about = "; ".join(f"{name}: {known.about}" for name, known in STUDIES.items())
    parser.add_argument("name", metavar="NAME", help=about)
    parser.add_argument("--quick", action="store_true", help="a small setting, less than a minute")
    parser.add_argument("--out", metavar="DIR", help="the study is written into DIR/NAME (default: runs/study-N)")
    parser.add_argument("--seed", type=int, default=0, help="everything random is a function of it (default: 0)")
    parser.add_argument("--seeds", type=int, metavar="N", help="average over N seeds, from --seed on")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the data files, for studies of real data")
    add_running_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compute, write, and show the page."""
    ask = Ask(
        quick=arguments.quick,
        seed=arguments.seed,
        seeds=arguments.seeds,
        data_dir=arguments.data_dir,
        lanes=arguments.lanes,
        device=arguments.device,
        quiet=arguments.quiet,
    )
    finding, folder = run_study(arguments.name, ask, arguments.out or free_folder("study"))
    if arguments.json:
        files = sorted(path.name for path in folder.iterdir())
        print(json.dumps({"study": arguments.name, "path": str(folder), "files": files, **finding.summary}))
        return 0
    console = wide_console()
    console.print(Markdown((folder / PAGE).read_text(encoding="utf-8")))
    console.print(f"in {folder}", highlight=False, markup=False, soft_wrap=True)
    return 0
