"""Data files: where they are, how they get here, and what was decoded from them.

A data set is a few files. :func:`find` looks for them in a folder, and otherwise has ``huggingface_hub``
(extra ``fedfac[hub]``) download them at a pinned commit. :func:`cached` keeps what was decoded from them as
one safetensors file, which later processes map into memory instead of decoding again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedfac.errors import DataError

log = logging.getLogger(__name__)

DATA = "FEDFAC_DATA"  # environment variable: where data sets lie
CACHE = "FEDFAC_CACHE"  # environment variable: where decoded data goes if it cannot lie next to the data
CACHE_VERSION = 1  # raise it when decoding changes: older cache files are then left alone


@dataclass(frozen=True)
class Source:
    """The files of one data set: on the hub, and in a folder."""

    name: str  # also the name of its folder inside a data folder
    repo: str | None  # data set id on the hub; None where there is none to download from
    revision: str | None  # the commit; None is the default branch
    files: tuple[str, ...]  # paths inside the hub repository
    patterns: tuple[str, ...]  # the same files in a folder; every pattern must match
    alternatives: tuple[tuple[str, ...], ...] = ()  # other sets of files that hold the same data, such as archives


def find(source: Source, data_dir: Path | None = None) -> list[Path]:
    """The files of ``source``, in the order of its patterns.

    Looks in ``data_dir/<name>``, then in ``data_dir`` (default: the environment variable FEDFAC_DATA), and
    downloads only if no ``data_dir`` was given.
    """
    named = data_dir if data_dir is not None else os.environ.get(DATA) or None
    looked = [] if named is None else _folders(source, Path(named).expanduser())
    for folder in looked:
        found = _match(source, folder)
        if found:
            return found
    if data_dir is not None or source.repo is None:
        raise DataError(_missing(source, looked))
    return _download(source, source.repo, looked)


def _folders(source: Source, root: Path) -> list[Path]:
    names = dict.fromkeys([source.name, source.name.replace("-", "_")])
    return [*(root / name for name in names), root]


def _match(source: Source, folder: Path) -> list[Path]:
    for names in (source.files, source.patterns, *source.alternatives):
        found = [sorted(folder.glob(name)) for name in names]
        if names and all(found):
            for files in found:
                _check_parts(files)
            return [file for files in found for file in files]
    return []


def _check_parts(files: Sequence[Path]) -> None:
    """A data set in parts (``train-00000-of-00002.parquet``, ...) is read whole or not at all."""
    numbered = [m for f in files if (m := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\..*)", f.name))]
    for of in {m[4] for m in numbered}:
        here = {int(m[2]): m for m in numbered if m[4] == of}
        absent = sorted(set(range(int(of))) - here.keys())
        if absent:
            m = next(iter(here.values()))
            names = [f"{m[1]}{i:0{len(m[2])}}{m[3]}{of}{m[5]}" for i in absent]
            raise DataError(f"{files[0].parent} has only {len(here)} of {int(of)} parts: {', '.join(names)} missing")
    if numbered and (len({m[4] for m in numbered}) > 1 or len(numbered) < len(files)):
        names = [f.name for f in files]
        raise DataError(f"{files[0].parent} has more than one set of parts: {', '.join(names)}; leave one of them")


def _download(source: Source, repo: str, looked: Sequence[Path]) -> list[Path]:
    """Every file through the hub's own client, which caches, resumes and shows its progress; checked by its hash."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise DataError(_missing(source, looked, "the package huggingface_hub is not installed")) from error
    revision, found = source.revision, []
    for name in source.files:
        which = {"repo_type": "dataset", "revision": revision}
        here = isinstance(hub.try_to_load_from_cache(repo, name, **which), str)
        try:
            path = Path(hub.hf_hub_download(repo, name, **which))
        except Exception as error:  # the client has dozens, of several libraries
            reason = f"downloading {name} failed ({type(error).__name__}: {error})"
            raise DataError(_missing(source, looked, reason)) from error
        if not here:  # once, when it has come: a hundred megabytes are not read again for every run
            _check_hash(path, repo)
        revision = revision or _commit(path)  # the default branch may move between two files
        found.append(path)
    log.info("%s: %s at commit %s", source.name, repo, revision or "unknown")
    return found


