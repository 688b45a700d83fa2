"""Train over a real network with Flower: set an app up, make keys for a trial, try it all here, use a node's model.

Needs pip install 'fedfac[flower]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

from rich.console import Console

from fedfac.errors import ConfigError, FedfacError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac deploy``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    init = actions.add_parser("init", help="write a Flower app folder", description="Write a Flower app folder.")
    init.add_argument("dir", metavar="DIR", help="a new folder; its name becomes the app's")
    certs = actions.add_parser(
        "certs",
        help="make an authority, a server certificate and node keys, for a trial",
        description="Make an authority, a server certificate and node keys, for a trial; what is there stays.",
    )
    certs.add_argument("dir", metavar="DIR", help="where the keys go")
    certs.add_argument("--hosts", default="localhost,127.0.0.1", help="names and addresses of the server")
    certs.add_argument("--nodes", default="", help="names of the nodes that get a key, for example north,south")
    certs.add_argument("--days", type=int, default=365, help="how long the certificates are good for (default: 365)")
    attempt = actions.add_parser(
        "try",
        help="a SuperLink and nodes on this machine, TLS and keys included: train on them and show the result",
        description="A SuperLink and SuperNodes on this machine, TLS and keys included: train on them.",
    )
    attempt.add_argument("--nodes", type=int, default=3, help="how many nodes (default: 3)")
    attempt.add_argument("--rounds", type=int, default=3, help="how many rounds (default: 3)")
    attempt.add_argument("--method", default="fedfac-plus", help="which method (default: fedfac-plus)")
    attempt.add_argument(
        "--share-weights", action="store_true", help="nodes agree to be measured: fedfac needs it (see docs)"
    )
    attempt.add_argument("--dir", metavar="DIR", help="a new folder for everything (default: a temporary one, kept)")
    attempt.add_argument("--quiet", action="store_true", help="no progress")
    export = actions.add_parser(
        "export",
        help="on a node: its personalised model as safetensors and a config",
        description="On a node: its personalised model as safetensors and a config, to be read with fedfac.load.",
    )
    export.add_argument("folder", metavar="FOLDER", help="the node's folder, as its --node-config names it")
    export.add_argument("out", metavar="OUT", help="a new folder for the model")
    export.add_argument("--run", help="which run (default: the newest)")
    export.add_argument("--client", help="which client, if the folder has several")
    for each in (init, certs, attempt, export):
        each.add_argument("--json", action="store_true", help="print the result as JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked."""
    actions = {"init": _init, "certs": _certs, "try": _try, "export": _export}
    return actions[arguments.action](arguments)


def _init(arguments: argparse.Namespace) -> int:
    from fedfac.deploy.app import write_app

    folder = write_app(Path(arguments.dir))
    _say(arguments, {"app": str(folder)}, f"{folder} is a Flower app; {folder / 'README.md'} has the commands")
    return 0


def _certs(arguments: argparse.Namespace) -> int:
    from fedfac.deploy.certs import write_certs

    folder = Path(arguments.dir)
    texts = (arguments.hosts, arguments.nodes)
    hosts, nodes = ([name.strip() for name in text.split(",") if name.strip()] for text in texts)
    made = [str(path) for path in write_certs(folder, hosts=hosts, nodes=nodes, days=arguments.days)]
    _say(arguments, {"made": made}, "\n".join(made) if made else f"everything is already in {folder}")
    return 0


def _try(arguments: argparse.Namespace) -> int:
    from fedfac import methods
    from fedfac.commands import inspect
    from fedfac.deploy.trial import attempt
    from fedfac.run import RunDirectory

    if importlib.util.find_spec("flwr") is None:
        raise FedfacError("a trial needs Flower: pip install 'fedfac[flower]'")
    methods.options_of(arguments.method)  # an unknown one fails now
    folder = Path(arguments.dir or tempfile.mkdtemp(prefix="fedfac-trial-"))
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: a trial needs a folder of its own")
    folder.mkdir(parents=True, exist_ok=True)
    came = attempt(
        folder,
        nodes=arguments.nodes,
        rounds=arguments.rounds,
        method=arguments.method,
        shares_weights=arguments.share_weights,
        quiet=arguments.quiet,
    )
    facts = inspect.gather(RunDirectory.read(came["run"]))
    if arguments.json:
        print(json.dumps({**came, "result": facts}))
    else:
        inspect.show(facts, top=5)
        Console(highlight=False).print(f"\neverything is in {folder}: logs, keys, the app, the run", soft_wrap=True)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from fedfac.deploy.export import export

    out = Path(arguments.out)
    config = export(Path(arguments.folder), out, run=arguments.run, client=arguments.client)
    name = config["client"]
    trust = ", trust_code=True" if ":" in config["model"]["name"] else ""  # a network of the app's own
    text = f"the model of client {name!r} after round {config['round']}: "
    text += f"fedfac.load({str(out)!r}{trust}).model({name!r})"
    _say(arguments, {"out": str(out), "client": name, "round": config["round"]}, text)
    return 0


def _say(arguments: argparse.Namespace, facts: dict[str, object], text: str) -> None:
    print(json.dumps(facts) if arguments.json else text)
