"""Copies of what the watches bring: which copy stays, what an absence means, what a list forgets."""

import pytest
from persist_operator.api import names
from persist_operator.cluster.informed import CHILDREN, KEPT, Informed
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD


def shard(version, name="flights", **spec):
    return {
        "kind": "PersistShard",
        "metadata": {"namespace": "team", "name": name, "resourceVersion": version, "managedFields": [{"a": "b" * 50}]},
        "spec": spec,
    }


def job(version, name="job", owner="uid", labels=CHILDREN):
    head = {"namespace": "team", "name": name, "resourceVersion": version}
    return {"kind": "Job", "metadata": {**head, "labels": {**labels, names.LABEL_OWNER_UID: owner}}}


@pytest.fixture
def informed():
    """One that has a complete, empty list of each kind."""
    made = Informed()
    for kind in KEPT:
        made.end_list(made.begin_list(kind, None), set(), is_last=True)
    return made


def spec_of(informed):
    found = informed.resource(PERSIST_SHARD, "team", "flights")
    return None if found is None else found["spec"]


@pytest.mark.parametrize(
    ("first", "second", "is_news", "kept"),
    [
        ("5", "7", True, 2),
        ("7", "5", False, 1),
        ("5", "5", False, 1),
        # As text, 10 would come before 9.
        ("9", "10", True, 2),
        ("a", "b", True, 2),
        ("5", "a", True, 2),
        ("", "", True, 2),
    ],
)
def test_the_later_version_stays_and_only_that_is_news(informed, first, second, is_news, kept):
    assert informed.note(shard(first, n=1))
    assert informed.note(shard(second, n=2)) is is_news
    assert spec_of(informed) == {"n": kept}


@pytest.mark.parametrize(
    ("came", "stored", "is_news"),
    [
        ([], "6", False),
        (["6"], "6", False),
        (["6", "6"], "6", False),
        (["5"], "6", False),
        (["6", "7"], "6", True),
        (["7"], "6", True),
        ([], None, False),
        (["6"], None, True),
        (["4", "5"], None, False),
    ],
)
def test_what_comes_during_an_own_write_is_news_at_its_end_if_it_is_not_that_write(informed, came, stored, is_news):
    informed.note(shard("5", n=5))
    informed.begin_write("PersistShard", "team", "flights")
    assert [informed.note(shard(version, n=int(version))) for version in came] == [False] * len(came)
    assert informed.note(shard("6", name="other"))
    answer = None if stored is None else shard(stored, n=int(stored))
    assert informed.end_write("PersistShard", "team", "flights", answer) is is_news
    assert spec_of(informed) == {"n": max(int(one) for one in ["5", *came, stored] if one is not None)}
    assert informed.note(shard("8", n=8))


def test_a_copy_is_a_value_without_managed_fields(informed):
    informed.note(shard("1", n=1))
    informed.resource(PERSIST_SHARD, "team", "flights")["spec"]["n"] = 2
    assert spec_of(informed) == {"n": 1}
    assert "managedFields" not in informed.resource(PERSIST_SHARD, "team", "flights")["metadata"]


def test_nothing_is_known_of_a_kind_before_its_first_complete_list():
    informed = Informed()
    informed.note(shard("1"))
    informed.note(job("2"))
    assert informed.resource(PERSIST_SHARD, "team", "flights") is None
    assert informed.children(JOB, "uid") is None
    for number, namespace in enumerate(("other", "team")):
        assert informed.children(JOB, "uid") is None, "one of two namespaces was listed"
        informed.end_list(informed.begin_list(JOB, namespace), {("team", "job")}, is_last=number == 1)
    assert [one["metadata"]["name"] for one in informed.children(JOB, "uid")] == ["job"]
    assert informed.resource(PERSIST_SHARD, "team", "flights") is None


@pytest.mark.parametrize(("deleted", "stays"), [("6", False), ("5", False), ("4", True)])
def test_a_deletion_forgets_the_resource_and_not_a_later_one_of_its_name(informed, deleted, stays):
    informed.note(shard("5"))
    informed.note_gone(shard(deleted))
    assert (spec_of(informed) is not None) is stays


def test_a_list_forgets_what_it_lacks_unless_that_came_while_it_was_read(informed):
    informed.note(shard("1", "gone"))
    informed.note(shard("2", "stays"))
    informed.note(shard("3", "changed"))
    listing = informed.begin_list(PERSIST_SHARD, None)
    informed.note(shard("4", "changed"))
    informed.note(shard("5", "born"))
    informed.end_list(listing, {("team", "stays")}, is_last=True)
    known = [one for one in ("gone", "stays", "changed", "born") if informed.resource(PERSIST_SHARD, "team", one)]
    assert known == ["stays", "changed", "born"]


def test_a_list_of_one_namespace_forgets_nothing_of_another(informed):
    informed.note(shard("1"))
    informed.end_list(informed.begin_list(PERSIST_SHARD, "other"), set(), is_last=True)
    assert spec_of(informed) is not None


def test_children_are_found_by_their_owner_until_they_are_gone(informed):
    informed.note(job("1", "a", "one"))
    informed.note(job("2", "b", "two"))
    informed.note(job("3", "c", "one"))
    informed.note(job("4", "driver", "one", labels={names.LABEL_MANAGED_BY: names.MANAGER}))
    assert [one["metadata"]["name"] for one in informed.children(JOB, "one")] == ["a", "c"]
    assert informed.children(POD, "one") == []
    informed.note_gone(job("5", "a", "one"))
    informed.note(job("6", "c", "two"))
    assert informed.children(JOB, "one") == []
    assert [one["metadata"]["name"] for one in informed.children(JOB, "two")] == ["b", "c"]


def test_children_that_were_changed_are_unknown_until_one_is_seen(informed):
    informed.doubt("one")
    assert informed.children(JOB, "one") is None
    assert informed.children(JOB, "two") == []
    informed.note(job("1", "b", "two"))
    assert informed.children(JOB, "one") is None
    informed.note(job("2", "a", "one"))
    assert len(informed.children(JOB, "one")) == 1
    informed.doubt("one")
    informed.note_gone(job("3", "a", "one"))
    assert informed.children(JOB, "one") == []


@pytest.mark.parametrize("odd", [{}, {"kind": "PersistShard"}, {"kind": "Event", "metadata": {}}, {"metadata": None}])
def test_any_event_can_be_noted(informed, odd):
    informed.note(odd)
    informed.note_gone(odd)
