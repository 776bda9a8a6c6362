from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_ORDER_UNSPECIFIED: _ClassVar[RunOrder]
    RUN_ORDER_UNORDERED: _ClassVar[RunOrder]
    RUN_ORDER_CODEC: _ClassVar[RunOrder]
    RUN_ORDER_STRUCTURED: _ClassVar[RunOrder]

class RunKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_KIND_ANY: _ClassVar[RunKind]
    RUN_KIND_DISTINCT: _ClassVar[RunKind]
    RUN_KIND_BALANCED: _ClassVar[RunKind]
RUN_ORDER_UNSPECIFIED: RunOrder
RUN_ORDER_UNORDERED: RunOrder
RUN_ORDER_CODEC: RunOrder
RUN_ORDER_STRUCTURED: RunOrder
RUN_KIND_ANY: RunKind
RUN_KIND_DISTINCT: RunKind
RUN_KIND_BALANCED: RunKind

class Antichain(_message.Message):
    __slots__ = ("elements",)
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    elements: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, elements: _Optional[_Iterable[int]] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("lower", "upper", "since")
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    lower: Antichain
    upper: Antichain
    since: Antichain
    def __init__(self, lower: _Optional[_Union[Antichain, _Mapping]] = ..., upper: _Optional[_Union[Antichain, _Mapping]] = ..., since: _Optional[_Union[Antichain, _Mapping]] = ...) -> None: ...

class ColumnStats(_message.Message):
    __slots__ = ("column", "null_count", "lower", "upper")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    NULL_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    column: str
    null_count: int
    lower: str
    upper: str
    def __init__(self, column: _Optional[str] = ..., null_count: _Optional[int] = ..., lower: _Optional[str] = ..., upper: _Optional[str] = ...) -> None: ...

class PartStats(_message.Message):
    __slots__ = ("columns", "time_min", "time_max", "diff_min")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TIME_MIN_FIELD_NUMBER: _ClassVar[int]
    TIME_MAX_FIELD_NUMBER: _ClassVar[int]
    DIFF_MIN_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedCompositeFieldContainer[ColumnStats]
    time_min: int
    time_max: int
    diff_min: int
    def __init__(self, columns: _Optional[_Iterable[_Union[ColumnStats, _Mapping]]] = ..., time_min: _Optional[int] = ..., time_max: _Optional[int] = ..., diff_min: _Optional[int] = ...) -> None: ...

class Footing(_message.Message):
    __slots__ = ("size_bytes", "checksum", "filters_bytes", "filtered")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FILTERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    checksum: str
    filters_bytes: int
    filtered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, size_bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., filters_bytes: _Optional[int] = ..., filtered: _Optional[_Iterable[str]] = ...) -> None: ...

class HollowPart(_message.Message):
    __slots__ = ("key", "size_bytes", "rows", "diffs_sum", "checksum", "key_lower", "stats", "ts_rewrite", "schema_id", "format", "sum_wraps", "footer")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIFFS_SUM_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    KEY_LOWER_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TS_REWRITE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SUM_WRAPS_FIELD_NUMBER: _ClassVar[int]
    FOOTER_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    rows: int
    diffs_sum: int
    checksum: str
    key_lower: bytes
    stats: PartStats
    ts_rewrite: Antichain
    schema_id: int
    format: str
    sum_wraps: bool
    footer: Footing
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., rows: _Optional[int] = ..., diffs_sum: _Optional[int] = ..., checksum: _Optional[str] = ..., key_lower: _Optional[bytes] = ..., stats: _Optional[_Union[PartStats, _Mapping]] = ..., ts_rewrite: _Optional[_Union[Antichain, _Mapping]] = ..., schema_id: _Optional[int] = ..., format: _Optional[str] = ..., sum_wraps: _Optional[bool] = ..., footer: _Optional[_Union[Footing, _Mapping]] = ...) -> None: ...

