"""Real servers for tests. Each starts on a free loopback port, has a URL, and always ends.

A missing program is an error with instructions to install it, never a skip, because a test that did not run proves nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

#: Servers start in 0.1 s and answer at once. A loaded machine may take much longer, which must not make a test flaky.
START_DEADLINE_S = ANSWER_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
#: Below the ports that Linux and macOS give to connections, and the node ports of clusters. Otherwise a connection of any process could take
#: the port of a server that is about to start, or is down between two starts.
PORTS = range(20_000, 30_000)
#: Two processes can pick the same free port. The one that cannot bind it exits at once and is started on another port.
PORT_ATTEMPTS_MAX = 5


class ServerMissing(RuntimeError):
    """A server's program is not installed. The message says how to install it."""


class ServersBarred(RuntimeError):
    """A test without a server's mark starts one in a run that has barred them (`make test-fast`)."""


class Server:
    """One server process on a fixed address of 127.0.0.1, with its own folder. `restart` keeps address and data."""

    def __init__(self, command: Callable[[int], list[str]], is_up: Callable[[int], bool], folder: Path) -> None:
        if os.environ.get("PERSIST_NO_SERVERS"):  # noqa: TID251 - a knob of the test kit itself, like PATH
            raise ServersBarred(f"{command(0)[0]} is barred in this run: mark the test `redis` or `s3`")
        self._command = command
        self._is_up = is_up
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        for _ in range(PORT_ATTEMPTS_MAX):
            self.port = free_port()
            if self._started():
                return
        raise RuntimeError(f"{command(0)[0]} does not start: {self._log.read_text()[-2000:]}")

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id. RuntimeError when the server is stopped."""
        if self._process is None:
            raise RuntimeError("the server is stopped")
        return self._process.pid

    def start(self) -> None:
        """Starts the server again, on the same address and data, after `stop` or `kill`."""
        if not self._started():
            raise RuntimeError(f"server on port {self.port} does not start: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Ends the server with SIGTERM. Idempotent."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the server with SIGKILL, like a crash. Idempotent."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """`kill`, then `start`."""
        self.kill()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the block the process is frozen: it accepts connections and answers nothing."""
        freeze(self.pid)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _started(self) -> bool:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(self.port), stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
            )
        waiting = threading.Event()
        for _ in range(int(START_DEADLINE_S / 0.02)):
            if self._process.poll() is not None:
                self._process = None
                return False
            if self._is_up(self.port):
                return True
            waiting.wait(0.02)
        self.kill()
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _end_group(process.pid)


def _end_group(leader: int) -> None:
    """Ends the children of a server that has ended, such as the process that rewrites the log of Redis, because they still write into
    its folder.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class RedisServer(Server):
    """A redis-server. `url` opens it as consensus. With `tls` it accepts only TLS, and `ca_file` is the CA of its certificate. With
    `wants_certificate` it accepts only clients with a certificate of the same CA; `cert_file` and `key_file` are one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: dict[str, str],
        password: str | None,
        tls: bool = False,
        wants_certificate: bool = False,
    ) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise ServerMissing(
                "no redis-server or valkey-server on PATH: run `make setup`, or install Debian's redis-server"
            )
        self._password = password
        self.ca_file = certificates(folder) if tls else None
        self.cert_file, self.key_file = folder / "client.crt", folder / "client.key"
        if tls:
            names = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "ca.pem"}
            files = {f"tls-{name}": str(folder / file) for name, file in names.items()}
            settings = settings | files | {"tls-auth-clients": "yes" if wants_certificate else "no", "port": "0"}
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        words += ["--requirepass", password] if password else []
        super().__init__(
            lambda port: [
                program,
                "--bind",
                "127.0.0.1",
                "--tls-port" if tls else "--port",
                str(port),
                "--dir",
                str(folder),
                "--save",
                "",
                *words,
            ],
            self._pong,
            folder,
        )

    @property
    def url(self) -> str:
        """The URL for open_consensus, with the password if there is one, and without `ca_file`."""
        user = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"{'rediss' if self.ca_file else 'redis'}://{user}{self.address}/0"

    def command(self, *words: str) -> bytes:
        """Sends one command on its own connection. Returns the raw reply."""
        with self._connected() as connection:
            lines = [["AUTH", self._password]] if self._password else []
            reply = b""
            for line in [*lines, list(words)]:
                connection.sendall(_resp(line))
                reply = connection.recv(1 << 16)
            return reply

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_DEADLINE_S)
        if self.ca_file is None:
            return connection
        context = ssl.create_default_context(cafile=self.ca_file)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context.wrap_socket(connection, server_hostname="127.0.0.1")

    def _pong(self, port: int) -> bool:
        self.port = port
        with contextlib.suppress(OSError):
            return self.command("PING").startswith(b"+PONG")
        return False


