# mypy: ignore-errors
"""The job in Flower's simulation on Ray: python flower_peer.py FOLDER [--fused].

Flower's own ``FedAvg`` strategy runs; it is told which clients take part, and waits for the driver before a round. One
virtual node a client, as many actors as cores with one core each (Ray gives each of them one thread).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer import Job, Referee


class Told(FedAvg):
    """FedAvg with given cohorts, round by round as the driver says."""

    def __init__(self, job: Job, referee: Referee, told: dict[str, str | bool]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.job, self.referee, self.told = job, referee, told

    def configure_train(self, server_round, arrays, config, grid):
        self.referee.wait()
        nodes = sorted(grid.get_node_ids())
        messages = []
        for place, own in enumerate(self.job.rounds[server_round - 1]):
            settings = ConfigRecord({**self.told, "server-round": server_round, "place": place})
            content = RecordDict({"arrays": arrays, "config": settings})
            messages.append(Message(content, nodes[own["client"]], MessageType.TRAIN))
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        problems = [reply.error.reason for reply in replies if reply.has_error()]
        if problems or len(replies) != len(self.job.rounds[server_round - 1]):
            raise RuntimeError(f"round {server_round}: {len(replies)} replies, {problems}")
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.referee.done(metrics["loss"])
        return arrays, metrics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--fused", action="store_true", help="PyTorch's fused Adam instead of its default")
    arguments = parser.parse_args()
    referee = Referee()
    job = Job(arguments.folder)
    server = ServerApp()

    @server.main()
    def serve(grid, context) -> None:  # noqa: ARG001
        while len(list(grid.get_node_ids())) < job.clients:  # the nodes come up beside the server
            time.sleep(0.01)
        strategy = Told(job, referee, {"folder": str(Path(arguments.folder).resolve()), "fused": arguments.fused})
        referee.ready(job.data)
        strategy.start(grid, ArrayRecord(job.start), num_rounds=len(job.rounds))

    run_simulation(
        server, flower_client.app, job.clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )


if __name__ == "__main__":
    main()
