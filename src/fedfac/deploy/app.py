"""``fedfac deploy init``: a folder that ``flwr run`` takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfac import __version__
from fedfac.errors import ConfigError
from fedfac.run import atomic_write

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deploy": {"out": "run", "clients": 3, "deadline": 600.0, "minimum": 0.5, "keys": True},
    "data": {"name": "digits", "clients": 3, "test_share": 0.2},
    "model": {"name": "mlp"},
    "method": {"name": "fedfac-plus", "layers": "1", "tau": "50%"},  # it measures only what leaves anyway
    "train": {"rounds": 10, "cohort": 3, "epochs": 5, "batch_size": 32, "lr": 1e-3, "seed": 0, "evaluate_every": 1},
}


def write_app(folder: Path, tables: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Write the app; nothing that is there is overwritten. Returns the folder."""
    name = re.sub(r"\W+", "_", folder.resolve().name.lower()).strip("_")
    if not name or not name[0].isalpha():
        raise ConfigError(f"{folder} does not give the app a name: call the folder something like 'hospitals'")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: an app needs a folder of its own")
    package = folder / name
    package.mkdir(parents=True)
    files = {
        folder / "pyproject.toml": PYPROJECT.format(
            name=name.replace("_", "-"), package=name, config=config_text(tables or DEFAULTS), version=__version__
        ),
        folder / "README.md": README.format(name=name),
        folder / "LICENSE": "Say here under which terms this app may be used.\n",
        folder / ".gitignore": "keys/\nrun/\n",
        package / "__init__.py": f'"""The Flower app {name}."""\n',
        package / "server_app.py": SERVER,
        package / "client_app.py": CLIENT,
    }
    for path, text in files.items():
        atomic_write(path, text)
    return folder


def config_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The run's config as the tables of a pyproject.

    >>> print(config_text({"train": {"rounds": 3}}))
    [tool.flwr.app.config.train]
    rounds = 3
    """
    blocks = []
    for section, table in tables.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        blocks.append("\n".join([f"[tool.flwr.app.config.{section}]", *lines]))
    return "\n\n".join(blocks)


PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "Personalised federated learning with fedfac"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41", "fedfac[flower]>={version}"]

[tool.flwr.app]
publisher = "local"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["{package}/**/*.py", "LICENSE"]

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Every key can be changed with: flwr run . NAME --run-config 'train.rounds=50'
{config}
"""

SERVER = '''\
"""What runs beside the SuperLink."""

from fedfac.engine.flower.server import app

__all__ = ["app"]
'''

CLIENT = '''\
"""What runs on every SuperNode. Register a network of your own here, if you have one."""

from fedfac.engine.flower.client import app

__all__ = ["app"]
'''

README = """\
# {name}

A Flower app: personalised federated learning with fedfac. The run's settings are in `pyproject.toml`, under
`[tool.flwr.app.config]`; every node needs `pip install 'fedfac[flower]'`.

Set these wherever a SuperLink or a SuperNode runs (without the third it installs packages of its own):

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
```

## Keys, for a trial

```sh
fedfac deploy certs keys --hosts localhost,127.0.0.1 --nodes north,south,east
```

makes an authority of your own, the server's certificate, and a key for each node. In production the certificate comes
from your authority, and every node makes its key itself (`ssh-keygen -t ecdsa -b 384 -f north`) and hands over
`north.pub` only.

## The server

```sh
flower-superlink --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \\
  --enable-supernode-auth --database superlink.db --host 0.0.0.0 --port 8000
```

The run directory (`out` in `[deploy]`) is made in the folder in which the SuperLink was started.

Tell the `flwr` command where the SuperLink is, in `~/.flwr/config.toml` (give the full path of `ca.crt`):

```toml
[superlink.{name}]
address = "localhost:8000"
root-certificates = "/full/path/to/keys/ca.crt"
```

and let the nodes in, by their public keys:

```sh
flwr supernode register keys/nodes/north.pub {name}
```

## Each node

```sh
flower-supernode --superlink localhost:8000 --root-certificates keys/ca.crt \\
  --auth-supernode-private-key keys/nodes/north \\
  --node-config 'client="north" data="/data/visits.csv" folder="/var/lib/fedfac"'
```

`data` is a CSV or parquet file or a folder of images of the node's own (then `[data]` of the run names the label column
and the `classes`), or `module:function`, a function of your own that gets the node's config and returns `(x, y)`. Left
out, the node takes its part of the data set that `[data]` names: that is for trials. `folder` is where the node keeps
what is personal; back it up.

## What leaves a node

In every round in which it takes part: its number of samples, its mean loss, its trained weights of everything that is
shared, and, where the method measures, the moments of a layer; after an evaluation the counts and the mean loss of its
held-out samples. Each node's contribution arrives by itself, and whoever runs the server can look at it: sums that hide
single nodes (secure aggregation) are not there yet. With `fedfac-plus`, the method set here, all weights are shared in
training, as with FedAvg; a node makes some of them its own before it predicts, and those never leave. With `fedfac`
some rows of a layer are personal, but the moments of one node and its shared rows *give* the personal rows: a node
refuses such a run unless its owner starts it with `share-weights=true`, which means: whoever runs the server may have
this node's personal weights. `fedper` keeps the last layer on the node and measures nothing.

## Train

```sh
flwr run . {name} --stream
```

Killed or stopped, the same command goes on from the last whole round. `fedfac inspect run` shows how it went.

## Use a node's model

```sh
fedfac deploy export /var/lib/fedfac north-model
```

on the node writes its personalised model as safetensors and a config; `fedfac.load("north-model").model("north")` is
a plain `nn.Module`.
"""
