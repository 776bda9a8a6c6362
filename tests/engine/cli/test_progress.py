"""How much of its files a command has read, which a terminal shows as a bar."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine.cli.tables import files

ROWS = 200_000


def written(path, kind):
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(ROWS), "name": [f"n{number}" for number in range(ROWS)]}), path)
    elif kind == "csv":
        path.write_text("id,name\n" + "".join(f"{number},n{number}\n" for number in range(ROWS)))
    else:
        path.write_text("".join(f'{{"id": {number}, "name": "n{number}"}}\n' for number in range(ROWS)))
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_reading_files_shows_the_share_of_their_bytes(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(files, "JSON_BLOCK_BYTES", 1 << 20)
    paths = [written(tmp_path / f"{number}.{kind}", kind) for number in range(2)]
    size = sum(path.stat().st_size for path in paths)
    shown = []
    wanted = pa.schema([("id", pa.int64()), ("name", pa.string())])
    for _ in files.batches_of([str(path) for path in paths], None, wanted, lambda *each: shown.append(each)):
        pass
    rows, read, total = zip(*shown, strict=True)
    assert (rows[-1], list(rows)) == (2 * ROWS, sorted(rows))
    assert set(total) == {size}
    assert list(read) == sorted(read), "it never goes back"
    assert size / 2 < read[-1] <= size
    assert len(set(read)) > 1
