"""Publishes the numbers of a run while it runs, in a thread, into a file or into an annotation of an object of the API server."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

from pyspark.sql import SparkSession

from persist_spark.progress.live import Live, Stage
from persist_spark.report import Log

#: The intervals of publications. Each publication to the API server is one request, and wakes the operator once.
FILE_INTERVAL_S, OBJECT_INTERVAL_S = 1.0, 30.0
#: The interval at which the thread reads the stage and Spark's counts.
LOOK_S = 1.0
_TIMEOUT_S = 10.0
#: Where Kubernetes mounts the token of a pod and the certificate of its API server.
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
Publish = Callable[[str], None]


def to_file(path: Path) -> Publish:
    """Publishes into a file. The file always holds a complete object."""

    def publish(text: str) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    return publish


def to_annotation(target: str, *, account: Path = _ACCOUNT) -> Publish:
    """Publishes into an annotation. `target` is the URL of the object, with the name of the annotation as its fragment. The token of
    `account` goes to `https` only; the file is read each time, because Kubernetes renews it.
    """
    url, annotation = urldefrag(target)
    is_secure = urlsplit(url).scheme == "https"

    def publish(text: str) -> None:
        body = json.dumps({"metadata": {"annotations": {annotation: text}}}).encode()
        headers = {"Content-Type": "application/merge-patch+json", "Accept": "application/json"}
        if is_secure:
            headers["Authorization"] = f"Bearer {(account / 'token').read_text(encoding='ascii').strip()}"
        request = urllib.request.Request(url, body, headers, method="PATCH")  # noqa: S310 - http or https: see published
        context = ssl.create_default_context(cafile=str(account / "ca.crt")) if is_secure else None
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):  # noqa: S310
            pass

    return publish


@contextmanager
def published(
    live: Live, target: str, spark: SparkSession, log: Log, *, interval_s: float | None = None, look_s: float = LOOK_S
) -> Iterator[None]:
    """While the body runs, publishes `live` to `target`: an http(s) URL for `to_annotation`, or the path of a file. A new stage is
    published within `look_s`, new numbers every `interval_s` (None: the interval of the target). The thread has ended on return.

    Logs errors, each kind of error once in a row, and continues.
    """
    is_url = urlsplit(target).scheme in {"http", "https"}
    publish = to_annotation(target) if is_url else to_file(Path(target))
    if interval_s is None:
        interval_s = OBJECT_INTERVAL_S if is_url else FILE_INTERVAL_S
    teller = _Teller(live, publish, interval_s=interval_s)
    thread = threading.Thread(name="sink-live", daemon=True, target=lambda: teller.repeat(spark, log, look_s=look_s))
    thread.start()
    try:
        yield
    finally:
        teller.stopped.set()
        thread.join()


class _Teller:
    """Publishes one run. It knows the last published object and when the next publication is due. For one thread, except `stopped`."""

    def __init__(self, live: Live, publish: Publish, *, interval_s: float) -> None:
        self.live, self.publish, self.interval_s = live, publish, interval_s
        self.stopped = threading.Event()
        self.stage: Stage | None = None
        self.text: str | None = None
        self.waited_s = 0.0

    def repeat(self, spark: SparkSession, log: Log, *, look_s: float) -> None:
        """Reads the numbers every `look_s`, until `stopped` is set."""
        refused = ""
        while not self.stopped.wait(look_s):
            self.waited_s += look_s
            try:
                self.live.count(spark)
                refused = "" if self._tell() else refused
            except Exception as error:  # noqa: BLE001 - progress is optional; a run must not fail because of it
                if type(error).__name__ != refused:
                    refused = type(error).__name__
                    log.event("progress_not_published", error=f"{refused}: {error}"[:500])

    def _tell(self) -> bool:
        """Publishes if a publication is due. Returns whether it did."""
        stage, text = self.live.stage, self.live.text()
        is_due = stage != self.stage or self.waited_s >= self.interval_s
        # A refused text is tried again, but not before its interval: the target may be overloaded.
        if text is None or text == self.text or not is_due:
            return False
        self.stage, self.waited_s = stage, 0.0
        self.publish(text)
        self.text = text
        return True
