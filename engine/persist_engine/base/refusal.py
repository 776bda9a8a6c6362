"""Refusals: expected negative answers, returned as values. Code that mistakes one for the requested object gets a clear error. This module
also has the base class of objects that cannot leave their process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from persist_engine.base.errors import InvalidUsage


class RefusalUsed(InvalidUsage, AttributeError):
    """A refusal was used as if it were the requested object. Also an AttributeError, so that `hasattr` and `getattr` with a
    default give correct results.
    """


class Refusal(ABC):
    """Base class for frozen dataclasses that refuse a request. Callers compare or match a refusal. Any other use (methods of
    the requested object, iteration, a `with` block) raises InvalidUsage with `meaning`.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def meaning(self) -> str:
        """States what was refused, why, and what to do now."""

    def refuse(self, use: str) -> NoReturn:
        """Raise RefusalUsed for the attempted `use`."""
        detail: dict[str, Any] = (
            {field.name: getattr(self, field.name) for field in fields(self)} if is_dataclass(self) else {}
        )
        raise RefusalUsed(f"this is {_articled(type(self).__name__)}, which has no {use}: {self.meaning}", **detail)

    def __iter__(self) -> NoReturn:
        self.refuse("contents to iterate over")

    def __enter__(self) -> NoReturn:
        self.refuse("`with` block")

    def __exit__(self, *_: object) -> None:
        self.refuse("`with` block")  # unreachable, but the `with` statement requires the method

    def __getitem__(self, _key: object) -> NoReturn:
        self.refuse("items")

    if not TYPE_CHECKING:  # a type checker must see the real attributes

        def __getattr__(self, name: str) -> NoReturn:
            # Raise a plain AttributeError for names that Python itself looks up, and for fields that an unfinished copy has not set yet.
            own = {field.name for field in fields(self)} if is_dataclass(self) else set()
            if name.startswith("_") or name in own:
                raise AttributeError(name)
            self.refuse(name)


def _articled(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


class Bound:
    """A base of classes whose objects cannot be sent to another process. `elsewhere` says what to do there instead."""

    _elsewhere: ClassVar[str] = ""

    def __init_subclass__(cls, *, elsewhere: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._elsewhere = elsewhere or cls._elsewhere

    def __reduce__(self) -> NoReturn:
        """Raises InvalidUsage for pickle and copy."""
        name = type(self).__name__
        raise InvalidUsage(
            f"{name}: it has connections of this process, and cannot be pickled or copied; {self._elsewhere}"
        )
