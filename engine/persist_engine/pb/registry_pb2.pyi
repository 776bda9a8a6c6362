from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreIdentity(_message.Message):
    __slots__ = ("store_id", "bound")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    store_id: bytes
    bound: bool
    def __init__(self, store_id: _Optional[bytes] = ..., bound: _Optional[bool] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("operator_id", "namespace", "name")
    OPERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    operator_id: str
    namespace: str
    name: str
    def __init__(self, operator_id: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ShardOwner(_message.Message):
    __slots__ = ("shard_id", "owner")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    shard_id: bytes
    owner: Owner
    def __init__(self, shard_id: _Optional[bytes] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class RegisteredName(_message.Message):
    __slots__ = ("owner", "shard_id")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    shard_id: bytes
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., shard_id: _Optional[bytes] = ...) -> None: ...
