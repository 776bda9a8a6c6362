"""Wishes and reports come back as they were; what others wrote in their place is refused, whatever it says."""

import base64
import contextlib
import dataclasses
import json
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.tending import (
    FORMAT,
    REPORT_BYTES_MAX,
    decode_report,
    decode_wish,
    encode_report,
    encode_wish,
)
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection, ReaderInfo
from persist_engine.model.ownership import OwnedElsewhere, Owner, Unowned
from persist_engine.model.state import CodecNames
from persist_engine.model.tending import KnownLog, NoSuchShard, NotTended, Tended, WantedHold, WantedSchema, Wish
from persist_kit.depth import draws

SHARD_ID = ShardId("s" + "0" * 8 + "-0000-0000-0000-" + "1" * 12)
HOLD_ID = CriticalReaderId("c" + SHARD_ID[1:])
counts, times = st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1)
left_out = st.integers(0, 10**9)
hexes = st.binary(max_size=32).map(bytes.hex)
words = st.text(st.characters(exclude_categories=("C",)), max_size=40)
names = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=40)
owners = st.builds(Owner, names, names, names)
codecs = st.builds(CodecNames, words, words, words, words)


def readers():
    return st.builds(
        ReaderInfo,
        id=st.just(str(HOLD_ID)),
        kind=st.sampled_from(["leased", "critical"]),
        since=st.none() | times,
        seqno=st.none() | counts,
        purpose=words,
        hostname=words,
        last_heartbeat_ms=st.none() | counts,
    )


def by_annotation(field):
    known = {
        "shard_id": st.just(str(SHARD_ID)), "readers": st.lists(readers(), max_size=6).map(tuple), "writers": st.just(()),
        "progress": st.just({}), "key_schema": st.sampled_from(["id BIGINT", "a STRING NOT NULL, b DATE"]),
        "val_schema": st.sampled_from(["", "v STRING"]), "codecs": codecs, "birth": hexes, "tag": hexes, "known_tag": st.none() | hexes,
        "since": st.none() | times, "upper": st.none() | times, "retained_since": st.none() | times, "applier_version": words,
    }  # fmt: skip
    plain = {"int": counts, "int | None": st.none() | counts, "bool": st.booleans()}
    return known[field.name] if field.name in known else plain[field.type]


inspections = st.builds(Inspection, **{one.name: by_annotation(one) for one in dataclasses.fields(Inspection)})
answers = st.one_of(
    st.builds(
        Tended,
        inspection=inspections,
        readers_left_out=left_out,
        writers_left_out=left_out,
        hold_problem=words,
        schema_problem=words,
        schema_generation=counts,
    ),
    st.just(NoSuchShard(SHARD_ID)),
    st.builds(OwnedElsewhere, st.just(SHARD_ID), owners),
    st.just(Unowned(SHARD_ID)),
    st.builds(NotTended, st.sampled_from(["StoreLost", "Unavailable"]), words),
)
wishes = st.builds(
    Wish,
    owner=owners,
    wanted=st.none() | st.just(SHARD_ID),
    proposed=st.just(SHARD_ID),
    take_over=st.none() | st.builds(OwnedElsewhere, st.just(SHARD_ID), owners),
    known=st.none() | st.builds(KnownLog, seqno=counts, birth=hexes, tag=hexes),
    schema=st.none() | st.just(("id BIGINT", "v STRING")),
    codecs=st.none() | st.tuples(words, words),
    hold=st.none()
    | st.builds(
        WantedHold,
        shard_id=st.just(SHARD_ID),
        critical_id=st.just(HOLD_ID),
        purpose=words,
        since_lag_ms=counts,
        since_min=counts,
    ),
    evolve=st.none()
    | st.builds(
        WantedSchema,
        shard_id=st.just(SHARD_ID),
        key=st.just("id BIGINT"),
        value=st.sampled_from(["", "v STRING"]),
        generation=counts,
    ),
)


@pytest.mark.slow
@given(answers)
def test_a_report_fits_and_comes_back(answer):
    """Spec 28.1."""
    text = encode_report(answer)
    assert len(text.encode()) <= REPORT_BYTES_MAX
    assert "\n" not in text
    assert decode_report(json.loads(text)) == answer


@pytest.mark.slow
@given(wishes)
def test_a_wish_comes_back(wish):
    assert decode_wish(encode_wish(wish)) == wish


def test_a_wish_has_nothing_that_a_container_would_replace():
    hold = WantedHold(shard_id=SHARD_ID, critical_id=HOLD_ID, purpose="$(HOME)", since_lag_ms=1)
    wish = Wish(owner=Owner("$(HOME)", "n", "$$(x)"), wanted=None, proposed=SHARD_ID, hold=hold)
    assert "$" not in encode_wish(wish)
    assert decode_wish(encode_wish(wish)) == wish


