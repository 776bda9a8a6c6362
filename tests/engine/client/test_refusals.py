"""Refusals are values. Code that uses one as the positive answer gets its meaning."""

import copy
import pickle

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.write.outcomes import ProgressMismatch, UpperMismatch
from persist_engine.model.commands import OpaqueMismatch
from persist_engine.model.frontier import EMPTY, Antichain
from persist_engine.model.state import SourceProgress
from persist_engine.rows.schema import Schema
from persist_engine.shard.schemas import SchemaIncompatible

at = Antichain.of
REFUSALS = [
    (SinceAhead(at(5), 3), "read at 5 or later"),
    (SinceAhead(EMPTY, 3), "the reader has none left"),
    (UpperMismatch(at(7), at(5)), r"the upper of the shard is \{7\}, not \{5\}.* append at \{7\}"),
    (UpperMismatch(EMPTY, at(5)), "the shard is closed"),
    (ProgressMismatch(None), "nothing was appended, the stored progress is none"),
    (ProgressMismatch(SourceProgress(b"secret", at(3))), r"another one, of upper \{3\}"),
    (OpaqueMismatch(b"secret", at(3)), "another owner"),
    (SchemaIncompatible(("no x",), Schema.from_ddl("id INT")), "no x"),
]
USES = {
    "to_table": lambda answer: answer.to_table(),
    "to_arrow": lambda answer: answer.to_arrow(),
    "to_batches": lambda answer: answer.to_batches(),
    "maintenance": lambda answer: answer.maintenance,
    "schema": lambda answer: answer.schema,
    "iterating": list,
    "with": lambda answer: answer.__enter__(),
    "item": lambda answer: answer[0],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("answer", "message"), REFUSALS)
def test_a_refusal_used_as_an_answer_raises_its_meaning_and_remedy(answer, message, use):
    """Spec A.1."""
    with pytest.raises(InvalidUsage, match=rf"^this is an? {type(answer).__name__}.*{message}") as raised:
        USES[use](answer)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("answer", "message"), REFUSALS)
def test_a_refusal_is_a_value_like_any_other(answer, message):
    assert copy.deepcopy(answer) == answer
    assert pickle.loads(pickle.dumps(answer)) == answer
    assert not hasattr(answer, "to_arrow")
    assert getattr(answer, "upper", None) is None
    assert answer
    assert repr(answer).startswith(type(answer).__name__)


def test_a_with_block_over_a_refusal_ends_before_it_begins(world, shard_id):
    schema = Schema.from_ddl("id BIGINT", "name STRING")
    client = world.process()
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        writer.compare_and_append([], expected_upper=0, new_upper=10)
        with pytest.raises(InvalidUsage, match="UpperMismatch"):
            _ = writer.compare_and_append([], expected_upper=0, new_upper=10).upper
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        reader.downgrade_since(5)
        with pytest.raises(InvalidUsage, match=r"since \{5\}"), reader.snapshot(as_of=3) as snapshot:
            snapshot.to_table()
        with pytest.raises(InvalidUsage, match=r"since \{5\}"):
            list(reader.subscribe(3))
        with pytest.raises(InvalidUsage, match=r"since \{5\}"):
            reader.changes(3, 9).to_table()
