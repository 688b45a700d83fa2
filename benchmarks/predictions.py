"""What should a client make its own before it predicts, for how long, and how fast? One training, many refreshes.

What a refresh trains, its epochs and its learning rate change nothing of the training, so one run tells what they are
worth, on validation and on test samples. Nothing in it is chosen on test samples; they are printed for the record. The
run is one of ``fedfac run`` or of a comparison; if it has rounds to go, they come first.

    fedfac run --config examples/cifar10.toml --data-dir DIR --alpha 0.1 --method fedfac-plus --out runs/plus
    python benchmarks/predictions.py runs/plus
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fedfac import evaluate, experiment
from fedfac.anatomy import Anatomy
from fedfac.commands.flags import add_running_flags
from fedfac.engine.lanes import LaneEngine
from fedfac.errors import ConfigError, FedfacError
from fedfac.method import PERSONAL, Phase
from fedfac.progress import RoundProgress

WHAT = "personal,last-1,last-2,last-3,last-5,all"  # last-3: the last three layers, the head among them
AT = "1:1,1:.3,1:.1,3:1,3:.3,3:.1,10:1,10:.3,10:.1"  # epochs, and a share of the run's learning rate


def main() -> None:
    """Finish the run, then predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--what", default=WHAT, help="what is refreshed (default: %(default)s)")
    parser.add_argument("--at", default=AT, help="epochs:rate, the rate as a share of the run's (default: %(default)s)")
    add_running_flags(parser)
    arguments = parser.parse_args()
    config = experiment.config_of(arguments.run)
    session = experiment.session(config, out=arguments.run, resume=True, lanes=arguments.lanes, device=arguments.device)
    with session, RoundProgress("predictions", config.train.rounds, quiet=arguments.quiet) as progress:
        while not session.finished:
            progress(session.step())
        engine, plan = session.engine, session.plan
        assert isinstance(engine, LaneEngine)
        prepares = tuple(phase for phase in plan.prediction.refresh if phase.epochs == 0)
        for row, trains in ways(session.template, arguments.what.split(","), arguments.at.split(",")):
            engine.plan = replace(plan, prediction=replace(plan.prediction, refresh=(*prepares, *trains)))
            server = session.shown if row["averaged"] else session.server
            scores = engine.evaluate(config.train.rounds, server, session.split, session.tested)
            for part, tested in scores.items():
                figures = evaluate.summary(tested, "")
                row |= {part: figures["accuracy"], f"{part} worst decile": figures["worst_decile"]}
            print(json.dumps(row) if arguments.json else _line(row), flush=True)


def ways(
    model: nn.Module, what: Sequence[str], at: Sequence[str]
) -> Iterator[tuple[dict[str, Any], tuple[Phase, ...]]]:
    """What is tried: nothing at first, then everything with every number of epochs and its rate."""
    phases = {name: _phase(name, model) for name in what}
    for averaged in (False, True):
        yield {"refresh": "nothing", "epochs": 0, "rate": 1.0, "averaged": averaged}, ()
    for name, phase in phases.items():
        for pair in at:
            epochs, _, share = pair.partition(":")
            tried = replace(phase, epochs=int(epochs), lr_scale=float(share or 1))
            yield {"refresh": name, "epochs": tried.epochs, "rate": tried.lr_scale, "averaged": True}, (tried,)


def _phase(name: str, model: nn.Module) -> Phase:
    if name in ("personal", "all"):
        return Phase(trains=PERSONAL if name == "personal" else None)
    kind, _, number = name.partition("-")
    if kind != "last" or not number.isdigit():
        raise ConfigError(f"{name!r} cannot be refreshed; allowed: personal, all, or last-N for the last N layers")
    weights = frozenset(parameter for parameter, _ in model.named_parameters())
    return Phase(trains=Anatomy.of(model).last(int(number)) & weights)


def _line(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


if __name__ == "__main__":
    try:
        main()
    except FedfacError as error:
        raise SystemExit(f"error: {error}") from None