def _check_hash(path: Path, repo: str) -> None:
    """The hub's client checks sizes only. It names what it keeps by its SHA-256, if the hub has told it that.

    What is damaged is deleted, so that the next download begins anew.
    """
    kept = path.resolve()
    if len(kept.name) != 64 or set(kept.name) - set("0123456789abcdef"):  # small files go by git's own hash
        return
    with kept.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != kept.name:
        for file_here in (path, kept):
            file_here.unlink(missing_ok=True)
        raise DataError(
            f"{path.name} of {repo} came damaged: its SHA-256 is {found}, the hub says {kept.name}. "
            "It was deleted: run the command again"
        )


def _commit(path: Path) -> str | None:
    """The commit that a file in the hub's cache belongs to: ``.../snapshots/<commit>/<file>``."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None


def _missing(source: Source, looked: Sequence[Path], reason: str = "") -> str:
    wanted = ", or ".join(" and ".join(names) for names in (source.patterns, *source.alternatives))
    where = f"looked in {', '.join(str(f) for f in looked)}" if looked else "no folder was named to look in"
    text = f"{source.name} needs {wanted}; {where}{'; ' + reason if reason else ''}. "
    text += f"Put the files into a folder and name it: --data-dir FOLDER, or {DATA}=FOLDER"
    if source.repo is None:
        return text + "."
    return (
        f"{text}. Or, on a machine with network: pip install 'fedfac[hub]' and name no folder; "
        f"then {' and '.join(source.files)} of {source.repo} will be downloaded."
    )


def cached(files: Sequence[Path], kind: str, build: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What ``build`` makes of ``files``, made once and then mapped from a file.

    The file lies in ``.fedfac-cache/`` next to the data, or under FEDFAC_CACHE or ``~/.cache/fedfac`` if that
    cannot be written. It is found again as long as names, sizes and times of ``files`` are the same; one that
    is damaged is made again. Of several processes at once, one builds and the others wait.
    """
    name = f"{kind}-{_key(files, kind)}.safetensors"
    folders = _cache_folders(files)
    for folder in folders:
        kept = _load(folder / name)
        if kept is not None:
            return kept
    for folder in folders:
        if _usable(folder):
            return _build(folder / name, build)
    log.warning("%s is not cached: %s cannot be written; name a folder with %s", kind, _listed(folders), CACHE)
    return dict(build())


def _key(files: Sequence[Path], kind: str) -> str:
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = json.dumps([CACHE_VERSION, kind, stats])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _cache_folders(files: Sequence[Path]) -> list[Path]:
    """Next to the data; not among links, which is how the hub's cache looks: that is another program's store."""
    beside = [] if any(file.is_symlink() for file in files) else [files[0].parent / ".fedfac-cache"]
    if named := os.environ.get(CACHE):
        return [*beside, Path(named).expanduser()]
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return beside
    return [*beside, home / "fedfac"]


def _usable(folder: Path) -> bool:
    """Whether the folder is there, or can be made, and may be written to."""
    try:
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        if not nearest.stat().st_mode & 0o222:  # read-only on purpose, also for a root user who could
            return False
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _build(path: Path, build: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a file system without locks
        log.warning("%s is not cached: %s", path.name, error)
        return dict(build())
    try:
        kept = _load(path)  # another process may have made it while this one waited
        if kept is None:
            built = dict(build())
            if not _save(built, path):
                return built
            del built  # the mapped file takes its place
            kept = _load(path)
    finally:
        lock.release()
    if kept is None:
        raise DataError(f"{path} was written and cannot be read back: check the disk, or name another with {CACHE}")
    return kept


def _save(tensors: dict[str, Tensor], path: Path) -> bool:
    """Write under another name, then rename, so that a reader sees all of the file or none of it."""
    part = path.with_suffix(".part")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, part, metadata={"checksums": json.dumps(sums)})
        part.chmod(path.parent.stat().st_mode & 0o666)  # whoever may read the folder may read the file
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:  # a full disk, most likely
        log.warning("%s is not cached: %s", path.name, error)
        part.unlink(missing_ok=True)
        return False
    return True


def _load(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a cache file, mapped into memory; None where there is none that is whole."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            sums = json.loads((file.metadata() or {})["checksums"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if {name: _checksum(tensor) for name, tensor in tensors.items()} != sums:
            raise ValueError("its checksums are wrong")
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        log.warning("%s cannot be used and is made again: %s", path, error)
        return None
    return tensors


def _checksum(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return zlib.crc32(memoryview(tensor.flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _listed(folders: Sequence[Path]) -> str:
    return " and ".join(str(folder) for folder in folders) or "no folder"
