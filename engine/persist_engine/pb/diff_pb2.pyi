from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StateField(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_FIELD_UNSPECIFIED: _ClassVar[StateField]
    STATE_FIELD_HOSTNAME: _ClassVar[StateField]
    STATE_FIELD_LAST_GC_REQ: _ClassVar[StateField]
    STATE_FIELD_ACTIVE_ROLLUP: _ClassVar[StateField]
    STATE_FIELD_ACTIVE_GC: _ClassVar[StateField]
    STATE_FIELD_ROLLUPS: _ClassVar[StateField]
    STATE_FIELD_LEASED_READERS: _ClassVar[StateField]
    STATE_FIELD_CRITICAL_READERS: _ClassVar[StateField]
    STATE_FIELD_WRITERS: _ClassVar[StateField]
    STATE_FIELD_SCHEMAS: _ClassVar[StateField]
    STATE_FIELD_PROGRESS: _ClassVar[StateField]
    STATE_FIELD_SINCE: _ClassVar[StateField]
    STATE_FIELD_LEGACY_BATCHES: _ClassVar[StateField]
    STATE_FIELD_HOLLOW_BATCHES: _ClassVar[StateField]
    STATE_FIELD_SPINE_BATCHES: _ClassVar[StateField]
    STATE_FIELD_MERGES: _ClassVar[StateField]
    STATE_FIELD_STAGING_FLOOR_MS: _ClassVar[StateField]
    STATE_FIELD_RETAIN_MS: _ClassVar[StateField]

class DiffType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIFF_TYPE_INSERT: _ClassVar[DiffType]
    DIFF_TYPE_UPDATE: _ClassVar[DiffType]
    DIFF_TYPE_DELETE: _ClassVar[DiffType]
STATE_FIELD_UNSPECIFIED: StateField
STATE_FIELD_HOSTNAME: StateField
STATE_FIELD_LAST_GC_REQ: StateField
STATE_FIELD_ACTIVE_ROLLUP: StateField
STATE_FIELD_ACTIVE_GC: StateField
STATE_FIELD_ROLLUPS: StateField
STATE_FIELD_LEASED_READERS: StateField
STATE_FIELD_CRITICAL_READERS: StateField
STATE_FIELD_WRITERS: StateField
STATE_FIELD_SCHEMAS: StateField
STATE_FIELD_PROGRESS: StateField
STATE_FIELD_SINCE: StateField
STATE_FIELD_LEGACY_BATCHES: StateField
STATE_FIELD_HOLLOW_BATCHES: StateField
STATE_FIELD_SPINE_BATCHES: StateField
STATE_FIELD_MERGES: StateField
STATE_FIELD_STAGING_FLOOR_MS: StateField
STATE_FIELD_RETAIN_MS: StateField
DIFF_TYPE_INSERT: DiffType
DIFF_TYPE_UPDATE: DiffType
DIFF_TYPE_DELETE: DiffType

class U64(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: str
    def __init__(self, value: _Optional[str] = ...) -> None: ...

class Id(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class FieldDiffs(_message.Message):
    __slots__ = ("fields", "types", "lens", "data")
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    LENS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedScalarFieldContainer[StateField]
    types: _containers.RepeatedScalarFieldContainer[DiffType]
    lens: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, fields: _Optional[_Iterable[_Union[StateField, str]]] = ..., types: _Optional[_Iterable[_Union[DiffType, str]]] = ..., lens: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StateDiff(_message.Message):
    __slots__ = ("applier_version", "seqno_from", "seqno_to", "latest_rollup_key", "field_diffs", "walltime_ms", "shard_id", "birth", "predecessor")
    APPLIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FROM_FIELD_NUMBER: _ClassVar[int]
    SEQNO_TO_FIELD_NUMBER: _ClassVar[int]
    LATEST_ROLLUP_KEY_FIELD_NUMBER: _ClassVar[int]
    FIELD_DIFFS_FIELD_NUMBER: _ClassVar[int]
    WALLTIME_MS_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FIELD_NUMBER: _ClassVar[int]
    applier_version: str
    seqno_from: int
    seqno_to: int
    latest_rollup_key: str
    field_diffs: FieldDiffs
    walltime_ms: int
    shard_id: bytes
    birth: bytes
    predecessor: bytes
    def __init__(self, applier_version: _Optional[str] = ..., seqno_from: _Optional[int] = ..., seqno_to: _Optional[int] = ..., latest_rollup_key: _Optional[str] = ..., field_diffs: _Optional[_Union[FieldDiffs, _Mapping]] = ..., walltime_ms: _Optional[int] = ..., shard_id: _Optional[bytes] = ..., birth: _Optional[bytes] = ..., predecessor: _Optional[bytes] = ...) -> None: ...
