"""An extension of the reference's generator: examples of docstrings are shown as code. As plain text they would be quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: An example and what it prints, up to an empty line or the end.
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)
#: What only the runner of examples reads.
OPTION = re.compile(r"  # doctest: .*$", re.MULTILINE)


class Examples(griffe.Extension):
    """Put examples into fences."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """See griffe."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{OPTION.sub('', found[0])}\n```", obj.docstring.value
            )
