# mypy: ignore-errors
"""The job in pfl (apple/pfl-research): python pfl_peer.py FOLDER [--processes N] [--fused].

pfl's own loop runs (``FederatedAveraging.run`` on a ``SimulatedBackend``); a callback holds it between two rounds.
With several processes these are pfl's workers, told of each other as its documentation says (``PFL_WORKER_ADDRESSES``
and ``PFL_WORKER_RANK``), each with one thread; the clients' sizes are given to it, so that it balances them between
the workers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys

import torch
import torch.nn.functional as F
from peer import CNN, Job, Referee


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--fused", action="store_true", help="PyTorch's fused Adam instead of its default")
    arguments = parser.parse_args()
    first = "PFL_WORKER_RANK" not in os.environ
    workers = _start_workers(arguments.processes) if first else []
    torch.set_num_threads(1)  # the fastest for one process as well: the tensors are small
    try:
        run(Job(arguments.folder), arguments.processes, Referee() if first else None, fused=arguments.fused)
    except BaseException:
        for worker in workers:
            worker.send_signal(signal.SIGINT)  # it would wait for us; with this it ends its own processes, too
        raise
    for worker in workers:
        worker.wait()


def _start_workers(processes: int) -> list[subprocess.Popen[bytes]]:
    """Make this process the first of several, and start the others."""
    if processes == 1:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"127.0.0.1:{port + i}" for i in range(processes))
    others = [dict(os.environ, PFL_WORKER_RANK=str(rank)) for rank in range(1, processes)]
    os.environ["PFL_WORKER_RANK"] = "0"
    return [subprocess.Popen([sys.executable, *sys.argv], env=own, stdin=subprocess.DEVNULL) for own in others]


def run(job: Job, processes: int, referee: Referee | None, *, fused: bool) -> None:
    # pfl joins its workers when it is imported: not before the environment says who they are
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, StringMetricName, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.postprocessor.base import Postprocessor

    loss_name = StringMetricName("training loss")

    class Net(CNN):
        """What pfl trains: a module with a loss. It adds up the losses of a client's steps."""

        total = 0.0

        def loss(self, inputs, targets):
            loss = F.cross_entropy(self(inputs), targets)
            self.total += loss.detach() * len(targets)
            return loss

        def metrics(self, *data):
            """pfl cannot leave out the evaluation of its first round; it costs nothing here."""
            return {"nothing": Weighted(0, 1)}

    class Client(Dataset):
        """A client whose batches are given."""

        def __init__(self, visit):
            super().__init__(raw_data=())
            self.visit = visit

        def __len__(self):
            return self.visit.samples

        def iter(self, batch_size):
            return iter(self.visit)

    class TrainingLoss(Postprocessor):
        """The mean loss of the steps, as a metric that pfl sums over clients and workers."""

        def postprocess_one_user(self, *, stats, user_context):
            total, net.total = float(net.total), 0.0
            metrics = Metrics()
            metrics[loss_name] = Weighted(total, user_context.num_datapoints)
            return stats, metrics

    class OnGo(TrainingProcessCallback):
        """Holds all workers until the driver wants a round."""

        def on_train_begin(self, *, model):
            if referee is not None:
                referee.ready(job.data)
            self._hold()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if referee is not None:
                referee.done(aggregate_metrics[loss_name].overall_value)
            if central_iteration + 1 < len(job.rounds):
                self._hold()
            return False, Metrics()

        def _hold(self):
            if referee is not None:
                referee.wait()
            if processes > 1:
                torch.distributed.barrier()

    net = Net(job.dropout)
    net.load_state_dict(job.start)
    net.train()
    model = PyTorchModel(
        net,
        local_optimizer_create=functools.partial(torch.optim.Adam, fused=True) if fused else torch.optim.Adam,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),  # the update is the mean itself
    )
    places = [(number, place) for number, cohort in enumerate(job.rounds) for place in range(len(cohort))]
    clients = FederatedDataset(
        make_dataset_fn=lambda where: Client(job.visit(*where)),
        user_sampler=functools.partial(next, itertools.cycle(places)),  # in a cycle: pfl draws ahead
        user_id_to_weight={(number, place): job.rounds[number][place]["samples"] for number, place in places},
    )
    algorithm = FederatedAveraging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=len(job.rounds),
            evaluation_frequency=len(job.rounds) + 1,
            train_cohort_size=len(job.rounds[0]),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(clients, clients, postprocessors=[WeightByDatapoints(), TrainingLoss()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,  # the given batches are those of all epochs
            local_learning_rate=job.lr,
            local_batch_size=job.batch_size,
        ),
        callbacks=[OnGo()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
