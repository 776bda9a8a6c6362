"""Resources are accepted and refused as the API server would, from the same CRD files."""

import re
from pathlib import Path

import pytest
import yaml
from persist_operator.api.schema_check import crd_dir, load_schemas, printer_columns

CASES = yaml.load(Path(__file__).with_name("crd_cases.yaml").read_text(), yaml.CSafeLoader)
SCHEMAS = load_schemas()
ONCE = {
    "shardRef": {"name": "a"},
    "input": {"type": "Format", "format": {"name": "csv"}},
    "envelope": {"type": "Append"},
}


def resource(case, spec, status=None):
    made = {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": case["kind"],
        "metadata": {"name": case.get("metadata_name", "n")},
        "spec": spec,
    }
    return made if status is None else {**made, "status": status}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_policy_answers_the_case_as_the_api_server_does(case):
    old = resource(case, case["old"], case.get("status")) if "old" in case else None
    errors = SCHEMAS.check(resource(case, case["new"], case.get("status")), old)
    if case["want"] == "ok":
        assert errors == []
    else:
        assert any(case["want"] in str(error) for error in errors), errors


def leaves(schema, path):
    """The path of each field below `schema` that is no object of fields; `[]` for the items of a list."""
    if schema.get("type") == "array" and "properties" in schema["items"]:
        yield from leaves(schema["items"], f"{path}[]")
    elif "properties" in schema:
        for name, child in schema["properties"].items():
            yield from leaves(child, f"{path}.{name}")
    else:
        yield path, schema


FIELDS = {
    kind: dict(leaves(SCHEMAS.schema(kind)["properties"]["spec"], "spec")) for kind in ("PersistShard", "SparkSink")
}


def is_set(value, path):
    """Whether the field at `path` of `value` is there, in at least one item of each list on the way."""
    name, _, rest = path.partition(".")
    inner = value.get(name.removesuffix("[]")) if isinstance(value, dict) else None
    items = inner if name.endswith("[]") and isinstance(inner, list) else [inner]
    return inner is not None and (not rest or any(is_set(item, rest) for item in items))


def refused_fields(case):
    """The fields that an error of the case is about: by the path of the error, or by their names in the message of a rule."""
    old = resource(case, case["old"], case.get("status")) if "old" in case else None
    found = set()
    for error in SCHEMAS.check(resource(case, case["new"], case.get("status")), old):
        where = re.sub(r"\[\d+\]|\.\d+(?=\.|$)", "[]", error.path)
        for path in FIELDS[case["kind"]]:
            is_named = re.search(rf"\b{path.rpartition('.')[2]}\b", error.message) is not None
            is_near = path.startswith(where) and any(is_set({"spec": case.get(one)}, path) for one in ("new", "old"))
            if where.startswith(path) or (is_named and is_near):
                found.add(path)
    return found


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, fields in FIELDS.items() for path in fields])
def test_every_field_is_bounded(kind, path):
    schema = FIELDS[kind][path]
    if schema.get("type") == "array":
        schema = schema["items"]
    elif isinstance(schema.get("additionalProperties"), dict):
        schema = schema["additionalProperties"]
    if schema.get("type") == "integer":
        assert {"minimum", "maximum"} <= schema.keys()
    elif schema.get("type") == "string" or schema.get("x-kubernetes-int-or-string"):
        assert "maxLength" in schema or "enum" in schema
    else:
        assert schema["type"] == "boolean" or path.endswith(".template")


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_has_a_case_that_is_accepted_and_one_that_is_refused(kind):
    cases = [case for case in CASES if case["kind"] == kind]
    accepted = [case["new"] for case in cases if case["want"] == "ok"]
    assert [path for path in FIELDS[kind] if not any(is_set({"spec": spec}, path) for spec in accepted)] == []
    refused = set().union(*(refused_fields(case) for case in cases if case["want"] != "ok"))
    assert [path for path in FIELDS[kind] if path not in refused] == []


def test_unknown_fields_are_errors_with_their_path():
    errors = SCHEMAS.check(resource({"kind": "SparkSink"}, {**ONCE, "spark": {"driver": {"core": 2}}}))
    assert [error.path for error in errors] == ["spec.spark.driver.core"]
    assert "cores" in str(errors[0])


def test_free_templates_take_any_field():
    spec = {**ONCE, "spark": {"driver": {"template": {"spec": {"anything": [1]}}}}}
    assert SCHEMAS.check(resource({"kind": "SparkSink"}, spec)) == []


