"""A SuperLink and SuperNodes on this machine, as the stock commands: for trials and for the tests of the network.

Every process is started here and ended here, by its number. TLS and node authentication are on.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from fedfac.errors import FedfacError, RunError

CONNECTION = "trial"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
HOST = "127.0.0.1"


class Network:
    """One SuperLink, some SuperNodes, and runs of apps on them; everything in one folder."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys, self.port = folder.resolve(), keys.resolve(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._before: Any = None
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(home)}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        (home / "config.toml").write_text(
            f"[superlink]\ndefault = {json.dumps(CONNECTION)}\n[superlink.{CONNECTION}]\n"
            f'address = "{HOST}:{self.port}"\nroot-certificates = {json.dumps(str(self.keys / "ca.crt"))}\n'
        )

    def __enter__(self) -> Network:
        if threading.current_thread() is threading.main_thread():  # a kill of this process must not leave the others

            def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
                raise SystemExit(128 + number)

            self._before = signal.signal(signal.SIGTERM, leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.end(name)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def start_link(self, name: str = "superlink") -> None:
        """The SuperLink, with TLS, node authentication and a database that outlives it."""
        keys = self.keys
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt")]
        command += ["--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]
        self._start(name, [*command, "--database", str(self.folder / "superlink.db")])
        self.wait(lambda: _listens(self.port), f"{name} does not listen on port {self.port}", name)

    def register(self, key: Path) -> int:
        """Let a node in by its public key; returns its number."""
        done = self.flwr("supernode", "register", str(key), CONNECTION, "--format", "json")
        try:
            return int(json.loads(done)["node-id"])
        except (ValueError, KeyError) as error:
            raise RunError(f"the SuperLink did not register {key}: {done.strip()}") from error

    def start_node(self, name: str, key: Path | None, config: Mapping[str, Any]) -> None:
        """A SuperNode; without a key it does not prove who it is."""
        port = self._ports.setdefault(name, free_port())
        values = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        command = ["flower-supernode", "--superlink", f"{HOST}:{self.port}", "--root-certificates"]
        command += [str(self.keys / "ca.crt"), "--host", HOST, "--port", str(port), "--node-config", values]
        self._start(name, command + ([] if key is None else ["--auth-supernode-private-key", str(key)]))

    def start_run(self, app: Path, config: Mapping[str, Any], name: str = "run") -> None:
        """``flwr run``, which shows the server's log until the run has ended."""
        changes = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        more = ["--run-config", changes] if changes else []
        self._start(name, ["flwr", "run", str(app.resolve()), CONNECTION, "--stream", *more])

    def flwr(self, *arguments: str) -> str:
        """A ``flwr`` command that ends by itself: what it prints."""
        try:
            done = subprocess.run(
                ["flwr", *arguments], env=self.environment, capture_output=True, text=True, timeout=120, check=False
            )
        except FileNotFoundError as error:
            raise _no_flower() from error
        if done.returncode:
            raise RunError(f"flwr {shlex.join(arguments)} failed: {done.stdout.strip()} {done.stderr.strip()}")
        return done.stdout

    def log(self, name: str) -> str:
        """What a process has written so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, happened: Callable[[], bool], otherwise: str, *names: str, seconds: float = 60) -> None:
        """Wait until something has happened; fail if one of the processes ends first, or after so many seconds."""
        end = time.monotonic() + seconds
        while not happened():
            dead = [name for name in names if self.processes[name].poll() is not None]
            if dead or time.monotonic() > end:
                tail = "\n".join(self.log(name)[-2000:] for name in names)
                raise RunError(f"{otherwise} ({f'{dead[0]} has ended' if dead else f'after {seconds:g} s'}):\n{tail}")
            time.sleep(0.1)

    def end(self, name: str, *, kill: bool = False) -> None:
        """End a process: ask, then kill; with ``kill``, kill -9 it and all that it has started, at once."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        family = [process.pid, *descendants(process.pid)]
        if not kill:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                kill = True
        for pid in family if kill else family[1:]:
            _kill(pid)
        process.wait()
        end = time.monotonic() + 10
        while any(is_running(pid) for pid in family) and time.monotonic() < end:
            time.sleep(0.02)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            try:
                self.processes[name] = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches us alone, and we end the others in good order
                )
            except FileNotFoundError as error:
                raise _no_flower() from error


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def is_running(pid: int) -> bool:
    """Whether a process is there and not only its exit status (Linux)."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All processes that one has started, and those that they have started (Linux; elsewhere they end by themselves).

    They are in sessions of their own, so a process group does not reach them.
    """
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        own = parents.get(todo.pop(), [])
        found += own
        todo += own
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _no_flower() -> FedfacError:
    return FedfacError("Flower's commands are not installed here: pip install 'fedfac[flower]'")
