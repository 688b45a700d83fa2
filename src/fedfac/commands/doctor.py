"""Say what is installed and which device is used, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from fedfac import __version__
from fedfac.commands.show import wide_console

CORE = ("torch", "numpy", "safetensors", "msgspec", "pyarrow", "pillow", "scipy", "scikit-learn", "filelock", "rich")
# By extra: what it is for, and its packages. A test holds this against pyproject.toml; installed metadata would be out
# of date in a clone that was pulled without installing it again.
EXTRAS = {
    "hub": ("downloads of the public data sets", ("huggingface_hub",)),
    "flower": ("training over a real network", ("flwr", "cryptography")),
    "studies": ("the paper's studies and their figures", ("matplotlib",)),
    "tune": ("fedfac tune", ("optuna",)),
    "tensorboard": ("fedfac run --tensorboard", ("tensorboard",)),
    "mlflow": ("fedfac run --mlflow", ("mlflow-skinny", "sqlalchemy", "alembic")),
    "wandb": ("fedfac run --wandb", ("wandb",)),
    "export": ("fedfac export --format onnx", ("onnx", "onnxscript", "onnxruntime")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac doctor``."""
    parser.add_argument("--json", action="store_true", help="everything as JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Look around and say it; the status is 1 if training is not possible."""
    facts = gather()
    if arguments.json:
        print(json.dumps(facts))
    else:
        show(facts)
    return 1 if any(entry["version"] is None for entry in facts["packages"]) else 0


def gather() -> dict[str, Any]:
    """Versions, device, extras, and advice."""
    packages = [{"name": name, "version": version_of(name)} for name in CORE]
    extras = {extra: _extra(purpose, wanted) for extra, (purpose, wanted) in EXTRAS.items()}
    facts: dict[str, Any] = {
        "fedfac": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "folder": str(Path(__file__).resolve().parents[1]),
        "packages": packages,
        "device": _device() if version_of("torch") else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "data_dir": os.environ.get("FEDFAC_DATA"),
        "extras": extras,
    }
    return facts | {"advice": _advice(facts)}


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _extra(purpose: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    found = {package: version_of(package) for package in wanted}
    missing = [package for package, version in found.items() if version is None]
    return {"for": purpose, "packages": found, "missing": missing}


def _device() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"used": "cpu", "name": platform.processor() or platform.machine(), "memory_gb": None}
    memory = torch.cuda.get_device_properties(0).total_memory
    return {"used": "cuda", "name": torch.cuda.get_device_name(0), "memory_gb": round(memory / 1e9, 1)}


def _advice(facts: dict[str, Any]) -> list[str]:
    advice = []
    broken = [entry["name"] for entry in facts["packages"] if entry["version"] is None]
    if broken:
        advice.append(f"training needs {', '.join(broken)}: pip install {' '.join(broken)}")
    if facts["device"] and facts["device"]["used"] == "cpu":
        advice.append("no GPU is seen by PyTorch: small networks do well on cores, ResNet-18 and VGG-16 do not")
    folder = facts["data_dir"]
    if folder is None:
        advice.append("FEDFAC_DATA is not set: public data sets come from --data-dir, or are downloaded (extra 'hub')")
    elif not Path(folder).is_dir():
        advice.append(f"FEDFAC_DATA is {folder}, which is no folder: correct it or unset it")
    for extra, entry in facts["extras"].items():
        if entry["missing"]:
            advice.append(f"for {entry['for']}: pip install 'fedfac[{extra}]' (missing: {', '.join(entry['missing'])})")
    return advice


def show(facts: dict[str, Any]) -> None:
    """Print it for people."""
    console = wide_console()
    device = facts["device"]
    said = f"fedfac {facts['fedfac']}, Python {facts['python']}, {facts['platform']}\nin {facts['folder']}"
    if device:
        memory = f", {device['memory_gb']} GB" if device["memory_gb"] else ""
        said += f"\ntrains on {device['used']} ({device['name']}{memory}), {facts['cores']} cores"
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    table = Table(header_style="bold")
    for column in ("extra", "for", "packages", ""):
        table.add_column(column)
    core = {entry["name"]: entry["version"] for entry in facts["packages"]}
    table.add_row("(always)", "training", _versions(core), "there" if all(core.values()) else "missing")
    for extra, entry in facts["extras"].items():
        table.add_row(extra, entry["for"], _versions(entry["packages"]), "missing" if entry["missing"] else "there")
    console.print(table, markup=False)
    for line in facts["advice"]:
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)


def _versions(found: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or '-'}" for name, version in found.items())