class S3Server(Server):
    """A versitygw over a folder. `url` opens the bucket as blob store; the credentials are `access_key` and `secret_key`. With `tls` it
    accepts only TLS, and `ca_file` is the CA of its certificate.
    """

    region = "us-east-1"

    def __init__(self, folder: Path, *, bucket: str, versioned: bool = False, tls: bool = False) -> None:
        program = _versitygw()
        self.ca_file = certificates(folder) if tls else None
        encrypted = ["--cert", str(folder / "server.crt"), "--key", str(folder / "server.key")] if tls else []
        versions = folder / "versions"
        versions.mkdir()
        backend = ["posix", *(["--versioning-dir", str(versions)] if versioned else [])]
        self.bucket = bucket
        self.access_key = "persist"
        self.secret_key = secrets.token_hex(16)
        self._data = folder / "data"
        (self._data / bucket).mkdir(parents=True)
        keys = ["--access", self.access_key, "--secret", self.secret_key]
        super().__init__(
            lambda port: [
                *[
                    program,
                    *keys,
                    "--port",
                    f"127.0.0.1:{port}",
                    "--region",
                    self.region,
                    "--health",
                    "/health",
                    "--quiet",
                    *encrypted,
                ],
                *[*backend, str(self._data)],
            ],
            lambda port: _is_healthy(port, self.ca_file),
            folder,
        )

    @property
    def url(self) -> str:
        """The URL for open_blob. `location` gives one with a prefix."""
        return self.location("")

    def location(self, prefix: str, *, bucket: str | None = None) -> str:
        """The URL of a prefix in a bucket of this server."""
        endpoint = quote(f"http{'s' if self.ca_file else ''}://{self.address}", safe="")
        return f"s3://{bucket or self.bucket}/{prefix}?endpoint={endpoint}&region={self.region}&path_style=true"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables from which boto3 reads the credentials."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def object_path(self, key: str) -> Path:
        """The file behind an object, for damaging it."""
        return self._data / self.bucket / key


@contextmanager
def redis_server(
    *,
    appendonly: bool = True,
    password: str | None = None,
    settings: dict[str, str] | None = None,
    tls: bool = False,
    wants_certificate: bool = False,
) -> Iterator[RedisServer]:
    """A Redis with safe durability (AOF, fsync always) unless `appendonly` is false. `settings` go to its command line. `tls`: it accepts
    only TLS, with its own certificate. `wants_certificate`: it also requires a certificate of the client.
    """
    durable = {"appendonly": "yes", "appendfsync": "always"} if appendonly else {"appendonly": "no"}
    with tempfile.TemporaryDirectory(prefix="persist-redis-") as folder:
        server = RedisServer(
            Path(folder),
            settings=durable | (settings or {}),
            password=password,
            tls=tls,
            wants_certificate=wants_certificate,
        )
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def s3_server(*, bucket: str = "persist", versioned: bool = False, tls: bool = False) -> Iterator[S3Server]:
    """A versitygw with one bucket. `versioned`: it can keep versions, after versioning of the bucket is turned on. `tls`: it accepts only
    TLS, with its own certificate.
    """
    with tempfile.TemporaryDirectory(prefix="persist-s3-") as folder:
        server = S3Server(Path(folder), bucket=bucket, versioned=versioned, tls=tls)
        try:
            yield server
        finally:
            server.kill()


def freeze(pid: int) -> None:
    """Stops a child of this process (SIGSTOP), and returns when all of its threads have stopped. On a busy machine they may run on for a
    while after the signal, and answer a call.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def free_port() -> int:
    """A port of 127.0.0.1 that is free now. Random, so that test processes seldom pick the same one."""
    while True:
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _versitygw() -> str:
    tools = os.environ.get("PERSIST_TOOLS")  # noqa: TID251 - a knob of the test kit itself, like PATH
    folders = [tools, str(Path.home() / ".cache/persist-operator/bin")]
    for path in [None, *[folder for folder in folders if folder]]:
        if program := shutil.which("versitygw", path=path):
            return program
    raise ServerMissing("no versitygw on PATH, in $PERSIST_TOOLS or ~/.cache/persist-operator/bin: run `make setup`")


def _is_healthy(port: int, ca_file: Path | None) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    if ca_file is not None:
        context = ssl.create_default_context(cafile=ca_file)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=2, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def certificates(folder: Path) -> Path:
    """Writes a CA, and certificates of this CA with their keys, for a server at 127.0.0.1 and for a client: `ca.pem`, `server.crt`,
    `server.key`, `client.crt`, `client.key`. Returns the path of `ca.pem`. Each call makes a new CA.
    """
    import trustme

    authority = trustme.CA()
    for name, identity in (("server", "127.0.0.1"), ("client", "client.test")):
        made = authority.issue_cert(identity)
        made.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
        made.private_key_pem.write_to_path(folder / f"{name}.key")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder / "ca.pem"


def _resp(words: list[str]) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)
