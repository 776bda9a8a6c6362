from persist_engine.pb import batch_pb2 as _batch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DebugInfo(_message.Message):
    __slots__ = ("hostname", "purpose")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    purpose: str
    def __init__(self, hostname: _Optional[str] = ..., purpose: _Optional[str] = ...) -> None: ...

class LeasedReader(_message.Message):
    __slots__ = ("since", "seqno", "last_heartbeat_ms", "lease_ms", "debug")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    since: _batch_pb2.Antichain
    seqno: int
    last_heartbeat_ms: int
    lease_ms: int
    debug: DebugInfo
    def __init__(self, since: _Optional[_Union[_batch_pb2.Antichain, _Mapping]] = ..., seqno: _Optional[int] = ..., last_heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., debug: _Optional[_Union[DebugInfo, _Mapping]] = ...) -> None: ...

class CriticalReader(_message.Message):
    __slots__ = ("since", "opaque", "debug")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    since: _batch_pb2.Antichain
    opaque: bytes
    debug: DebugInfo
    def __init__(self, since: _Optional[_Union[_batch_pb2.Antichain, _Mapping]] = ..., opaque: _Optional[bytes] = ..., debug: _Optional[_Union[DebugInfo, _Mapping]] = ...) -> None: ...

class Writer(_message.Message):
    __slots__ = ("last_heartbeat_ms", "lease_ms", "most_recent_write_token", "most_recent_write_upper", "debug")
    LAST_HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MOST_RECENT_WRITE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MOST_RECENT_WRITE_UPPER_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    last_heartbeat_ms: int
    lease_ms: int
    most_recent_write_token: bytes
    most_recent_write_upper: _batch_pb2.Antichain
    debug: DebugInfo
    def __init__(self, last_heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., most_recent_write_token: _Optional[bytes] = ..., most_recent_write_upper: _Optional[_Union[_batch_pb2.Antichain, _Mapping]] = ..., debug: _Optional[_Union[DebugInfo, _Mapping]] = ...) -> None: ...

