"""What is it worth to predict in another way? One training, many predictions.

FedFac+'s switches `average`, `pull`, `prior`, `statistics` and `refresh_epochs` (head="copy") change nothing of the
training, so one run tells what all their combinations are worth, on validation and on test samples. Nothing in it is
chosen on test samples; they are printed for the record.

    python benchmarks/predictions.py --config examples/cifar10.toml --data-dir DIR --alpha 0.1 --rounds 80
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product

from fedfac import evaluate, experiment, methods
from fedfac.anatomy import Anatomy
from fedfac.commands.flags import add_experiment_flags, add_running_flags, of_one_method, read_config
from fedfac.config import Config
from fedfac.engine.lanes import LaneEngine
from fedfac.method import PERSONAL, Phase
from fedfac.methods.own_statistics import measuring
from fedfac.methods.prior import BUFFER, Counted
from fedfac.progress import RoundProgress

AVERAGES = (False, True)
PULLS = (0.0, 0.5, 1.0)
PRIORS = (0.0, 1.0)  # times pull
STATISTICS = (0.0, 0.5, 1.0)
EPOCHS = (0, 1, 3)


def main() -> None:
    """Train, then predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_experiment_flags(parser)
    add_running_flags(parser)
    arguments = parser.parse_args()
    tables = of_one_method(read_config(arguments, methods_asked="fedfac-plus"))
    config = Config.from_dict(tables)
    layers = config.method_options.get("layers", (-2,))
    method = methods.fedfac_plus(tau=0, layers=layers, head="copy", warmup=10)
    session = experiment.session(
        config,
        method=method,
        lanes=arguments.lanes,
        device=arguments.device,
        evaluate_every=config.train.rounds,
        evaluate_from=config.train.rounds,
    )
    rounds = config.train.rounds
    with session, RoundProgress("predictions", rounds, quiet=arguments.quiet) as progress:
        while not session.finished:
            progress(session.step())
        engine, plan = session.engine, session.plan
        assert isinstance(engine, LaneEngine)
        refresh = {n: (Phase(trains=PERSONAL, epochs=n),) if n else () for n in EPOCHS}  # one each: graphs are kept
        strengths = {prior * pull for prior, pull in product(PRIORS, PULLS)}
        count = {s: (Phase(trains=frozenset({BUFFER}), epochs=0, before=Counted(s)),) for s in strengths}
        measure = {s: measuring(Anatomy.of(session.template), s) for s in STATISTICS}
        for averaged, pull, prior, own, epochs in product(AVERAGES, PULLS, PRIORS, STATISTICS, EPOCHS):
            if prior and not pull:
                continue  # a copy of its own knows its client's classes
            if own and not measure[own]:
                continue  # the model has no statistics
            split = replace(session.split, copies=dict.fromkeys(session.split.copies, pull))
            engine.plan = replace(plan, refresh=(*measure[own], *count[prior * pull], *refresh[epochs]))
            server = session.shown if averaged else session.server
            scores = engine.evaluate(rounds, server, split, session.tested)
            row = {"average": averaged, "pull": pull, "prior": prior, "statistics": own, "refresh_epochs": epochs}
            for part, tested in scores.items():
                figures = evaluate.summary(tested, "")
                row |= {part: figures["accuracy"], f"{part}_worst_decile": figures["worst_decile"]}
            print(json.dumps(row) if arguments.json else _line(row), flush=True)


def _line(row: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.4f}" if value % 1 else f"{key} {value:g}" for key, value in row.items())


if __name__ == "__main__":
    main()
