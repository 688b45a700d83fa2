"""Where data files are found, and what is kept of them."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedfac.data import files
from fedfac.data.files import Source, cached, find
from fedfac.errors import DataError

TRAIN, TEST = "plain/train-00000-of-00001.parquet", "plain/test-00000-of-00001.parquet"
SOURCE = Source(
    name="some-set",
    repo="owner/some",
    revision="abc123",
    files=(TRAIN, TEST),
    patterns=("train*.parquet", "test*.parquet"),
    alternatives=(("some.tar.gz",),),
)
WAYS = "Put the files into a folder and name it: --data-dir FOLDER, or FEDFAC_DATA=FOLDER"
HUB_WAY = (
    "Or, on a machine with network: pip install 'fedfac[hub]' and name no folder; "
    f"then {TRAIN} and {TEST} of owner/some will be downloaded."
)
NEEDS = "some-set needs train*.parquet and test*.parquet, or some.tar.gz"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No folder of this machine, no network, a user cache of the test's own."""
    monkeypatch.delenv("FEDFAC_DATA", raising=False)
    monkeypatch.setenv("FEDFAC_CACHE", str(tmp_path / "user-cache"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


def put(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())
    return paths


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    empty = SimpleNamespace(hf_hub_download=download, try_to_load_from_cache=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", empty)


# Finding files.


@pytest.mark.parametrize("folder", ["some-set", "some_set", "."])
@pytest.mark.parametrize("names", [("train.parquet", "test.parquet"), (TRAIN, TEST), ("some.tar.gz",)])
def test_files_are_found_in_their_own_folder_or_in_the_data_folder(
    tmp_path: Path, folder: str, names: tuple[str, ...]
) -> None:
    paths = put(tmp_path / folder, *names)
    put(tmp_path, "validation.parquet")
    assert find(SOURCE, tmp_path) == paths


def test_the_own_folder_comes_first_and_parquet_before_archives(tmp_path: Path) -> None:
    put(tmp_path, "train.parquet", "test.parquet")
    own = put(tmp_path / "some-set", "train.parquet", "test.parquet")
    put(tmp_path / "some-set", "some.tar.gz")
    assert find(SOURCE, tmp_path) == own


def test_parts_come_in_order_training_first(tmp_path: Path) -> None:
    names = [f"{split}-{i:05}-of-{n:05}.parquet" for split, n in (("train", 11), ("test", 2)) for i in range(n)]
    put(tmp_path, *reversed(names))
    assert [path.name for path in find(SOURCE, tmp_path)] == names


def test_missing_parts_are_named(tmp_path: Path) -> None:
    put(tmp_path, "train-00000-of-00003.parquet", "train-00002-of-00003.parquet", "test.parquet")
    with pytest.raises(DataError) as caught:
        find(SOURCE, tmp_path)
    assert str(caught.value) == f"{tmp_path} has only 2 of 3 parts: train-00001-of-00003.parquet missing"


@pytest.mark.parametrize("other", ["train.parquet", "train-00000-of-00002.parquet train-00001-of-00002.parquet"])
def test_the_same_data_twice_is_refused(tmp_path: Path, other: str) -> None:
    put(tmp_path, "train-00000-of-00001.parquet", *other.split(), "test.parquet")
    with pytest.raises(DataError, match=r"has more than one set of parts: train-00000-of-00001\.parquet, train.*leave"):
        find(SOURCE, tmp_path)


def test_the_environment_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = put(tmp_path / "some-set", "train.parquet", "test.parquet")
    monkeypatch.setenv("FEDFAC_DATA", str(tmp_path))
    assert find(SOURCE) == paths
    put(tmp_path / "other", "train.parquet", "test.parquet")
    assert find(SOURCE, tmp_path / "other")[0].parent.name == "other"


def test_a_named_folder_without_the_files_is_an_error_and_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, lambda *_, **__: pytest.fail("downloaded"))
    put(tmp_path / "some-set", "train.parquet")  # half of it is not enough
    with pytest.raises(DataError) as caught:
        find(SOURCE, tmp_path)
    looked = f"{tmp_path / 'some-set'}, {tmp_path / 'some_set'}, {tmp_path}"
    assert str(caught.value) == f"{NEEDS}; looked in {looked}. {WAYS}. {HUB_WAY}"


def test_a_source_without_a_repository_asks_for_a_folder_only(tmp_path: Path) -> None:
    source = Source("own", None, None, (), ("own.csv",))
    with pytest.raises(DataError) as caught:
        find(source)
    assert str(caught.value) == f"own needs own.csv; no folder was named to look in. {WAYS}."


def test_without_the_hub_package_the_error_says_so() -> None:
    with pytest.raises(DataError) as caught:
        find(SOURCE)
    reason = "no folder was named to look in; the package huggingface_hub is not installed"
    assert str(caught.value) == f"{NEEDS}; {reason}. {WAYS}. {HUB_WAY}"


def test_without_network_the_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host")

    fake_hub(monkeypatch, download)
    monkeypatch.setenv("FEDFAC_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        find(SOURCE)
    assert f"; downloading {TRAIN} failed (ConnectionError: no route to host). {WAYS}" in str(caught.value)
    assert f"looked in {tmp_path / 'some-set'}, " in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize("revision", ["abc123", None])
def test_every_file_is_downloaded_from_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, revision: str | None
) -> None:
    calls: list[tuple[Any, ...]] = []

    def download(repo: str, name: str, *, repo_type: str, revision: str | None) -> str:
        calls.append((repo, name, repo_type, revision))
        return str(tmp_path / "snapshots" / "abc123" / name)

    fake_hub(monkeypatch, download)
    caplog.set_level(logging.INFO, "fedfac")
    monkeypatch.setenv("FEDFAC_DATA", str(tmp_path / "empty"))
    found = find(Source("some-set", "owner/some", revision, SOURCE.files, SOURCE.patterns))
    assert found == [tmp_path / "snapshots" / "abc123" / name for name in (TRAIN, TEST)]
    assert calls == [("owner/some", TRAIN, "dataset", revision), ("owner/some", TEST, "dataset", "abc123")]
    assert "some-set: owner/some at commit abc123" in caplog.text


# Keeping what was decoded.


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, Tensor]:
        self.times += 1
        return {
            "pixels": torch.arange(5000, dtype=torch.uint8).reshape(50, 100).t(),  # not contiguous
            "labels": torch.arange(7),
            "half": torch.tensor([0.5, float("nan")], dtype=torch.float16),
            "yes": torch.tensor([True, False]),
            "one": torch.tensor(3.5),
            "none": torch.empty(0, 4),
        }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[k].dtype and x.shape == b[k].shape and torch.equal(x.nan_to_num(9), b[k].nan_to_num(9))
        for k, x in a.items()
    )


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_what_is_built_is_built_once_and_mapped(tmp_path: Path) -> None:
    paths, build = put(tmp_path / "data", "a", "b"), Builder()
    first = cached(paths, "kind", build)
    assert same(first, build())
    again = cached(paths, "kind", build)
    assert build.times == 2  # one of them ours
    assert same(again, first)
    (path,) = kept(tmp_path / "data" / ".fedfac-cache")
    assert not (tmp_path / "user-cache").exists()
    assert not list(path.parent.glob("*.part"))
    if sys.platform == "linux":
        assert path.name in Path("/proc/self/maps").read_text()


