"""What runs came to, in a file; and in words, what two files differ in.

A file is a pair: NAME.json has the digests and the records themselves, NAME.safetensors all tensors, so that a
difference can be told by case, round, key and size. Nothing here knows fedfac.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
LINES = 5  # that are shown of one case
Record = dict[str, Any]


class GoldenError(Exception):
    """A record that cannot be written, read or compared."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. Tensors are named part/.../name; parts are server, personal, predictions and others."""

    records: list[Record]
    added: frozenset[str]  # keys of records that are not compared
    tensors: Mapping[str, Tensor]

    def digests(self) -> dict[str, Any]:
        """One digest for every record, and one for every part of the tensors."""
        parts: dict[str, Any] = {}
        for name in sorted(self.tensors):
            parts.setdefault(name.partition("/")[0], hashlib.sha256()).update(_bytes(name, self.tensors[name]))
        return {"records": [_sha(_canonical(r)) for r in self.records]} | {p: d.hexdigest() for p, d in parts.items()}


Outcomes = Mapping[str, Outcome]


def machine() -> dict[str, str]:
    """What numbers may depend on beside the code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def write(path: Path, outcomes: Outcomes) -> None:
    """The pair of files; the JSON file comes last, so that it is never there without its tensors."""
    tensors = {
        f"{case}\t{name}": tensor.detach().contiguous().clone()
        for case, outcome in outcomes.items()
        for name, tensor in outcome.tensors.items()
    }
    cases = {
        case: {"digests": outcome.digests(), "added": sorted(outcome.added), "records": outcome.records}
        for case, outcome in outcomes.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, whole = _beside(path), f".{os.getpid()}.tmp"
    save_file(tensors, f"{beside}{whole}")
    Path(f"{beside}{whole}").replace(beside)
    text = json.dumps({"format": FORMAT, "machine": machine(), "cases": cases})
    Path(f"{path}{whole}").write_text(text + "\n")
    Path(f"{path}{whole}").replace(path)


def read(path: Path) -> dict[str, Outcome]:
    """A recorded pair, of this machine; a pair that does not belong together is refused."""
    found = json.loads(path.read_text())
    if found["format"] != FORMAT:
        raise GoldenError(f"{path} has format {found['format']}, this version reads {FORMAT}: record it again")
    here = machine()
    if found["machine"] != here:
        raise GoldenError(
            f"{path} was recorded on {found['machine']}, this is {here}: numbers differ between machines, so record "
            "the baseline on this one"
        )
    tensors: dict[str, dict[str, Tensor]] = {case: {} for case in found["cases"]}
    for name, tensor in load_file(_beside(path)).items():
        case, _, own = name.partition("\t")
        tensors[case][own] = tensor
    outcomes = {
        case: Outcome(records=known["records"], added=frozenset(known["added"]), tensors=tensors[case])
        for case, known in found["cases"].items()
    }
    for case, outcome in outcomes.items():
        if outcome.digests() != found["cases"][case]["digests"]:
            raise GoldenError(f"{path}: the values of {case!r} are not those of its digests; record it again")
    return outcomes


def differences(old: Outcome, new: Outcome) -> list[str]:
    """In words, all that is not equal bit by bit; keys of records that are new do not count."""
    found = [
        line
        for number, (was, now) in enumerate(zip_longest(old.records, new.records))
        for line in _of_records(number, was, now)
    ]
    for name in sorted(old.tensors.keys() | new.tensors.keys()):
        was, now = old.tensors.get(name), new.tensors.get(name)
        if was is None or now is None:
            found.append(f"{name} is {'new' if was is None else 'missing'}")
        elif _bytes(name, was) != _bytes(name, now):
            found.append(f"{name}: {_of_tensors(was, now)}")
    return found


def shown(case: str, lines: list[str]) -> str:
    """The first differences of a case."""
    more = [f"and {len(lines) - LINES} more"] if len(lines) > LINES else []
    return "\n    ".join([case, *lines[:LINES], *more])


def _of_records(number: int, was: Record | None, now: Record | None) -> Iterator[str]:
    if was is None or now is None:
        yield f"record {number} is {'new' if was is None else 'missing'}"
        return
    where = " ".join(str(was[key]) for key in ("run",) if key in was)
    where = f"{where} round {was['round']}".strip() if "round" in was else f"record {number}"
    for key in [*was, *(key for key in now if key not in was)]:
        if key not in now:
            yield f"{where}: {key} is missing"
        elif key not in was:
            yield f"{where}: {key} is new"
        elif _canonical(was[key]) != _canonical(now[key]):
            yield f"{where}: {key} was {was[key]!r}, is {now[key]!r}"


def _of_tensors(was: Tensor, now: Tensor) -> str:
    if (was.dtype, was.shape) != (now.dtype, now.shape):
        return f"was {was.dtype} {tuple(was.shape)}, is {now.dtype} {tuple(now.shape)}"
    apart = (was.double() - now.double()).abs()
    changed = was.ne(now)
    if not changed.any():
        return "equal numbers, other bits (signs of zeros or NaNs)"
    return f"{int(changed.sum())} of {was.numel()} numbers differ, by {float(apart[changed].max()):.3g} at most"


def _bytes(name: str, tensor: Tensor) -> bytes:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + raw


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _beside(path: Path) -> Path:
    return path.with_suffix(".safetensors")
