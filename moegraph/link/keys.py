"""New keys for a worker and its clients, made with the package cryptography (extra `remote`)."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError
from .tls import CA, CERT, KEY

DAYS = 825
WORKER, CLIENT = "worker", "client"
_ROLES = {WORKER: ExtendedKeyUsageOID.SERVER_AUTH, CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH}


def new_keys(folder: Path) -> dict[str, Path]:
    """Make a folder with folders `worker` and `client`; return them by role.

    An authority is made for these two alone, and its key is thrown away: nothing else can ever get
    a certificate that they accept.
    """
    authority = ec.generate_private_key(ec.SECP256R1())
    root = _certificate("moegraph worker keys", authority, None, authority, None)
    try:
        folder.mkdir(mode=0o700, parents=True)
        for role, purpose in _ROLES.items():
            key = ec.generate_private_key(ec.SECP256R1())
            own = _certificate(f"moegraph {role}", key, root, authority, purpose)
            _write(folder / role, root, own, key)
    except OSError as error:
        raise ConfigError(f"--new-keys {folder}: {error.strerror}") from None
    return {role: folder / role for role in _ROLES}


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, root: x509.Certificate | None,
    authority: ec.EllipticCurvePrivateKey, purpose: x509.ObjectIdentifier | None,
) -> x509.Certificate:  # fmt: skip
    """Return a certificate for `key`: of the authority itself without root, else for a purpose."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_key, now = authority.public_key(), datetime.now(timezone.utc)
    ki, ai = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(root.subject if root else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=root is None, path_length=None), critical=True)
        .add_extension(ki.from_public_key(key.public_key()), critical=False)
        .add_extension(ai.from_issuer_public_key(issuer_key), critical=False)
        .add_extension(_usage(is_root=root is None), critical=True)
    )
    if purpose:
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
    return builder.sign(authority, hashes.SHA256())


def _usage(is_root: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_root, key_cert_sign=is_root, crl_sign=False,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write(
    folder: Path, root: x509.Certificate, own: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    pem = serialization.Encoding.PEM
    folder.mkdir(mode=0o700)
    (folder / CA).write_bytes(root.public_bytes(pem))
    (folder / CERT).write_bytes(own.public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    fd = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(secret)
