"""What a person is to do, in this machine's commands: the planner speaks of annotations and of kubectl. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from persist_operator.api import names
from persist_operator.plan.actions import Plan

_PREFIX = re.escape(names.REQUEST_PREFIX)
#: What the planner says -> what to say here. `NAME` stands for the resource, groups for what the text names.
_WORDS = (
    (re.compile(rf"set the annotation {_PREFIX}restart"), "mend the input, then `persist local run NAME`"),
    (
        re.compile(rf"annotate (?:this|the) resource with {_PREFIX}([a-z-]+)=<any new value>"),
        r"run `persist local request \1 NAME`",
    ),
    (
        re.compile(r"`kubectl describe pod -l batch\.kubernetes\.io/job-name=([a-z0-9.-]+)`"),
        r"`persist local logs \1`",
    ),
    (re.compile(r"`persist admin ([a-z-]+) s[0-9a-f-]{36}"), r"`persist local admin \1 NAME"),
)


def for_this_machine(plan: Plan, name: str) -> Plan:
    """`plan` of the resource `name` with the status and the notes in the words of `persist local`."""
    notes = tuple(replace(note, message=_said(note.message, name)) for note in plan.notes)
    return replace(plan, status=_all(plan.status, name), notes=notes)


def _all(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return _said(value, name)
    if isinstance(value, Mapping):
        return {key: _all(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_all(item, name) for item in value]
    return value


def _said(text: str, name: str) -> str:
    for pattern, words in _WORDS:
        text = pattern.sub(words.replace("NAME", name), text)
    return text
