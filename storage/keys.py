"""Keys for a queue that other hosts reach: CURVE in both directions, from the files of one folder.

    keys/server/server.key_secret    the queue's own; stays on its host
    keys/server/clients/NAME.key     the clients that are let in, read at each connection
    keys/NAME/client.key_secret      a client's own; the folder goes to its host, as keys/client
    keys/NAME/server.key             the queue that this client trusts

Files have the format of `zmq.auth`. A server lets in only clients whose key it has, and encrypts all that is sent.
"""

import logging
import os
import re
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from asyncflow.errors import AccessDenied, MissingDependency, StorageError
from asyncflow.storage.address import local

log = logging.getLogger(__name__)

VARIABLE = "ASYNCFLOW_KEYS"
OVERHEAD = 64
"""What encryption may add to a frame, in bytes."""

Folder: TypeAlias = str | os.PathLike[str]


def create(folder: Folder, client: str = "client") -> Path:
    """Write keys for a client, and those of the queue if the folder has none; return the client's folder.

    Nothing that is there is overwritten: a client that has keys already is a StorageError.
    """
    _need_curve()
    if not re.fullmatch(r"\w[\w.-]*", client) or client == "server":
        raise StorageError(f"{client!r} is no name for a client: expected letters, digits, '_', '-', not 'server'")
    root = Path(folder)
    own, known = root / client, root / "server" / "clients" / f"{client}.key"
    for path in (own, known):
        if path.exists():
            raise StorageError(f"{path} is there already: remove it, or name another client")
    try:
        server = _server(root / "server")
        public, secret = zmq.curve_keypair()
        _write(own / "client.key_secret", public, secret)
        _write(own / "server.key", server)
        _write(known, public)
    except OSError as error:
        raise StorageError(f"no keys can be written to {root}: {error}") from error
    return own


def chosen(url: str, keys: Folder | None) -> Path | None:
    """Return the folder of the keys for an address; beyond this host there must be one, given or in the environment."""
    if keys is not None:
        return Path(keys)
    if local(url):
        return None
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    raise AccessDenied(
        f"{url} is not on this host's loopback, so it takes keys: write them with `asyncflow storage keys FOLDER`, "
        f"and name them by keys=FOLDER, --keys FOLDER or {VARIABLE}=FOLDER"
    )


def lock(socket: "zmq.Socket[bytes]", folder: Path) -> None:
    """Have the socket of a client prove its key, and ask the server for the one that this client trusts."""
    _need_curve()
    public, secret = _pair(folder / "client" / "client.key_secret")
    _set(socket, zmq.CURVE_PUBLICKEY, public, folder)
    _set(socket, zmq.CURVE_SECRETKEY, secret, folder)
    _set(socket, zmq.CURVE_SERVERKEY, _load(folder / "client" / "server.key")[0], folder)


class Gate:
    """Who may use a server: libzmq asks here about the key of each client (ZAP), and lets nobody in unasked."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", folder: Path) -> None:
        _need_curve()
        secret = _pair(folder / "server" / "server.key_secret")[1]
        self._clients = folder / "server" / "clients"
        _set(router, zmq.CURVE_SECRETKEY, secret, folder)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, b"asyncflow")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one question; called when there is one."""
        version, number, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
        known = mechanism == b"CURVE" and z85.encode(credentials[0]) in _publics(self._clients)
        if not known:
            log.warning("a client at %s has a key that is not in %s", address.decode(), self._clients)
        verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([version, number, *verdict, b"", b""])

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close(0)


def refusal(peer: str, folder: Path | None, event: int) -> AccessDenied:
    """Return the error for a connection that failed before it was one, by the event that says how."""
    if folder is None:
        return AccessDenied(f"{peer} asks for keys, or has just ended: open it with keys=FOLDER, which names them")
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        own = folder / "client" / "client.key_secret"
        return AccessDenied(
            f"{peer} does not know the key of this client, {own}: its public half must be in server/clients of the "
            "folder that the queue is served with"
        )
    trusted = folder / "client" / "server.key"
    return AccessDenied(f"{peer} has not the key that {trusted} says, is served without keys, or has just ended")


def _need_curve() -> None:
    if not zmq.has("curve"):
        install = "pip install --force-reinstall --only-binary pyzmq pyzmq, or build libzmq with libsodium"
        raise MissingDependency("pyzmq with CURVE", "a queue with keys", install)


def _server(folder: Path) -> bytes:
    """Return the public key of the queue, which gets one if it has none."""
    path = folder / "server.key_secret"
    if path.exists():
        return _pair(path)[0]
    public, secret = zmq.curve_keypair()
    _write(path, public, secret)
    return public


def _write(path: Path, public: bytes, secret: bytes | None = None) -> None:
    text = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    if secret is not None:
        text += f'    secret-key = "{secret.decode()}"\n'
    mode = 0o644 if secret is None else 0o600
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as file:
        file.write(text)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except (OSError, ValueError, IndexError) as error:  # an index, where a line lacks its "="
        raise StorageError(f"{path} holds no key ({error}): `asyncflow storage keys` writes them") from error


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise StorageError(f"{path} holds no secret key: `asyncflow storage keys` writes one")
    if path.stat().st_mode & 0o077:
        raise StorageError(f"{path} is open to other users of this host, who may have read it: chmod 600 {path}")
    return public, secret


def _publics(folder: Path) -> set[bytes]:
    """Return the keys of a folder; one bad file must not lock out everybody else, nor end the server."""
    found = set()
    try:
        for path in folder.glob("*.key"):
            try:
                found.add(_load(path)[0])
            except StorageError as error:
                log.warning("%s", error)
    except OSError as error:
        log.warning("%s cannot be read: %s", folder, error)
    return found


def _set(socket: "zmq.Socket[bytes]", option: int, key: bytes, folder: Path) -> None:
    try:
        socket.setsockopt(option, key)
    except zmq.ZMQError as error:
        raise StorageError(f"{folder}: {key[:8]!r}… is no key: expected 40 characters of Z85") from error
