"""Workers behind mutual TLS: keys, and who is kept out."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from helpers.logged_process import ROOT
from helpers.patience import PATIENCE_S, until
from helpers.workers import WorkerProcess, limit, working

from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.ggml import remote
from moegraph.ggml.device import Device
from moegraph.link.hello import question_of
from moegraph.link.tls import tls_context


def new_keys(folder: Path) -> Path:
    command = [sys.executable, "-m", "moegraph", "worker", "--new-keys", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of new keys."""
    return new_keys(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of keys that were made apart."""
    return new_keys(tmp_path_factory.mktemp("keys") / "theirs")


def test_who_has_a_key_can_make_no_certificates_and_only_play_its_role(keys: Path) -> None:
    purposes = {"worker": "serverAuth", "client": "clientAuth"}
    for role, purpose in purposes.items():
        root, own = (
            x509.load_pem_x509_certificate((keys / role / name).read_bytes())
            for name in ("ca.pem", "cert.pem")
        )
        for made, is_root in ((root, True), (own, False)):
            of = made.extensions.get_extension_for_class
            assert of(x509.BasicConstraints).value.ca == is_root
            assert of(x509.KeyUsage).value.key_cert_sign == is_root
            assert of(x509.KeyUsage).value.digital_signature != is_root
            assert of(x509.BasicConstraints).critical and of(x509.KeyUsage).critical
        found = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        assert [one._name for one in found.value] == [purpose] and found.critical
        own.verify_directly_issued_by(root)


def shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> list[ssl.SSLObject]:
    """Return both ends after a handshake in memory; errors are those of either side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server),
    ]
    for end in ends * 4:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends


def test_older_versions_and_sides_without_a_certificate_are_refused(keys: Path) -> None:
    def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return tls_context(keys / "worker", True), tls_context(keys / "client", False)

    server, client = shaken(*contexts())
    assert server.version() == client.version() == "TLSv1.3"
    server.write(b"x")
    assert client.read(1) == b"x"
    # no ticket: a client proves itself each time
    assert client.session is None or not client.session.has_ticket
    for older in (0, 1):  # either side
        pair = contexts()
        pair[older].minimum_version = ssl.TLSVersion.TLSv1_2
        pair[older].maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            shaken(*pair)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        shaken(contexts()[0], nobody)


@pytest.fixture
def worker(keys: Path) -> Iterator[WorkerProcess]:
    """Yield a worker that lends the CPU through TLS."""
    with working("--keys", keys / "worker") as running:
        yield running


def url_of(worker: WorkerProcess, folder: Path, **settings: object) -> str:
    more = "".join(f"&{name}={value}" for name, value in settings.items())
    return f"{worker.url}?keys={folder}{more}"


def test_keys_are_for_their_owner_alone(keys: Path) -> None:
    assert sorted(path.name for path in keys.iterdir()) == ["client", "worker"]
    for role in keys.iterdir():
        assert sorted(p.name for p in role.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
        assert stat.S_IMODE((role / "key.pem").stat().st_mode) == 0o600
        assert stat.S_IMODE(role.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (keys, *keys.iterdir()))
    again = WorkerProcess("--new-keys", keys)
    assert again.process.wait(60) == 2
    again.await_line("File exists")


def test_text_over_tls_is_that_of_one_device(
    worker: WorkerProcess, keys: Path, open_engine: Callable[..., Engine]
) -> None:
    device = f"cpu,{url_of(worker, keys / 'client')}"
    one, cut = open_engine("mini35b"), open_engine("mini35b", device=device)
    ids = np.arange(70, dtype=np.int32)
    texts = [
        list(e.generate(ids, max_tokens=8, text=False, ignore_eos=True, keep_logits=True))
        for e in (one, cut)
    ]
    for a, b in zip(*texts, strict=True):
        assert a.logits is not None and b.logits is not None
        np.testing.assert_array_equal(a.logits, b.logits)


@pytest.mark.parametrize("role", ["client", "worker"])
def test_other_keys_are_refused_on_both_sides(
    worker: WorkerProcess, others: Path, keys: Path, role: str
) -> None:
    """Keys that were made apart, and a worker's keys in the hands of a client."""
    folder = others / "client" if role == "client" else keys / "worker"
    with pytest.raises(NativeError, match=rf"worker {worker.url[6:]}.*(certificate|keys)"):
        Device(url_of(worker, folder), 1)
    if role == "worker":
        worker.await_line("refused 127.*certificate")
    Device(url_of(worker, keys / "client"), 1).close()


def test_a_client_does_not_talk_to_another_worker(others: Path, keys: Path) -> None:
    """What accepts our client but has other keys, or the client's, is no worker of ours."""
    with working("--keys", others / "worker") as stranger:
        with pytest.raises(NativeError, match="shows a certificate that the keys do not accept"):
            Device(url_of(stranger, keys / "client"), 1)
    with working("--keys", keys / "client") as impostor:
        with pytest.raises(NativeError, match="shows a certificate that the keys do not accept"):
            Device(url_of(impostor, keys / "client"), 1)


def test_a_client_without_keys_is_refused(worker: WorkerProcess, keys: Path) -> None:
    with pytest.raises(NativeError, match=rf"{worker.url[6:]}.*wants \?keys=FOLDER"):
        Device(worker.url, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "client" / "ca.pem")
    context.check_hostname = False
    with closing(context.wrap_socket(socket.create_connection(worker.address))) as sock:
        with pytest.raises((ssl.SSLError, ConnectionError)):  # after the handshake, in TLS 1.3
            sock.sendall(question_of(remote.this_build()))
            sock.recv(100)
            sock.recv(100)
    Device(url_of(worker, keys / "client"), 1).close()


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        ("child", signal.SIGKILL), ("worker", signal.SIGKILL), ("worker", signal.SIGSTOP),
        ("forwarder", signal.SIGSTOP),
    ],
)  # fmt: skip
def test_whatever_is_lost_is_an_error_in_time(
    worker: WorkerProcess, keys: Path, open_engine: Callable[..., Engine], whom: str, number: int
) -> None:
    """A process on either side ends or freezes: the error names the worker, and nothing hangs."""
    engine = open_engine("mini35b", device=f"cpu,{url_of(worker, keys / 'client')}")
    ids = np.arange(20, dtype=np.int32)
    list(engine.generate(ids, max_tokens=2, text=False))
    link = engine.stages[1].device.link
    assert link
    limit(engine.stages[1].device, 1)
    if whom == "child":
        worker.signal(number)
    elif whom == "worker":
        os.kill(worker.process.pid, number)
    else:
        os.kill(link._connection.forwarder.pid, number)
    begin = time.monotonic()
    with pytest.raises(NativeError, match=f"worker {worker.url[6:]}"):
        list(engine.generate(ids, max_tokens=2, text=False))
    engine.close()
    assert time.monotonic() - begin < PATIENCE_S
    if whom == "worker":
        worker.process.kill()


def test_a_client_that_is_killed_leaves_no_process_behind(
    worker: WorkerProcess, keys: Path
) -> None:
    """The forwarder and the child end, and the next client is served."""
    code = (
        "import sys, time; from moegraph.ggml.device import Device;"
        "d = Device(sys.argv[1], 1); print(d.link._connection.forwarder.pid, flush=True);"
        "time.sleep(600)"
    )
    url = url_of(worker, keys / "client")
    client = subprocess.Popen(
        [sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert client.stdout
    forwarder = int(client.stdout.readline())
    (child,) = worker.children
    client.kill()
    client.wait()
    Device(url, 1).close()
    until(lambda: has_ended(forwarder) and has_ended(child))


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, though perhaps nobody has asked yet how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"
