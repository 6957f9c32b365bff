"""Mutual TLS: each side has a folder with ca.pem, cert.pem and key.pem (keys.py makes them)."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..errors import ConfigError

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"


def tls_context(folder: Path, is_server: bool) -> ssl.SSLContext:
    """Return a context for one side: TLS 1.3, and the other side must show a certificate too.

    Certificates name a role, worker or client, and no host: who has a worker's key is a worker.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / CA)
        context.load_cert_chain(folder / CERT, folder / KEY)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{folder}: {CA}, {CERT} and {KEY} cannot be used: {error.strerror or error}; make "
            "keys with `moegraph worker --new-keys`"
        ) from None
    if is_server:
        context.num_tickets = 0  # each client proves itself again
    return context
