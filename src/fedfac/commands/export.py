"""Write a client's model as a file for other programs; it is read back and checked to predict the same.

safetensors: the tensors, for your own nn.Module. torch-export: a .pt2 program for torch.export.load. onnx: for ONNX
Runtime and others, any batch size (needs fedfac[export]).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedfac import experiment
from fedfac.commands.flags import add_trust_flag
from fedfac.commands.show import wide_console
from fedfac.export import SUFFIXES, export
from fedfac.words import file_stem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac export``."""
    parser.add_argument("dir", metavar="DIR", help="the run directory")
    parser.add_argument("--client", required=True, help="whose model: its name, or its number from 0")
    parser.add_argument("--format", default="safetensors", choices=list(SUFFIXES), help="default: safetensors")
    parser.add_argument("--out", metavar="FILE", help="default: client-NAME with the format's suffix, in DIR")
    add_trust_flag(parser)
    parser.add_argument("--json", action="store_true", help="print where it is as JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say where it is."""
    result = experiment.load(arguments.dir, trust_code=arguments.trust_code)
    asked: str = arguments.client
    client = int(asked) if asked.isascii() and asked.isdigit() and asked not in result.names else asked
    file = f"client-{file_stem(asked)}{SUFFIXES[arguments.format]}"
    out = Path(arguments.out) if arguments.out else Path(arguments.dir) / file
    path = export(result, client, out, format=arguments.format)
    if arguments.json:
        print(json.dumps({"path": str(path), "format": arguments.format, "client": asked}))
    else:
        said = f"in {path}; read back and checked to predict the same"
        wide_console().print(said, highlight=False, markup=False, soft_wrap=True)
    return 0
