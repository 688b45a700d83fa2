"""Downloads by the hub's real client, from a hub on loopback."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedfac.seeds import stream

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install 'fedfac[hub]'")

COMMIT = "c0" * 20
FILES = {"train.parquet": stream(0, "hub").bytes(25_000_000), "test.parquet": b"small"}
ASK = f"""
from fedfac.data.files import Source, find
names, patterns = ("train.parquet", "test.parquet"), ("train*.parquet", "test*.parquet")
for path in find(Source("some", "owner/some", "{COMMIT}", names, patterns)):
    print(path)
"""


class Hub:
    """What the client asks of a hub: the hash and the commit of a file, and its bytes from some place on."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        self.sends = dict(FILES)  # may differ from what it says that it sends
        self.breaks_after: int | None = None  # bytes
        self.has_it = True


@contextmanager
def hub() -> Iterator[tuple[Hub, str]]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            name, begins = self.path.rsplit("/", 1)[-1], self.headers.get("Range")
            if not state.has_it or f"/datasets/owner/some/resolve/{COMMIT}/" not in self.path or name not in FILES:
                self.send_error(404)
                return
            state.asked.append((self.command, name, begins))
            start = int(begins.removeprefix("bytes=").partition("-")[0]) if begins else 0
            whole, said = state.sends[name], hashlib.sha256(FILES[name]).hexdigest()
            self.send_response(206 if begins else 200)
            if begins:
                self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
            for key, value in {
                "ETag": f'"{said}"',
                "X-Repo-Commit": COMMIT,
                "Content-Length": len(whole) - start,
            }.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(whole[start:][: state.breaks_after])
                self.close_connection = state.breaks_after is not None

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(address: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "FEDFAC_DATA" and "proxy" not in k.lower()}
    env |= {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=120)


def test_files_come_once_with_their_commit_and_then_from_the_cache(tmp_path: Path) -> None:
    with hub() as (state, address):
        first = ask(address, tmp_path)
        assert first.returncode == 0, first.stderr
        assert [name for command, name, _ in state.asked if command == "GET"] == ["train.parquet", "test.parquet"]
    again = ask(address, tmp_path)  # the hub is gone
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    for line, (name, content) in zip(first.stdout.split(), FILES.items(), strict=True):
        assert Path(line).name == name
        assert COMMIT in Path(line).parts
        assert Path(line).read_bytes() == content


def test_what_is_not_what_the_hub_says_is_refused(tmp_path: Path) -> None:
    """One bit is wrong; the length, which is all that the client looks at, is right."""
    with hub() as (state, address):
        damaged = bytearray(FILES["train.parquet"])
        damaged[1_000_000] ^= 1
        state.sends["train.parquet"] = bytes(damaged)
        failed = ask(address, tmp_path)
        assert failed.returncode != 0
        said = hashlib.sha256(FILES["train.parquet"]).hexdigest()
        assert "train.parquet of owner/some came damaged: its SHA-256 is" in failed.stderr
        assert f"the hub says {said}. It was deleted: run the command again" in failed.stderr
        assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 1_000_000]
        assert ask(address, tmp_path).returncode != 0  # damaged again: nothing of the first time was believed
        state.sends = dict(FILES)
        mended = ask(address, tmp_path)
        assert mended.returncode == 0, mended.stderr
        assert Path(mended.stdout.split()[0]).read_bytes() == FILES["train.parquet"]


def test_a_download_that_breaks_off_is_gone_on_with(tmp_path: Path) -> None:
    """By the same process; what a killed one has is thrown away. The client counts in pieces of 10 MB."""
    with hub() as (state, address):
        state.breaks_after = 12_000_000
        found = ask(address, tmp_path)
        assert found.returncode == 0, found.stderr
        begins = [start for command, name, start in state.asked if (command, name) == ("GET", "train.parquet")]
        assert begins[0] is None
        assert len(begins) > 1
        assert all(start is not None and int(start.removeprefix("bytes=").rstrip("-")) > 0 for start in begins[1:])
        assert Path(found.stdout.split()[0]).read_bytes() == FILES["train.parquet"]


def test_a_hub_that_does_not_have_it_leads_to_the_two_ways(tmp_path: Path) -> None:
    with hub() as (state, address):
        state.has_it = False
        failed = ask(address, tmp_path)
    assert failed.returncode != 0
    assert "downloading train.parquet failed" in failed.stderr
    assert "--data-dir FOLDER" in failed.stderr
    assert "pip install 'fedfac[hub]'" in failed.stderr