def test_duplicates_in_sets_are_refused():
    errors = SCHEMAS.check(resource({"kind": "SparkSink"}, {**ONCE, "spark": {"imagePullSecrets": ["a", "a"]}}))
    assert [error.path for error in errors] == ["spec.spark.imagePullSecrets[1]"]


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"apiVersion": "v1", "kind": "SparkSink", "metadata": {"name": "n"}}, "apiVersion"),
        ({"apiVersion": "persistshard.io/v1alpha1", "kind": "Other", "metadata": {"name": "n"}}, "kind"),
        ({"apiVersion": "persistshard.io/v1alpha1", "kind": "SparkSink", "spec": {}}, "metadata.name"),
    ],
)
def test_wrong_api_versions_and_kinds_are_named(wrong, path):
    assert [error.path for error in SCHEMAS.check(wrong)] == [path]


def test_a_name_that_yaml_reads_as_a_number_is_named():
    (error,) = SCHEMAS.check({"apiVersion": "persistshard.io/v1alpha1", "kind": "SparkSink", "metadata": {"name": 123}})
    assert (error.path, error.message) == ("metadata.name", "must be a string, not 123: put it in quotes")


def test_defaults_fill_in_and_are_idempotent():
    once = SCHEMAS.default(resource({"kind": "SparkSink"}, ONCE))
    assert once["spec"]["restart"]["maxConsecutiveFailures"] == 5
    assert once["spec"]["spark"]["executor"] == {"instances": 1, "cores": 1, "memory": "1Gi"}
    assert SCHEMAS.default(once) == once
    assert "restart" not in ONCE


def definitions():
    return [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(crd_dir().glob("*.yaml"))]


def nodes(schema, path=""):
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            yield from nodes(schema[inner], f"{path}[{inner}]")


@pytest.mark.parametrize("crd", definitions(), ids=lambda crd: crd["spec"]["names"]["kind"])
def test_definitions_are_structural_and_described(crd):
    """Definitions satisfy the API server, `kubectl explain` and GitOps tools."""
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, node in nodes(schema):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert "$ref" not in node, path
        assert not ({"oneOf", "allOf", "not"} & set(node)), path
        assert node.get("additionalProperties") is not False, path
        if node.get("type") == "array":
            assert "items" in node, path
            assert "maxItems" in node, path
            assert node["x-kubernetes-list-type"] in {"atomic", "set", "map"}, path
            assert not any("default" in child for _, child in nodes(node["items"])), (
                f"{path}: default inside a list item"
            )
        if node.get("default") == {}:
            assert all(
                "oldSelf" in rule["rule"] or "has(" in rule["rule"] for rule in node.get("x-kubernetes-validations", ())
            ), path
        if "[" not in path and path not in {"", ".apiVersion", ".kind", ".metadata"}:
            assert node.get("description"), f"{path}: no description"
    status = schema["properties"]["status"]["properties"]
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert "status" in crd["spec"]["versions"][0]["subresources"]


@pytest.mark.parametrize("crd", definitions(), ids=lambda crd: crd["spec"]["names"]["kind"])
def test_every_validation_rule_has_a_message_that_names_the_change(crd):
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = [rule for _, node in nodes(schema) for rule in node.get("x-kubernetes-validations", ())]
    assert rules
    for rule in rules:
        assert len(rule["message"].split()) >= 4, rule


@pytest.mark.parametrize("plural", ["persistshards", "sparksinks"])
def test_selectable_fields_are_plain_values_of_the_schema(plural):
    """The API server refuses a definition whose selectable field is a list, a map or a number of no integer type."""
    definition = yaml.load((crd_dir() / f"{plural}.yaml").read_text(), yaml.CSafeLoader)
    (version,) = definition["spec"]["versions"]
    found = {}
    for one in version["selectableFields"]:
        schema = version["schema"]["openAPIV3Schema"]
        for name in one["jsonPath"].removeprefix(".").split("."):
            schema = schema["properties"][name]
        found[one["jsonPath"]] = schema["type"]
    assert set(found.values()) <= {"string", "boolean", "integer"}
    assert len(found) == 2


def test_a_process_parses_each_definition_once(monkeypatch):
    """It takes a command of `persist local` longer than most of what it does."""
    monkeypatch.delattr(yaml, "load")  # SCHEMAS has them
    assert all(map(printer_columns, SCHEMAS.kinds))
