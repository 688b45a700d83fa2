"""Watching a run from outside: an observer is told when a run begins, of every round, and when it ends.

TensorBoard, MLflow and Weights & Biases are three observers of a few lines; write your own the same way::

    class Printer:
        def begin(self, about): print("training", about["method"]["name"])
        def round(self, record): print(record["round"], scalars(record)["test/accuracy"])
        def end(self, finished): print("done" if finished else "stopped")

    fedfac.fit(model, federation, observers=[Printer()])

What an observer is told is what the run directory records: counts, losses and figures over clients. No weight, no
sample and no client's name is in it, except the names of clients that were left out of a round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedfac.errors import ConfigError
from fedfac.records import Record


class Observer(Protocol):
    """Something that follows a run."""

    def begin(self, about: Mapping[str, Any]) -> None:
        """The run starts or goes on; ``about`` is what was asked for (the ``settings`` of config.json)."""

    def round(self, record: Record) -> None:
        """A round is whole; ``record`` is its line in metrics.jsonl, with ``seconds`` and ``timing``."""

    def end(self, finished: bool) -> None:
        """The run is over: all rounds are done, or it was stopped or failed."""


def scalars(record: Record) -> dict[str, float]:
    """All single numbers of a record by path; flags count as 0 and 1.

    >>> scalars({"round": 3, "train_loss": 0.5, "test": {"accuracy": 0.9, "model": "personal"}, "cohort": [1, 2]})
    {'train_loss': 0.5, 'test/accuracy': 0.9}
    """
    return dict(_flat("", {key: value for key, value in record.items() if key != "round"}))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flat(path, value)
        elif isinstance(value, bool | int | float):
            yield path, float(value)


@contextmanager
def told(
    observers: Sequence[Observer], about: Mapping[str, Any], finished: Callable[[], bool]
) -> Iterator[Callable[[Record], None]]:
    """Begin all observers, give what tells them of a round, and end those that began, whatever happens.

    An observer that cannot begin stops the run before its first round. One that fails later is left out from then on,
    with a warning: a tracking server that is down for a minute must not cost a night of training.
    """
    following: list[Observer] = []

    def each(call: Callable[[Observer], None]) -> None:
        for observer in list(following):
            try:
                call(observer)
            except Exception as error:
                following.remove(observer)
                name = type(observer).__name__
                warnings.warn(f"{name} failed and follows the run no longer: {error}", RuntimeWarning, stacklevel=2)

    try:
        for observer in observers:
            try:
                observer.begin(about)
            except Exception as error:
                raise ConfigError(f"{type(observer).__name__} cannot follow the run: {error}") from error
            following.append(observer)
        yield lambda record: each(lambda observer: observer.round(record))
    finally:
        each(lambda observer: observer.end(finished()))


class TensorBoard:
    """Event files for ``tensorboard --logdir FOLDER``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._module = _needed("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def begin(self, about: Mapping[str, Any]) -> None:
        """Open a new event file beside those that are there; curves go on where they ended."""
        self._writer = self._module.SummaryWriter(str(self.folder))
        self._writer.add_text("settings", "\n".join(f"- {key}: {value}" for key, value in flat_text(about).items()))

    def round(self, record: Record) -> None:
        """Every number of the record."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["round"])

    def end(self, finished: bool) -> None:
        """Write out what is left."""
        self._writer.close()


class MLflow:
    """A run of MLflow's, where ``MLFLOW_TRACKING_URI`` says, in the experiment ``fedfac`` unless another is set."""

    def __init__(self, name: str, *, experiment: str = "fedfac") -> None:
        self.name, self.experiment = name, experiment
        self._mlflow = _needed("mlflow", "mlflow")
        self._client: Any = None
        self._run = ""

    def begin(self, about: Mapping[str, Any]) -> None:
        """A new run with the settings as its parameters."""
        self._client = self._mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(number, run_name=self.name).info.run_id
        for key, value in flat_text(about).items():
            self._client.log_param(self._run, key, value[:500])

    def round(self, record: Record) -> None:
        """Every number of the record, in one request."""
        from mlflow.entities import Metric

        step, now = record["round"], self._mlflow.utils.time.get_current_time_millis()
        metrics = [Metric(name, value, now, step) for name, value in scalars(record).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, finished: bool) -> None:
        """FINISHED, or KILLED."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


class WandB:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` keeps it on this machine."""

    def __init__(self, name: str, *, project: str = "fedfac", folder: str | Path | None = None) -> None:
        self.name, self.project = name, project
        self.folder = None if folder is None else str(folder)
        self._wandb = _needed("wandb", "wandb")
        self._run: Any = None

    def begin(self, about: Mapping[str, Any]) -> None:
        """A new run with the settings as its config."""
        self._run = self._wandb.init(
            project=self.project, name=self.name, dir=self.folder, config=dict(about), settings={"console": "off"}
        )

    def round(self, record: Record) -> None:
        """Every number of the record."""
        self._run.log(scalars(record), step=record["round"])

    def end(self, finished: bool) -> None:
        """Exit code 0, or 1."""
        self._run.finish(exit_code=0 if finished else 1)


def flat_text(about: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as one level of text.

    >>> flat_text({"seed": 0, "method": {"name": "fedfac", "layers": [3]}})
    {'seed': '0', 'method.name': 'fedfac', 'method.layers': '[3]'}
    """
    flat: dict[str, str] = {}
    for key, value in about.items():
        if isinstance(value, Mapping):
            flat |= flat_text(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _needed(module: str, extra: str) -> Any:
    """A module of an extra, or how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{extra} is not installed ({error}): pip install 'fedfac[{extra}]'") from error
