"""Refusals: expected answers that say no. They are values; taken for the thing that was asked for they say what they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from persist_engine.base.errors import InvalidUsage


class RefusalUsed(InvalidUsage, AttributeError):
    """An answer was used that is a refusal. An AttributeError too, so that `hasattr` and `getattr` with a default tell the
    truth.
    """


class Refusal(ABC):
    """An answer that refuses, for frozen dataclasses. Comparing and matching it is what it is for; any other use (its
    methods, iterating, a `with` block) raises InvalidUsage with `meaning`.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What was refused and why, and what to do now."""

    def refuse(self, use: str) -> NoReturn:
        """Raise RefusalUsed: `use` was made of it."""
        detail: dict[str, Any] = (
            {field.name: getattr(self, field.name) for field in fields(self)} if is_dataclass(self) else {}
        )
        raise RefusalUsed(f"this is {_articled(type(self).__name__)}, which has no {use}: {self.meaning}", **detail)

    def __iter__(self) -> NoReturn:
        self.refuse("contents to iterate over")

    def __enter__(self) -> NoReturn:
        self.refuse("`with` block")

    def __exit__(self, *_: object) -> None:
        self.refuse("`with` block")  # never reached, but `with` asks for it

    def __getitem__(self, _key: object) -> NoReturn:
        self.refuse("items")

    if not TYPE_CHECKING:  # a checker shall see what attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            # What Python itself asks for, and what a copy under way has not got yet.
            own = {field.name for field in fields(self)} if is_dataclass(self) else set()
            if name.startswith("_") or name in own:
                raise AttributeError(name)
            self.refuse(name)


def _articled(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
