"""fedfac deploy: the app folder, keys, what a run's and a node's config say, and a node's own data."""

from __future__ import annotations

import contextlib
import json
import ssl
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from flwr.common.config import flatten_dict, validate_config
from helpers import message
from PIL import Image

from fedfac import models
from fedfac.cli import main
from fedfac.config import DataConfig
from fedfac.data import partition
from fedfac.data.pool import ClientData
from fedfac.data.tables import csv_or_parquet
from fedfac.deploy.app import write_app
from fedfac.deploy.certs import write_certs
from fedfac.deploy.processes import Network
from fedfac.deploy.trial import attempt
from fedfac.engine.flower import data as node_data
from fedfac.engine.flower.grid import from_content, roster_of, to_content
from fedfac.engine.flower.node import Node
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import Hello, Packet, ReplyError, Request
from fedfac.errors import ConfigError, DataError, FedfacError, RunError


def test_the_app_is_one_that_flower_takes_and_that_says_what_the_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "My Hospitals"
    assert main(["deploy", "init", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"app": str(folder)}
    config = tomllib.loads((folder / "pyproject.toml").read_text())
    valid, errors, warnings = validate_config(config, check_module=True, project_dir=folder)
    assert (valid, errors, warnings) == (True, [], [])
    run = Deployment.read(flatten_dict(config["tool"]["flwr"]["app"]["config"]))
    assert run.config.method_name == "fedfac-plus"
    assert run.config.method_options == {"layers": [1], "tau": "50%"}
    assert (run.deploy.clients, run.config.train.rounds, run.deploy.out) == (3, 10, "run")
    assert "flwr run . my_hospitals --stream" in (folder / "README.md").read_text()
    assert "is not empty: an app needs a folder of its own" in message(ConfigError, lambda: write_app(folder))
    assert "does not give the app a name" in message(ConfigError, lambda: write_app(tmp_path / "12"))


def test_keys_are_what_flower_takes_private_and_left_alone(tmp_path: Path) -> None:
    hosts = ["fl.example.org", "127.0.0.1"]
    made = write_certs(tmp_path, hosts=hosts, nodes=["north"])
    assert {str(p.relative_to(tmp_path)) for p in made} == {
        *("ca.crt", "ca.key", "server.crt", "server.key", "nodes/north", "nodes/north.pub")
    }
    for private in ("ca.key", "server.key", "nodes/north"):
        assert stat.S_IMODE((tmp_path / private).stat().st_mode) == 0o600
    ca, server = (x509.load_pem_x509_certificate((tmp_path / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    key = serialization.load_ssh_private_key((tmp_path / "nodes" / "north").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    before = {p: p.read_bytes() for p in made}
    again = write_certs(tmp_path, hosts=hosts, nodes=["north", "south"])
    assert sorted(p.name for p in again) == ["south", "south.pub"]
    assert {p: p.read_bytes() for p in made} == before
    assert message(ConfigError, lambda: write_certs(tmp_path, hosts=hosts, nodes=["../x"])) == (
        "'../x' cannot be the name of a key file"
    )
    assert "--hosts" in message(ConfigError, lambda: write_certs(tmp_path, hosts=[], nodes=[]))
    assert "a day at least" in message(ConfigError, lambda: write_certs(tmp_path, hosts=hosts, nodes=[], days=0))


def test_certs_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "certs", str(tmp_path / "keys"), "--nodes", "a, b", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["made"]
    assert len(made) == 8
    assert main(["deploy", "certs", str(tmp_path / "keys"), "--nodes", "a,b"]) == 0
    assert "everything is already in" in capsys.readouterr().out
    assert main(["deploy", "try", "--nodes", "0", "--dir", str(tmp_path / "trial")]) == 1
    assert "at least one of each is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({"rounds": 3}, "rounds in the run's config is in no table; write it as train.rounds, for example"),
        ({"train.round": 3}, "unknown key 'round' in [train]. Did you mean 'rounds'?"),
        ({"deploy.minimal": 3}, "unknown key 'minimal' in [deploy]. Did you mean 'minimum'?"),
        ({"deploy.minimum": 0.0}, "minimum in [deploy] is 0.0; it is a share, above 0 and at most 1"),
        ({"deploy.deadline": -1}, "deadline in [deploy] is -1.0; it is a positive number of seconds"),
        ({"deploy.clients": 0}, "clients in [deploy] is 0; a run needs at least one node"),
        ({"method.name": "fedfca"}, "there is no method 'fedfca'. Did you mean 'fedfac' or"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(flat: dict[str, Any], text: str) -> None:
    assert message(ConfigError, lambda: Deployment.read(flat)).startswith(text)


def test_a_nodes_name_is_its_own_or_its_number() -> None:
    assert NodeConfig.read({"client": "north", "partition-id": 3}, 77).name == "north"
    assert NodeConfig.read({"partition-id": 3}, 77).name == "3"
    assert NodeConfig.read({}, 77).name == "77"


def csv(path: Path, labels: str, columns: str = "a,b,ill") -> Path:
    rows = [f"{i * 0.37:.3f},{(-1) ** i * i},{label}" for i, label in enumerate(labels.split())]
    path.write_text("\n".join([columns, *rows]) + "\n")
    return path


def node(path: Path | str, name: str = "north") -> NodeConfig:
    return NodeConfig.read({"client": name, "data": str(path)}, 0)


def test_a_file_of_its_own_is_the_clients_with_the_classes_that_the_run_names(tmp_path: Path) -> None:
    path = csv(tmp_path / "visits.csv", "yes yes maybe yes maybe yes yes maybe yes yes")
    run = Deployment.read(
        {"data.label": "ill", "data.classes": "no,maybe,yes", "data.validation_share": 0.25, "train.seed": 5}
    )
    data, classes = node_data.load(run, node(path), client=3)
    assert classes == 3
    _, targets = data.pool.batch(torch.arange(10))
    assert targets.tolist() == [2, 2, 1, 2, 1, 2, 2, 1, 2, 2]
    rest, test = partition.hold_out(torch.arange(10).numpy(), 0.2, seed=5, client=3, purpose="test")
    train, held = partition.hold_out(rest, 0.25, seed=5, client=3, purpose="validation")
    assert [data.train.tolist(), data.test.tolist(), data.validation.tolist()] == [
        train.tolist(),
        test.tolist(),
        held.tolist(),
    ]
    bare = Deployment.read({"data.label": "ill"})
    assert message(ConfigError, lambda: node_data.load(bare, node(path), client=0)) == (
        "a node sees its own labels only, so the run must say which classes there are: in [data], "
        "classes = 'maybe,yes' (all of them, in one order for all nodes)"
    )
    narrow = Deployment.read({"data.label": "ill", "data.classes": "no,yes"})
    text = message(DataError, lambda: node_data.load(narrow, node(path), client=0))
    assert text.endswith("label 'ill' has the class 'maybe'. Known: no, yes.")


def test_a_folder_of_images_of_its_own_may_lack_a_class(tmp_path: Path) -> None:
    for name in ("ill", "well"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (4, 4), 40 * number).save(tmp_path / "scans" / name / f"{number}.png")
    run = Deployment.read({"data.classes": "dead,ill,well", "data.test_share": 0.0})
    data, classes = node_data.load(run, node(tmp_path / "scans"), client=0)
    assert (data.size, classes) == (6, 3)
    assert data.pool.batch(torch.arange(6))[1].tolist() == [1, 1, 1, 2, 2, 2]
    bare = Deployment.read({})
    assert "classes = 'ill,well'" in message(
        ConfigError, lambda: node_data.load(bare, node(tmp_path / "scans"), client=0)
    )


def test_real_targets_need_no_classes(tmp_path: Path) -> None:
    path = csv(tmp_path / "dose.csv", "0.5 1.5 2.5 3.5 4.5")
    _, classes = node_data.load(Deployment.read({"data.label": "ill"}), node(path), client=0)
    assert classes is None


def test_a_node_takes_its_part_of_a_file_with_clients_or_of_a_named_data_set(tmp_path: Path) -> None:
    path = csv(tmp_path / "all.csv", "0 1 0 1 0 1 0 1", columns="who,b,ill")
    path.write_text(path.read_text().replace("\n0.", "\n9."))
    table = path.read_text().splitlines()
    rows = [row.split(",", 1)[1] for row in table[1:]]
    path.write_text("\n".join(["who,b,ill", *(f"{'north' if i < 5 else 'south'},{r}" for i, r in enumerate(rows))]))
    run = Deployment.read({"data.label": "ill", "data.client": "who", "data.test_share": 0.0, "data.classes": "2"})
    north, _ = node_data.load(run, node(path, "north"), client=0)
    south, _ = node_data.load(run, node(path, "south"), client=1)
    assert (north.size, south.size) == (5, 3)
    text = message(DataError, lambda: node_data.load(run, node(path, "nord"), client=1))
    assert text == "this node is 'nord', but the data has no such client. Did you mean 'north'?"
    digits = Deployment.read({"data.name": "digits", "data.clients": 4, "data.partition": "iid"})
    data, classes = node_data.load(digits, NodeConfig.read({"partition-id": 2}, 0), client=2)
    assert isinstance(data, ClientData)
    assert classes == 10


def two_arrays(config: dict[str, Any]) -> Any:
    """A user's own data function."""
    x = torch.arange(20.0).reshape(10, 2) + float(config["shift"])
    return {"two": (x, torch.arange(10) % 2), "three": (x, x, x), "list": [x]}[config["kind"]]


def test_a_function_of_the_users_gets_the_nodes_config(tmp_path: Path) -> None:
    def load(kind: str) -> tuple[ClientData, int | None]:
        values = {"client": "n", "data": "test_deploy:two_arrays", "shift": 5, "kind": kind}
        return node_data.load(Deployment.read({}), NodeConfig.read(values, 0), client=0)

    data, classes = load("two")
    assert (data.size, len(data.test), classes) == (8, 2, 2)
    assert float(data.pool.batch(torch.tensor([0]))[0][0, 0]) == 5.0
    assert "gave 3 arrays; allowed: (x, y)" in message(DataError, lambda: load("three"))
    assert "gave a list; allowed: (x, y)" in message(DataError, lambda: load("list"))


def network(*, shape: tuple[int, ...], classes: int, width: int = 3) -> torch.nn.Module:
    """A user's own network."""
    return torch.nn.Sequential(torch.nn.Linear(shape[0], width), torch.nn.ReLU(), torch.nn.Linear(width, classes))


def test_a_network_by_its_dotted_name() -> None:
    run = Deployment.read({"model.name": "test_deploy:network", "model.width": 7, "method.name": "fedavg"})
    model = run.model((4,), 2)
    assert [tuple(p.shape) for p in model.parameters()] == [(7, 4), (7,), (2, 7), (2,)]
    text = message(ConfigError, lambda: models.build("test_deploy:netwrk", shape=(4,), classes=2, seed=0))
    assert text.startswith("'test_deploy:netwrk' cannot be imported")
    assert "not a function" in message(ConfigError, lambda: models.imported("test_deploy:__name__"))


def test_names_in_order_and_nodes_that_do_not_fit_together() -> None:
    def nodes(**shapes: Any) -> dict[str, Hello]:
        return {name.lstrip("_"): Hello(name, value[0], value[1], 5) for name, value in shapes.items()}

    assert roster_of(nodes(_10=((3,), 2), _2=((3,), 4), b=((3,), 2))) == (["2", "10", "b"], (3,), 4)
    assert roster_of(nodes(a=((3,), None))) == (["a"], (3,), None)
    text = message(RunError, lambda: roster_of(nodes(a=((3,), 2), b=((4,), 2))))
    assert text.startswith("the nodes have samples of different shapes: {'a': (3,), 'b': (4,)}")
    text = message(RunError, lambda: roster_of(nodes(a=((3,), None), b=((3,), 2))))
    assert text == "some nodes have classes and some have real targets: {'a': None, 'b': 2}"


def test_flowers_records_carry_a_packet_and_nothing_else_is_taken_for_one() -> None:
    packet = Packet({"a": 1}, {"t": torch.arange(3.0)})
    came = from_content(to_content(packet))
    assert came.values == {"a": 1}
    assert torch.equal(came.tensors["t"], packet.tensors["t"])
    content = to_content(packet)
    del content["tensors"]
    assert message(ReplyError, lambda: from_content(content)) == "it is not a fedfac message"


def test_classes_of_a_file_can_be_more_than_occur_in_it(tmp_path: Path) -> None:
    path = csv(tmp_path / "some.csv", "2 0 2 0")
    samples = csv_or_parquet(path, label="ill", classes=DataConfig(classes="3").class_names)
    assert (samples.classes, samples.class_names) == (3, ("0", "1", "2"))
    assert samples.labels is not None
    assert samples.labels.tolist() == [2, 0, 2, 0]


def test_without_flower_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    assert main(["deploy", "certs", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: keys need the package cryptography: pip install 'fedfac[flower]'\n"
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["deploy", "try"]) == 1
    assert capsys.readouterr().err == "error: a trial needs Flower: pip install 'fedfac[flower]'\n"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with Network(tmp_path, tmp_path) as network:
        text = "Flower's commands are not installed here: pip install 'fedfac[flower]'"
        assert message(FedfacError, network.start_link) == text
        assert message(FedfacError, lambda: network.flwr("ls")) == text


def test_the_default_app_asks_for_nothing_that_a_node_refuses_unasked(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "hospitals")
    config = tomllib.loads((folder / "pyproject.toml").read_text())
    run = Deployment.read(flatten_dict(config["tool"]["flwr"]["app"]["config"]))
    there = Node(run, NodeConfig.read({"client": "1"}, 1)).answer(Request("hello")).values
    assert there["shape"] == [1, 8, 8]
    assert "refuses" not in there
    fedfac = Deployment.read({**run.flat, "method.name": "fedfac"})
    assert Node(fedfac, NodeConfig.read({"client": "1"}, 1)).answer(Request("hello")).values["refuses"] == "measure"
    text = (folder / "README.md").read_text()
    assert "share-weights=true" in text
    assert "Each node's contribution arrives by itself" in text


def test_a_trial_runs_in_a_folder_that_is_named_relatively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the processes is the same, wherever they run."""
    commands: list[list[str]] = []

    class ToldError(Exception):
        pass

    def start(self: Network, name: str, command: list[str]) -> None:
        commands.append(command)

    def flwr(self: Network, *arguments: str) -> str:
        commands.append(["flwr", *arguments])
        raise ToldError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Network, "_start", start)
    monkeypatch.setattr(Network, "wait", lambda *_, **__: None)
    monkeypatch.setattr(Network, "flwr", flwr)
    with pytest.raises(ToldError):
        attempt(Path("trial"), nodes=2, rounds=1, method="fedfac-plus", quiet=True)
    files = [word for command in commands for word in command if "trial/" in word]
    assert len(files) == 5
    assert all(Path(word).is_absolute() for word in files)
    assert all(Path(word).exists() for word in files if not word.endswith(".db"))


def certificates(folder: Path) -> tuple[x509.Certificate, x509.Certificate]:
    write_certs(folder, hosts=["fl.example.org", "127.0.0.1"], nodes=["north"])
    authority, server = (x509.load_pem_x509_certificate((folder / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    return authority, server


def test_certificates_say_what_they_are_for(tmp_path: Path) -> None:
    authority, server = certificates(tmp_path)
    basic = [c.extensions.get_extension_for_class(x509.BasicConstraints) for c in (authority, server)]
    assert [(b.value.ca, b.value.path_length, b.critical) for b in basic] == [(True, 0, True), (False, None, True)]
    uses = [c.extensions.get_extension_for_class(x509.KeyUsage) for c in (authority, server)]
    assert [u.critical for u in uses] == [True, True]
    names = ("digital_signature", "key_cert_sign", "crl_sign", "key_encipherment", "key_agreement", "data_encipherment")
    said = [{name for name in names if getattr(u.value, name)} for u in uses]
    assert said == [{"key_cert_sign", "crl_sign"}, {"digital_signature"}]
    extended = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(extended) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_certificates_hold_before_a_judge_who_is_strict(tmp_path: Path) -> None:
    authority, server = certificates(tmp_path)
    judge = PolicyBuilder().store(Store([authority]))
    assert len(judge.build_server_verifier(x509.DNSName("fl.example.org")).verify(server, [])) == 2
    with pytest.raises(VerificationError):
        judge.build_server_verifier(x509.DNSName("other.example.org")).verify(server, [])
    with pytest.raises(VerificationError):  # it is no client
        judge.build_client_verifier().verify(server, [])
    other, _ = certificates(tmp_path / "other")
    with pytest.raises(VerificationError):
        PolicyBuilder().store(Store([other])).build_server_verifier(x509.DNSName("fl.example.org")).verify(server, [])


def handshake(folder: Path, host: str) -> str | None:
    """A real TLS handshake, in memory; the protocol that was agreed on."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(10):
        for side in (here, there):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return here.version()


def test_certificates_carry_a_handshake(tmp_path: Path) -> None:
    certificates(tmp_path)
    assert handshake(tmp_path, "fl.example.org") == "TLSv1.3"
    assert handshake(tmp_path, "127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(tmp_path, "other.example.org")


def test_private_keys_are_private_again_after_the_next_call(tmp_path: Path) -> None:
    certificates(tmp_path)
    private = [tmp_path / name for name in ("ca.key", "server.key", "nodes/north")]
    for path in private:
        path.chmod(0o644)
    write_certs(tmp_path, hosts=["fl.example.org"], nodes=["north"])
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600] * 3
    assert stat.S_IMODE((tmp_path / "nodes").stat().st_mode) == 0o700
