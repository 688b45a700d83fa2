"""What should a client make its own before it predicts, for how long, and how fast? One training, many refreshes.

What a refresh trains, its epochs and its learning rate change nothing of the training, so one run tells what they are
worth, on validation and on test samples. Nothing in it is chosen on test samples; they are printed for the record.

    python benchmarks/predictions.py --config examples/cifar10.toml --data-dir DIR --alpha 0.1 --method fedfac-plus
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fedfac import evaluate, experiment
from fedfac.anatomy import Anatomy
from fedfac.commands.flags import add_experiment_flags, add_running_flags, of_one_method, read_config
from fedfac.config import Config
from fedfac.engine.lanes import LaneEngine
from fedfac.method import PERSONAL, Phase
from fedfac.progress import RoundProgress

LAST = (1, 2, 3, 5)  # so many last layers, the head among them
EPOCHS = (1, 3, 10)
RATES = (1.0, 0.3, 0.1)  # times the run's learning rate


def main() -> None:
    """Train, then predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_experiment_flags(parser)
    add_running_flags(parser)
    parser.add_argument("--method", default="fedfac-plus", help="the method that trains (default: %(default)s)")
    arguments = parser.parse_args()
    config = Config.from_dict(of_one_method(read_config(arguments, methods_asked=arguments.method)))
    rounds = config.train.rounds
    session = experiment.session(
        config, lanes=arguments.lanes, device=arguments.device, evaluate_every=rounds, evaluate_from=rounds
    )
    with session, RoundProgress("predictions", rounds, quiet=arguments.quiet) as progress:
        while not session.finished:
            progress(session.step())
        engine, plan = session.engine, session.plan
        assert isinstance(engine, LaneEngine)
        prepares = tuple(phase for phase in plan.refresh if phase.epochs == 0)
        for row, trains in ways(session.template):
            engine.plan = replace(plan, refresh=(*prepares, *trains))
            server = session.shown if row["averaged"] else session.server
            scores = engine.evaluate(rounds, server, session.split, session.tested)
            for part, tested in scores.items():
                figures = evaluate.summary(tested, "")
                row |= {part: figures["accuracy"], f"{part} worst decile": figures["worst_decile"]}
            print(json.dumps(row) if arguments.json else _line(row), flush=True)


def ways(model: nn.Module) -> Iterator[tuple[dict[str, Any], tuple[Phase, ...]]]:
    """What is tried: nothing at first, then everything with every number of epochs and every rate."""
    anatomy, weights = Anatomy.of(model), frozenset(name for name, _ in model.named_parameters())
    phases = {"personal": Phase(trains=PERSONAL)}
    phases |= {f"last {n}": Phase(trains=anatomy.last(n) & weights) for n in LAST if n < len(anatomy.numbered)}
    phases["all"] = Phase()
    for averaged in (False, True):
        yield {"refresh": "nothing", "epochs": 0, "rate": 1.0, "averaged": averaged}, ()
    for what, phase in phases.items():
        for epochs in EPOCHS:
            for rate in RATES:
                row = {"refresh": what, "epochs": epochs, "rate": rate, "averaged": True}
                yield row, (replace(phase, epochs=epochs, gentle=rate),)


def _line(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


if __name__ == "__main__":
    main()
