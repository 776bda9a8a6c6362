"""`persist maintain tend`: a pod beside the stores carries out a request of an operator that does not connect to them itself."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from persist_engine.base.errors import PersistError
from persist_engine.cli.options import AsJson, ReportFile, Stores, check_can_write, connected, on_stores
from persist_engine.cli.output import print_json, print_pairs


@on_stores
def tend(
    *,
    wish: Annotated[
        str, typer.Option("--wish", metavar="JSON", help="Owner, shard, schema and hold, as operators write it.")
    ],
    report: ReportFile = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Claim a shard for an owner, create it if it is to be, hold its since, and report its condition. For operators; safe to repeat."""
    from persist_engine.client.tend import tend as carry_out
    from persist_engine.codec.tending import decode_wish, encode_report
    from persist_engine.model.tending import NotTended

    check_can_write(report, "--report")
    try:
        asked = decode_wish(wish)
        with connected(stores, create=True) as client:
            answer = encode_report(carry_out(client, asked))
    except PersistError as error:
        cause = error.__cause__
        text = f"{error}" if cause is None or str(cause) in str(error) else f"{error}: {cause}"
        if report is not None:
            report.write_text(encode_report(NotTended(error.kind.value, text)) + "\n")
        raise
    if report is not None:
        report.write_text(answer + "\n")
    document = json.loads(answer)
    if as_json:
        print_json(document)
    else:
        print_pairs(document)