def test_changes_to_a_mapped_tensor_stay_in_the_process(tmp_path: Path) -> None:
    paths, build = put(tmp_path, "a"), Builder()
    cached(paths, "kind", build)["labels"].zero_()
    assert cached(paths, "kind", build)["labels"].tolist() == list(range(7))


def test_other_files_kinds_and_versions_are_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,), build = put(tmp_path, "a"), Builder()

    def built() -> bool:
        before = build.times
        cached([path], "kind", build)
        return build.times > before

    assert built()
    assert not built()
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    assert built()
    path.write_bytes(b"longer than before")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert built()
    path = path.rename(tmp_path / "b")
    assert built()
    monkeypatch.setattr(files, "CACHE_VERSION", files.CACHE_VERSION + 1)
    assert built()
    assert not built()
    cached([path], "another", build)
    assert len(kept(tmp_path / ".fedfac-cache")) == 6


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(b"\xff" * 500)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)


def unsigned(path: Path) -> None:
    save_file({"labels": torch.arange(7)}, path)


def oddly_signed(path: Path) -> None:
    save_file({"labels": torch.arange(7)}, path, metadata={"checksums": "{"})


@pytest.mark.parametrize("damage", [empty, noise, truncate, flip, unsigned, oddly_signed])
def test_a_damaged_cache_file_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    paths, build = put(tmp_path, "a"), Builder()
    cached(paths, "kind", build)
    (path,) = kept(tmp_path / ".fedfac-cache")
    whole = path.read_bytes()
    damage(path)
    assert same(cached(paths, "kind", build), build())
    assert build.times == 3
    assert "cannot be used and is made again" in caplog.text
    assert path.read_bytes() == whole


