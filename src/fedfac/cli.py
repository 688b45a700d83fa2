"""The command line. Only the command that is called is imported, so ``fedfac --help`` is immediate."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fedfac import __version__
from fedfac.disk import refused
from fedfac.errors import FedfacError, did_you_mean

COMMANDS = {
    "demo": "train FedAvg, local-only, FedPer, FedFac and FedFac+ on the embedded digits, and compare them",
    "run": "train one method",
    "compare": "train several methods on the same clients, from the same start",
    "tune": "choose the layers to split, tau and kappa, on validation data",
    "resume": "go on with a run, a comparison or a search that was stopped or killed",
    "newcomers": "serve the clients that were kept out of training, by each method's own rule",
    "data": "look at the data of an experiment: who has how many samples of which classes",
    "bench": "time it against a plain loop and against the limit, as ratios in one run",
    "deploy": "train over a real network with Flower: set it up, try it here, use a node's model",
    "study": "run one of the paper's studies again: tables, figures and a page that says what came out",
    "inspect": "show a run: how layers were split, how that changed, who does well and who badly",
    "report": "write one HTML page for a run or a comparison: curves, clients, the split round by round",
    "export": "write a client's model as safetensors, torch.export or ONNX",
    "doctor": "say what is installed, what is missing, and what to do about it",
}


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest flag or choice when it does not know one."""

    def error(self, message: str) -> NoReturn:
        """Say what was wrong, and what may have been meant."""
        words = message.split()
        unknown = next((w for w in words if w.startswith("--")), None)
        if message.startswith("unrecognized arguments") and unknown is not None:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            message = f"there is no flag {unknown.partition('=')[0]}. {did_you_mean(unknown, flags)}"
        print(f"error: {message}\nSee '{self.prog} --help'.", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"fedfac {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}. {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"fedfac.commands.{name}")
    parser = Parser(prog=f"fedfac {name}", description=command.__doc__, allow_abbrev=False)
    command.add_arguments(parser)
    try:
        return int(command.run(parser.parse_args(arguments[1:])))
    except FedfacError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped at once; whole rounds are saved", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:  # of a file that a flag names
        print(f"error: {refused(Path(error.filename or '.'), error)}", file=sys.stderr)
        return 1


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fedfac COMMAND [flags]",
            "",
            "Personalised federated learning by factor analysis.",
            "",
            "commands:",
            *lines,
            "",
            "'fedfac COMMAND --help' lists a command's flags.",
        ]
    )