def tended(**changes):
    values = dict.fromkeys((one.name for one in dataclasses.fields(Inspection)), 1)
    values |= {"shard_id": str(SHARD_ID), "applier_version": "0.1.0", "key_schema": "id BIGINT", "val_schema": ""}
    values |= {"codecs": CodecNames("struct", "struct")}
    values |= {"readers": (), "writers": (), "progress": {}, "is_tombstone": False, "birth": "aa", "tag": "bb"}
    return Tended(inspection=Inspection(**{**values, "known_tag": None, **changes}))


def schema_of(fields):
    return ", ".join(f"a_column_of_a_wide_table_{number} STRING" for number in range(fields))


def test_a_wide_schema_is_packed_and_one_beyond_all_bounds_is_reported():
    wide = tended(val_schema=schema_of(400))
    text = encode_report(wide)
    assert set(json.loads(text)) == {"format", "packed"}
    assert decode_report(json.loads(text)) == wide
    drawn = random.Random(7)  # noqa: S311 - the same in every run
    letters = "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
    random_schema = ", ".join(f"c{letters[at : at + 10]}{at} STRING" for at in range(0, 20_000, 10))
    beyond = decode_report(json.loads(encode_report(tended(val_schema=random_schema))))
    assert (type(beyond), beyond.kind) == (NotTended, "ReportTooLong")


def test_regression_words_that_do_not_pack_leave_the_kind_as_it_was():
    """It was ReportTooLong, which is for good, whatever the store had said."""
    drawn = random.Random(7)  # noqa: S311 - the same in every run
    words = "".join(chr(drawn.randrange(0x4E00, 0x9FFF)) for _ in range(1500))
    decoded = decode_report(json.loads(encode_report(NotTended("Unavailable", words))))
    assert decoded == NotTended("Unavailable", words[:750])


def test_regression_where_retention_holds_since_is_a_time_as_since_is():
    """The report of a shard whose since had passed 2**63 was refused while it had a retention."""
    late = tended(since=2**63, upper=2**64 - 1, retain_ms=7, retained_since=2**63)
    assert decode_report(json.loads(encode_report(late))) == late


def test_secrets_and_control_characters_do_not_travel():
    text = encode_report(NotTended("StoreRefused", "redis://u:hunter2@h:1/0\nsaid \x1b[2J password=hunter2"))
    assert "hunter2" not in text
    assert "\\u001b" not in text


def test_another_format_is_refused_by_name():
    document = json.loads(encode_report(NoSuchShard(SHARD_ID)))
    with pytest.raises(InvalidUsage, match="release"):
        decode_report({**document, "format": FORMAT + 1})
    with pytest.raises(InvalidUsage, match="release"):
        decode_wish(
            encode_wish(Wish(owner=Owner("o", "n", "x"), wanted=None, proposed=SHARD_ID)).replace(
                f'"format": {FORMAT}', f'"format": {FORMAT + 1}'
            )
        )


GOOD = json.loads(encode_report(tended()))


@pytest.mark.parametrize("name", sorted(GOOD))
def test_no_field_takes_what_it_does_not_hold(name):
    for value in (-1, 2**70, 1.5, "\x1b[2J", "x" * 70_000, ["x"], {"a": 1}, [[[[]]]]):
        if value == ["x"] and name == "readers":
            continue
        with pytest.raises(InvalidUsage):
            decode_report({**GOOD, name: value})
    with pytest.raises(InvalidUsage):
        decode_report({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "document",
    [None, [], "x", 1, {}, {"format": FORMAT}, {**GOOD, "more": 1}, {"format": FORMAT, "packed": "eJw="}, {"format": FORMAT, "packed": 3},
     {"format": True, "answer": "NoSuchShard", "shard_id": 3}, {**GOOD, "readers": [{}]}, {**GOOD, "readers": [{}] * 100},
     {**GOOD, "readers_left_out": 2**31}, {**GOOD, "writers_left_out": 2**31}],
)  # fmt: skip
def test_what_is_no_report_is_refused(document):
    with pytest.raises(InvalidUsage):
        decode_report(document)


def test_a_report_that_unpacks_without_end_is_cut_off():
    bomb = base64.b64encode(zlib.compress(b" " * (2 << 20), 9)).decode()
    assert len(bomb) < REPORT_BYTES_MAX
    with pytest.raises(InvalidUsage, match="more than"):
        decode_report({"format": FORMAT, "packed": bomb})


@pytest.mark.slow
@settings(max_examples=draws(40))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
def test_whatever_json_is_a_value_or_a_refusal(document):
    """Spec 28.2."""
    with contextlib.suppress(InvalidUsage):
        decode_report(document)