def test_what_a_killed_process_left_behind_does_no_harm(tmp_path: Path) -> None:
    paths, build = put(tmp_path, "a"), Builder()
    cached(paths, "kind", build)
    (path,) = kept(tmp_path / ".fedfac-cache")
    path.rename(path.with_suffix(".part"))
    path.with_suffix(".part").write_bytes(b"half")
    cached(paths, "kind", build)
    assert build.times == 2
    assert [p.name for p in path.parent.iterdir() if p.suffix not in (".lock", ".safetensors")] == []


def test_a_read_only_data_folder_is_left_alone(tmp_path: Path) -> None:
    paths, build = put(tmp_path / "data", "a"), Builder()
    (tmp_path / "data").chmod(0o555)
    try:
        cached(paths, "kind", build)
        cached(paths, "kind", build)
        assert [p.name for p in (tmp_path / "data").iterdir()] == ["a"]
    finally:
        (tmp_path / "data").chmod(0o755)
    assert build.times == 1
    assert len(kept(tmp_path / "user-cache")) == 1


def test_a_cache_folder_that_cannot_be_made_is_passed_over(tmp_path: Path) -> None:
    paths, build = put(tmp_path / "data", "a", ".fedfac-cache"), Builder()  # a file is in its place
    cached(paths[:1], "kind", build)
    assert len(kept(tmp_path / "user-cache")) == 1


def test_links_belong_to_another_store(tmp_path: Path) -> None:
    (blob,) = put(tmp_path / "blobs", "a")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "a"
    link.symlink_to(blob)
    cached([link], "kind", Builder())
    assert list((tmp_path / "snapshot").iterdir()) == [link]
    assert len(kept(tmp_path / "user-cache")) == 1


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_the_users_own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("FEDFAC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    paths = put(tmp_path / "data", "a", ".fedfac-cache")
    cached(paths[:1], "kind", Builder())
    home = tmp_path / "home"
    assert len(kept(home / ".cache" / "fedfac" if variable == "HOME" else home / "fedfac")) == 1


def test_without_any_folder_nothing_is_kept_and_all_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths, build = put(tmp_path / "data", "a", ".fedfac-cache", "file"), Builder()
    monkeypatch.setenv("FEDFAC_CACHE", str(paths[2] / "below-a-file"))
    assert same(cached(paths[:1], "kind", build), build())
    assert "kind is not cached" in caplog.text
    assert "name a folder with FEDFAC_CACHE" in caplog.text


def test_a_full_disk_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    paths, build = put(tmp_path, "a"), Builder()
    assert same(cached(paths, "kind", build), build())
    assert "No space left on device" in caplog.text
    assert {p.suffix for p in (tmp_path / ".fedfac-cache").iterdir()} <= {".lock"}


def test_a_file_system_without_locks_costs_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(self: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("fedfac.data.files.FileLock.acquire", acquire)
    paths, build = put(tmp_path, "a"), Builder()
    assert same(cached(paths, "kind", build), build())


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    paths, build = put(tmp_path, "a"), Builder()

    def fail() -> dict[str, Tensor]:
        raise DataError("broken file")

    with pytest.raises(DataError, match="broken file"):
        cached(paths, "kind", fail)
    assert {p.suffix for p in (tmp_path / ".fedfac-cache").iterdir()} <= {".lock"}
    assert same(cached(paths, "kind", build), build())


def test_who_may_read_the_folder_may_read_the_file(tmp_path: Path) -> None:
    paths = put(tmp_path / "data", "a")
    (tmp_path / "data" / ".fedfac-cache").mkdir(mode=0o750)
    cached(paths, "kind", Builder())
    (path,) = kept(tmp_path / "data" / ".fedfac-cache")
    assert path.stat().st_mode & 0o777 == 0o640


PROCESS = """
import json, sys, time
from pathlib import Path
import torch
from fedfac.data.files import cached
data, log = Path(sys.argv[1]), Path(sys.argv[2])
def build():
    with log.open("a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    return {"x": torch.arange(1000)}
print("ready", flush=True)
sys.stdin.readline()
print(int(cached([data], "kind", build)["x"].sum()))
"""


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    (data,) = put(tmp_path / "data", "a")
    log = tmp_path / "log"
    arguments = [sys.executable, "-c", PROCESS, str(data), str(log)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(arguments, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [json.loads(answer) for answer in answers] == [499500, 499500]
    assert log.read_text() == "built\n"
    assert len(kept(tmp_path / "data" / ".fedfac-cache")) == 1