class InlinePart(_message.Message):
    __slots__ = ("data", "rows", "diffs_sum", "ts_rewrite", "schema_id", "format", "sum_wraps")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIFFS_SUM_FIELD_NUMBER: _ClassVar[int]
    TS_REWRITE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SUM_WRAPS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    rows: int
    diffs_sum: int
    ts_rewrite: Antichain
    schema_id: int
    format: str
    sum_wraps: bool
    def __init__(self, data: _Optional[bytes] = ..., rows: _Optional[int] = ..., diffs_sum: _Optional[int] = ..., ts_rewrite: _Optional[_Union[Antichain, _Mapping]] = ..., schema_id: _Optional[int] = ..., format: _Optional[str] = ..., sum_wraps: _Optional[bool] = ...) -> None: ...

class HollowRun(_message.Message):
    __slots__ = ("key", "size_bytes", "checksum", "rows", "diffs_sum", "parts_bytes", "part_bytes_max", "part_count", "blob_count", "key_lower", "ts_rewrite", "oldest_key", "schema_id", "sum_wraps")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIFFS_SUM_FIELD_NUMBER: _ClassVar[int]
    PARTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEY_LOWER_FIELD_NUMBER: _ClassVar[int]
    TS_REWRITE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_KEY_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    SUM_WRAPS_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    checksum: str
    rows: int
    diffs_sum: int
    parts_bytes: int
    part_bytes_max: int
    part_count: int
    blob_count: int
    key_lower: bytes
    ts_rewrite: Antichain
    oldest_key: str
    schema_id: int
    sum_wraps: bool
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., rows: _Optional[int] = ..., diffs_sum: _Optional[int] = ..., parts_bytes: _Optional[int] = ..., part_bytes_max: _Optional[int] = ..., part_count: _Optional[int] = ..., blob_count: _Optional[int] = ..., key_lower: _Optional[bytes] = ..., ts_rewrite: _Optional[_Union[Antichain, _Mapping]] = ..., oldest_key: _Optional[str] = ..., schema_id: _Optional[int] = ..., sum_wraps: _Optional[bool] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("hollow", "inline", "run")
    HOLLOW_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    hollow: HollowPart
    inline: InlinePart
    run: HollowRun
    def __init__(self, hollow: _Optional[_Union[HollowPart, _Mapping]] = ..., inline: _Optional[_Union[InlinePart, _Mapping]] = ..., run: _Optional[_Union[HollowRun, _Mapping]] = ...) -> None: ...

class RunMeta(_message.Message):
    __slots__ = ("order", "run_id", "schema_id", "rows", "truncated", "waits_from_ms", "kind")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FROM_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    order: RunOrder
    run_id: bytes
    schema_id: int
    rows: int
    truncated: bool
    waits_from_ms: int
    kind: RunKind
    def __init__(self, order: _Optional[_Union[RunOrder, str]] = ..., run_id: _Optional[bytes] = ..., schema_id: _Optional[int] = ..., rows: _Optional[int] = ..., truncated: _Optional[bool] = ..., waits_from_ms: _Optional[int] = ..., kind: _Optional[_Union[RunKind, str]] = ...) -> None: ...

class HollowBatch(_message.Message):
    __slots__ = ("desc", "rows", "parts", "run_splits", "run_metas")
    DESC_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RUN_SPLITS_FIELD_NUMBER: _ClassVar[int]
    RUN_METAS_FIELD_NUMBER: _ClassVar[int]
    desc: Description
    rows: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    run_splits: _containers.RepeatedScalarFieldContainer[int]
    run_metas: _containers.RepeatedCompositeFieldContainer[RunMeta]
    def __init__(self, desc: _Optional[_Union[Description, _Mapping]] = ..., rows: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., run_splits: _Optional[_Iterable[int]] = ..., run_metas: _Optional[_Iterable[_Union[RunMeta, _Mapping]]] = ...) -> None: ...

class TransmittableBatch(_message.Message):
    __slots__ = ("shard_id", "applier_version", "batch")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    shard_id: bytes
    applier_version: str
    batch: HollowBatch
    def __init__(self, shard_id: _Optional[bytes] = ..., applier_version: _Optional[str] = ..., batch: _Optional[_Union[HollowBatch, _Mapping]] = ...) -> None: ...

class RunListing(_message.Message):
    __slots__ = ("shard_id", "applier_version", "parts")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    shard_id: bytes
    applier_version: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, shard_id: _Optional[bytes] = ..., applier_version: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...
