"""Connections to workers on other machines: addresses, the hello, keys and TLS.

No module here loads native libraries. `connect` is the engine's side; the worker's is in the room
worker.
"""

from __future__ import annotations

# How the spelling of a device on another machine begins; `address` reads the rest.
REMOTE = "rpc://"
