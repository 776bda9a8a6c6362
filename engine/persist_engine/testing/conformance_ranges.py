"""The laws of ranged reads. `conformance.BlobTests` inherits them."""

from __future__ import annotations

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.extras import needs_extra
from persist_engine.storage.blob import Blob

with needs_extra("testing", "a conformance suite"):
    import pytest

VALUE = bytes(range(256)) * 1024


class RangeTests:
    """The laws of `Blob.get_range`. The fixtures `blob` and `other` come from BlobTests."""

    @pytest.mark.parametrize(("start", "size"), [(0, 1), (0, len(VALUE)), (300, 70_000), (len(VALUE) - 1, 1)])
    def test_a_range_is_exactly_its_bytes(self, blob: Blob, other: Blob, start: int, size: int) -> None:
        """This holds wherever the range begins and ends."""
        blob.set("s1/p1", VALUE)
        assert other.get_range("s1/p1", start, size) == VALUE[start : start + size]

    def test_a_range_past_the_end_is_cut(self, blob: Blob) -> None:
        """The answer has the bytes that exist, which may be none."""
        blob.set("s1/p1", VALUE)
        assert blob.get_range("s1/p1", len(VALUE) - 3, 10) == VALUE[-3:]
        assert blob.get_range("s1/p1", len(VALUE), 10) == b""
        assert blob.get_range("s1/p1", len(VALUE) + 99, 1) == b""

    def test_a_range_of_a_missing_object_is_none(self, blob: Blob) -> None:
        """The object itself is None, too. The same holds after it was deleted."""
        assert blob.get_range("s1/p1", 0, 5) is None
        blob.set("s1/p1", VALUE)
        blob.delete("s1/p1")
        assert blob.get_range("s1/p1", 0, 5) is None

    @pytest.mark.parametrize(("start", "size"), [(-1, 5), (0, 0), (3, -2)])
    def test_what_is_no_range_is_refused(self, blob: Blob, start: int, size: int) -> None:
        """A store would count a negative start from the end."""
        blob.set("s1/p1", VALUE)
        with pytest.raises(InvalidUsage, match="no range of"):
            blob.get_range("s1/p1", start, size)
