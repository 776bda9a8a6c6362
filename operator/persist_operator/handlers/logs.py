"""Structured logs: one JSON object a line, with the extra fields of the caller."""

from __future__ import annotations

import json
import logging
import sys

from persist_operator.api import times
from persist_operator.api.redact import redact

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats time, level, logger, message and the extra fields, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for a record. It contains no line break."""
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
    """Send all logs to stderr as JSON. kopf and the libraries log from warning only, because kopf logs every event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp", "urllib3", "botocore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It warns at each start that it does not handle signals, which is intended.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
