"""A real Kafka broker for tests, on a free loopback port, with one user. It always ends.

Owns: the broker's configuration, and the folder of the jars that `.ci/tools.sh` fetched. Must not know: Spark.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persist_kit.servers import Server, ServerMissing, free_port

USER = "persist"
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
#: A broker that keeps its own metadata, for one machine. Tests create the topics.
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=SASL_PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=SASL_PLAINTEXT
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config={login} username="{user}" password="{password}" user_{user}="{password}";
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.cleaner.enable=false
"""


def jar_folder(name: str) -> Path:
    """The folder of the jars that `.ci/tools.sh NAME` fetches. `name`: `broker`, or `connector` for Spark's. Raises ServerMissing
    without them.
    """
    cache = os.environ.get("PERSIST_CACHE")  # noqa: TID251 - a knob of the test kit itself, like PATH
    folder = Path(cache or Path.home() / ".cache" / "persist-operator") / "jars" / name
    if not (folder / "jars.sha256").is_file():
        raise ServerMissing(f"no jars of the {name} in {folder}: run `make setup`")
    return folder


class KafkaBroker(Server):
    """One broker that is its own controller. Clients log in as USER, with `password`."""

    def __init__(self, folder: Path) -> None:
        java = shutil.which("java")
        if java is None:
            raise ServerMissing("no java on PATH: run `make setup`")
        classes = jar_folder("broker") / "*"
        self.password = secrets.token_hex(16)
        self._folder = folder
        (folder / "data").mkdir()
        # The broker's own formatting tool would write the same, but it takes a JVM and a second.
        (folder / "data" / "meta.properties").write_text("version=1\ncluster.id=persist-tests\nnode.id=1\n")
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options.append("-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
        super().__init__(
            lambda port: [java, *options, "-cp", str(classes), "kafka.Kafka", str(self._configured(port))],
            _accepts,
            folder,
        )

    @property
    def login(self) -> str:
        """The `sasl.jaas.config` of a client."""
        return f'{_LOGIN} username="{USER}" password="{self.password}";'

    @property
    def login_from_file(self) -> str:
        """The `sasl.jaas.config` with the password in a file, like a mounted Secret. Kafka's DirectoryConfigProvider, named `secret`,
        reads it.
        """
        file = self._folder / "secret" / "password"
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.password)
        return f'{_LOGIN} username="{USER}" password="${{secret:{file.parent}:{file.name}}}";'

    def client(self, login: str | None = None) -> dict[str, str]:
        """The properties with which a client logs in. `login`: replaces the right login."""
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": login or self.login,
        }

    def _configured(self, port: int) -> Path:
        file = self._folder / "broker.properties"
        named = {"login": _LOGIN, "user": USER, "password": self.password, "data": self._folder / "data"}
        file.write_text(_PROPERTIES.format(port=port, controller=free_port(), **named))
        return file


@contextmanager
def kafka_broker() -> Iterator[KafkaBroker]:
    """A broker without topics. It takes about three seconds and 200 MB."""
    with tempfile.TemporaryDirectory(prefix="persist-kafka-") as folder:
        broker = KafkaBroker(Path(folder))
        try:
            yield broker
        finally:
            broker.kill()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False
