"""The findings of an audit, and what it examined, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from persist_engine.model.ids import ShardId


class Severity(enum.StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    """Data or a version cannot be read as it was written, or a bound hides rows. An operator must act."""
    WARNING = "warning"
    """Nothing is lost or read wrongly, but the state is not as it should be."""


class FindingKind(enum.StrEnum):
    """Machine-readable codes. Append-only."""

    MISSING_BLOB = "MissingBlob"
    CORRUPT = "Corrupt"
    INCOMPATIBLE = "Incompatible"
    WRONG_SIZE = "WrongSize"
    WRONG_SUM = "WrongSum"
    STATS_NOT_CONSERVATIVE = "StatsNotConservative"
    OUT_OF_ORDER = "OutOfOrder"
    ROLLUP_DIFFERS = "RollupDiffers"
    DIFF_DOES_NOT_APPLY = "DiffDoesNotApply"
    REFERENCES_DIFFER = "ReferencesDiffer"
    INVARIANT = "Invariant"
    LOG_LOST = "LogLost"
    LOG_BEHIND = "LogBehind"
    LOG_FORKED = "LogForked"
    LOG_GAP = "LogGap"
    PARTS_AHEAD = "PartsAhead"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem with the blob or version `key`."""

    severity: Severity
    kind: FindingKind
    key: str
    message: str


@dataclass(slots=True)
class Verification:
    """The result for one shard: what was examined, and what is wrong. `collected` counts blobs that garbage collection
    deleted meanwhile, which is allowed.
    """

    shard_id: ShardId
    versions: int = 0
    rollups: int = 0
    parts: int = 0
    parts_read: int = 0
    rows: int = 0
    bytes_read: int = 0
    collected: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_corrupt(self) -> bool:
        """Whether there is an error, and not only a warning."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)

    def error(self, kind: FindingKind, key: str, message: str) -> None:
        """Adds an error."""
        self.findings.append(Finding(Severity.ERROR, kind, key, message))

    def warning(self, kind: FindingKind, key: str, message: str) -> None:
        """Adds a warning."""
        self.findings.append(Finding(Severity.WARNING, kind, key, message))

    def to_json(self) -> dict[str, Any]:
        """A JSON object. Findings are objects with severity, kind, key and message."""
        numbers = {name: getattr(self, name) for name in self.__slots__ if name not in {"shard_id", "findings"}}
        found = [
            {"severity": each.severity.value, "kind": each.kind.value, "key": each.key, "message": each.message}
            for each in self.findings
        ]
        return {"shard_id": str(self.shard_id), "corrupt": self.is_corrupt, **numbers, "findings": found}
