"""``fedfac deploy certs``: an authority, a server certificate and node keys, for a trial.

The nodes' keys are what Flower takes: ECDSA on P-384, in OpenSSH's format. The authority signs servers and nothing
else: no further authority (path length 0), and certificates that are good for a server only. Private files can be read
by their owner only, those that are there already too; otherwise what is there is left as it is.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedfac.errors import ConfigError, FedfacError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 365


def write_certs(folder: Path, *, hosts: Sequence[str], nodes: Sequence[str], days: int = DAYS) -> list[Path]:
    """Make what is missing; returns the new files."""
    if not hosts:
        raise ConfigError("the server's certificate needs the names or addresses under which nodes reach it: --hosts")
    if days < 1:
        raise ConfigError(f"--days is {days}; a certificate is good for a day at least")
    try:
        from cryptography.hazmat.primitives import serialization as s
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise FedfacError("keys need the package cryptography: pip install 'fedfac[flower]'") from error
    for name in nodes:
        if not name or Path(name).name != name or name.startswith("."):
            raise ConfigError(f"{name!r} cannot be the name of a key file")
    (folder / "nodes").mkdir(parents=True, exist_ok=True, mode=0o700)
    for found in (folder / "ca.key", folder / "server.key", *(folder / "nodes" / name for name in nodes)):
        if found.exists():
            found.chmod(0o600)
    made: list[Path] = []
    if not (folder / "ca.crt").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        made += _write_private(folder / "ca.key", _pem(key))
        made += _write(
            folder / "ca.crt", _certificate("fedfac trial authority", key, days).public_bytes(s.Encoding.PEM)
        )
    if not (folder / "server.crt").exists():
        authority = s.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        if not isinstance(authority, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / 'ca.key'} is not a key that this command made")
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = _certificate(hosts[0], key, days, hosts=hosts, authority=authority)
        made += _write_private(folder / "server.key", _pem(key))
        made += _write(folder / "server.crt", certificate.public_bytes(s.Encoding.PEM))
    for name in nodes:
        if (folder / "nodes" / name).exists():
            continue
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
        public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
        made += _write_private(folder / "nodes" / name, private)
        made += _write(folder / "nodes" / f"{name}.pub", public + b"\n")
    return made


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    *,
    hosts: Sequence[str] = (),
    authority: ec.EllipticCurvePrivateKey | None = None,
) -> x509.Certificate:
    """A certificate signed by the authority, or the authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfac trial authority")])
    signer = key if authority is None else authority
    path_length = 0 if authority is None else None
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=path_length), critical=True)
        .add_extension(_usage(signs=authority is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if authority is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(*, signs: bool) -> x509.KeyUsage:
    """An authority signs certificates, a server its handshakes (an elliptic key enciphers no other key)."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _write_private(path: Path, content: bytes) -> list[Path]:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return [path]


def _write(path: Path, content: bytes) -> list[Path]:
    path.write_bytes(content)
    return [path]
