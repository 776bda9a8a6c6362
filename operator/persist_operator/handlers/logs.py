"""Structured logs: one JSON object per line, with whatever the caller put beside the message."""

from __future__ import annotations

import json
import logging
import sys

from persist_operator.api import times
from persist_operator.api.redact import redact

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, logger, message and the extra fields; secrets are taken out."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line break inside."""
        fields = {
            "time": times.to_text(round(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: str(value) for name, value in vars(record).items() if name not in _STANDARD and value is not None},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: redact(value) for name, value in fields.items()})


def configure(level: str) -> None:
    """Send all logs to stderr as JSON. kopf's own per-event chatter is kept at warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp", "urllib3", "botocore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It warns each time that it leaves signals to us, as it should.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
