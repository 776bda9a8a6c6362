from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeletionCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELETION_CAUSE_UNSPECIFIED: _ClassVar[DeletionCause]
    DELETION_CAUSE_COLLECTION: _ClassVar[DeletionCause]
    DELETION_CAUSE_ORPHAN_SCAN: _ClassVar[DeletionCause]
    DELETION_CAUSE_COMPACTION: _ClassVar[DeletionCause]
    DELETION_CAUSE_ROLLUP: _ClassVar[DeletionCause]
DELETION_CAUSE_UNSPECIFIED: DeletionCause
DELETION_CAUSE_COLLECTION: DeletionCause
DELETION_CAUSE_ORPHAN_SCAN: DeletionCause
DELETION_CAUSE_COMPACTION: DeletionCause
DELETION_CAUSE_ROLLUP: DeletionCause

class Deletions(_message.Message):
    __slots__ = ("shard_id", "cause", "seqno", "hostname", "begun_ms", "gone_ms", "keys")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_FIELD_NUMBER: _ClassVar[int]
    GONE_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    shard_id: bytes
    cause: DeletionCause
    seqno: int
    hostname: str
    begun_ms: int
    gone_ms: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, shard_id: _Optional[bytes] = ..., cause: _Optional[_Union[DeletionCause, str]] = ..., seqno: _Optional[int] = ..., hostname: _Optional[str] = ..., begun_ms: _Optional[int] = ..., gone_ms: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...