class SchemaPair(_message.Message):
    __slots__ = ("key", "val")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VAL_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    val: bytes
    def __init__(self, key: _Optional[bytes] = ..., val: _Optional[bytes] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("seqno", "start_ms")
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    seqno: int
    start_ms: int
    def __init__(self, seqno: _Optional[int] = ..., start_ms: _Optional[int] = ...) -> None: ...

class SourceProgress(_message.Message):
    __slots__ = ("token", "upper")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    upper: _batch_pb2.Antichain
    def __init__(self, token: _Optional[bytes] = ..., upper: _Optional[_Union[_batch_pb2.Antichain, _Mapping]] = ...) -> None: ...

class HollowRollup(_message.Message):
    __slots__ = ("key", "size_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class CodecNames(_message.Message):
    __slots__ = ("key", "val", "time", "diff")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VAL_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    key: str
    val: str
    time: str
    diff: str
    def __init__(self, key: _Optional[str] = ..., val: _Optional[str] = ..., time: _Optional[str] = ..., diff: _Optional[str] = ...) -> None: ...

class SpineId(_message.Message):
    __slots__ = ("lo", "hi")
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    lo: int
    hi: int
    def __init__(self, lo: _Optional[int] = ..., hi: _Optional[int] = ...) -> None: ...

class ThinSpineBatch(_message.Message):
    __slots__ = ("level", "desc", "parts", "descs")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DESC_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DESCS_FIELD_NUMBER: _ClassVar[int]
    level: int
    desc: _batch_pb2.Description
    parts: _containers.RepeatedCompositeFieldContainer[SpineId]
    descs: _containers.RepeatedCompositeFieldContainer[_batch_pb2.Description]
    def __init__(self, level: _Optional[int] = ..., desc: _Optional[_Union[_batch_pb2.Description, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[SpineId, _Mapping]]] = ..., descs: _Optional[_Iterable[_Union[_batch_pb2.Description, _Mapping]]] = ...) -> None: ...

class ThinMerge(_message.Message):
    __slots__ = ("since", "remaining_work", "active_compaction_start_ms")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_WORK_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_COMPACTION_START_MS_FIELD_NUMBER: _ClassVar[int]
    since: _batch_pb2.Antichain
    remaining_work: int
    active_compaction_start_ms: int
    def __init__(self, since: _Optional[_Union[_batch_pb2.Antichain, _Mapping]] = ..., remaining_work: _Optional[int] = ..., active_compaction_start_ms: _Optional[int] = ...) -> None: ...

class MergeEntry(_message.Message):
    __slots__ = ("id", "merge")
    ID_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    id: SpineId
    merge: ThinMerge
    def __init__(self, id: _Optional[_Union[SpineId, _Mapping]] = ..., merge: _Optional[_Union[ThinMerge, _Mapping]] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("since", "stored", "merges", "legacy_batches")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    MERGES_FIELD_NUMBER: _ClassVar[int]
    LEGACY_BATCHES_FIELD_NUMBER: _ClassVar[int]
    since: _batch_pb2.Antichain
    stored: _containers.RepeatedCompositeFieldContainer[StoredSpineBatch]
    merges: _containers.RepeatedCompositeFieldContainer[MergeEntry]
    legacy_batches: _containers.RepeatedCompositeFieldContainer[_batch_pb2.HollowBatch]
    def __init__(self, since: _Optional[_Union[_batch_pb2.Antichain, _Mapping]] = ..., stored: _Optional[_Iterable[_Union[StoredSpineBatch, _Mapping]]] = ..., merges: _Optional[_Iterable[_Union[MergeEntry, _Mapping]]] = ..., legacy_batches: _Optional[_Iterable[_Union[_batch_pb2.HollowBatch, _Mapping]]] = ...) -> None: ...

class StoredSpineBatch(_message.Message):
    __slots__ = ("id", "level", "desc", "rows", "parts", "runs", "blob_bytes", "inline_bytes", "count", "batches", "unpacked_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DESC_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    UNPACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: SpineId
    level: int
    desc: _batch_pb2.Description
    rows: int
    parts: int
    runs: int
    blob_bytes: int
    inline_bytes: int
    count: int
    batches: bytes
    unpacked_bytes: int
    def __init__(self, id: _Optional[_Union[SpineId, _Mapping]] = ..., level: _Optional[int] = ..., desc: _Optional[_Union[_batch_pb2.Description, _Mapping]] = ..., rows: _Optional[int] = ..., parts: _Optional[int] = ..., runs: _Optional[int] = ..., blob_bytes: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., count: _Optional[int] = ..., batches: _Optional[bytes] = ..., unpacked_bytes: _Optional[int] = ...) -> None: ...

class StoredBatches(_message.Message):
    __slots__ = ("ids", "batches")
    IDS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedCompositeFieldContainer[SpineId]
    batches: _containers.RepeatedCompositeFieldContainer[_batch_pb2.HollowBatch]
    def __init__(self, ids: _Optional[_Iterable[_Union[SpineId, _Mapping]]] = ..., batches: _Optional[_Iterable[_Union[_batch_pb2.HollowBatch, _Mapping]]] = ...) -> None: ...

class RollupEntry(_message.Message):
    __slots__ = ("seqno", "rollup")
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    ROLLUP_FIELD_NUMBER: _ClassVar[int]
    seqno: int
    rollup: HollowRollup
    def __init__(self, seqno: _Optional[int] = ..., rollup: _Optional[_Union[HollowRollup, _Mapping]] = ...) -> None: ...

class LeasedReaderEntry(_message.Message):
    __slots__ = ("id", "reader")
    ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    reader: LeasedReader
    def __init__(self, id: _Optional[bytes] = ..., reader: _Optional[_Union[LeasedReader, _Mapping]] = ...) -> None: ...

class CriticalReaderEntry(_message.Message):
    __slots__ = ("id", "reader")
    ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    reader: CriticalReader
    def __init__(self, id: _Optional[bytes] = ..., reader: _Optional[_Union[CriticalReader, _Mapping]] = ...) -> None: ...

class WriterEntry(_message.Message):
    __slots__ = ("id", "writer")
    ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    writer: Writer
    def __init__(self, id: _Optional[bytes] = ..., writer: _Optional[_Union[Writer, _Mapping]] = ...) -> None: ...

class SchemaEntry(_message.Message):
    __slots__ = ("id", "schema")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    id: int
    schema: SchemaPair
    def __init__(self, id: _Optional[int] = ..., schema: _Optional[_Union[SchemaPair, _Mapping]] = ...) -> None: ...

class ProgressEntry(_message.Message):
    __slots__ = ("sink_id", "progress")
    SINK_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sink_id: str
    progress: SourceProgress
    def __init__(self, sink_id: _Optional[str] = ..., progress: _Optional[_Union[SourceProgress, _Mapping]] = ...) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("applier_version", "shard_id", "codecs", "seqno", "walltime_ms", "hostname", "last_gc_req", "active_rollup", "active_gc", "rollups", "leased_readers", "critical_readers", "writers", "schemas", "progress", "trace", "birth", "staging_floor_ms", "tag", "retain_ms")
    APPLIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    WALLTIME_MS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    LAST_GC_REQ_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ROLLUP_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_GC_FIELD_NUMBER: _ClassVar[int]
    ROLLUPS_FIELD_NUMBER: _ClassVar[int]
    LEASED_READERS_FIELD_NUMBER: _ClassVar[int]
    CRITICAL_READERS_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    STAGING_FLOOR_MS_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    RETAIN_MS_FIELD_NUMBER: _ClassVar[int]
    applier_version: str
    shard_id: bytes
    codecs: CodecNames
    seqno: int
    walltime_ms: int
    hostname: str
    last_gc_req: int
    active_rollup: Claim
    active_gc: Claim
    rollups: _containers.RepeatedCompositeFieldContainer[RollupEntry]
    leased_readers: _containers.RepeatedCompositeFieldContainer[LeasedReaderEntry]
    critical_readers: _containers.RepeatedCompositeFieldContainer[CriticalReaderEntry]
    writers: _containers.RepeatedCompositeFieldContainer[WriterEntry]
    schemas: _containers.RepeatedCompositeFieldContainer[SchemaEntry]
    progress: _containers.RepeatedCompositeFieldContainer[ProgressEntry]
    trace: Trace
    birth: bytes
    staging_floor_ms: int
    tag: bytes
    retain_ms: int
    def __init__(self, applier_version: _Optional[str] = ..., shard_id: _Optional[bytes] = ..., codecs: _Optional[_Union[CodecNames, _Mapping]] = ..., seqno: _Optional[int] = ..., walltime_ms: _Optional[int] = ..., hostname: _Optional[str] = ..., last_gc_req: _Optional[int] = ..., active_rollup: _Optional[_Union[Claim, _Mapping]] = ..., active_gc: _Optional[_Union[Claim, _Mapping]] = ..., rollups: _Optional[_Iterable[_Union[RollupEntry, _Mapping]]] = ..., leased_readers: _Optional[_Iterable[_Union[LeasedReaderEntry, _Mapping]]] = ..., critical_readers: _Optional[_Iterable[_Union[CriticalReaderEntry, _Mapping]]] = ..., writers: _Optional[_Iterable[_Union[WriterEntry, _Mapping]]] = ..., schemas: _Optional[_Iterable[_Union[SchemaEntry, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[ProgressEntry, _Mapping]]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., birth: _Optional[bytes] = ..., staging_floor_ms: _Optional[int] = ..., tag: _Optional[bytes] = ..., retain_ms: _Optional[int] = ...) -> None: ...

class VersionedData(_message.Message):
    __slots__ = ("seqno", "data")
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    seqno: int
    data: bytes
    def __init__(self, seqno: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Rollup(_message.Message):
    __slots__ = ("state", "diffs", "lineage")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIFFS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    state: ShardState
    diffs: _containers.RepeatedCompositeFieldContainer[VersionedData]
    lineage: bytes
    def __init__(self, state: _Optional[_Union[ShardState, _Mapping]] = ..., diffs: _Optional[_Iterable[_Union[VersionedData, _Mapping]]] = ..., lineage: _Optional[bytes] = ...) -> None: ...
