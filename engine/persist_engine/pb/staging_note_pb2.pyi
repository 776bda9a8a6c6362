from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StagingNote(_message.Message):
    __slots__ = ("shard_id", "applier_version", "sink_id", "run", "job", "batch", "rows", "errors", "least_time", "low", "high", "least", "greatest")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SINK_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LEAST_TIME_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    GREATEST_FIELD_NUMBER: _ClassVar[int]
    shard_id: bytes
    applier_version: str
    sink_id: str
    run: bytes
    job: bytes
    batch: bytes
    rows: int
    errors: int
    least_time: int
    low: int
    high: int
    least: _containers.RepeatedScalarFieldContainer[str]
    greatest: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, shard_id: _Optional[bytes] = ..., applier_version: _Optional[str] = ..., sink_id: _Optional[str] = ..., run: _Optional[bytes] = ..., job: _Optional[bytes] = ..., batch: _Optional[bytes] = ..., rows: _Optional[int] = ..., errors: _Optional[int] = ..., least_time: _Optional[int] = ..., low: _Optional[int] = ..., high: _Optional[int] = ..., least: _Optional[_Iterable[str]] = ..., greatest: _Optional[_Iterable[str]] = ...) -> None: ...
