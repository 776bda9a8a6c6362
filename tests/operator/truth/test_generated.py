"""Resources drawn from the definitions, with all their fields, under an API server that refuses different requests: each has a
truthful status after each reconcile, and no unexpected exception escapes.
"""

import copy
import functools
import re
import re._constants as sre
import re._parser as regex

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_kit.depth import draws, generator
from persist_operator.api import conditions, names, times
from persist_operator.api.schema_check import load_schemas
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import BY_KIND, POD, ApiError
from persist_operator.settings import (
    AllowedNamespaces,
    OperatorSettings,
    StorageProfile,
    WorkloadAllow,
    WorkloadSettings,
)
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

ANY_NAMESPACE = AllowedNamespaces(names=("*",))

#: `make generated` draws ten times eight batches.
BATCHES, BATCH = draws(8, quick=2), 150
#: Realistic values, good and bad, of fields that take any text.
WRITTEN = {
    "cron": [
        "*/5 * * * *",
        "0 0 31 2 *",
        "30 2 * * *",
        "61 * * * *",
        "0 0 29 2 1",
        "@yearly   ",
        "R * * * *",
        "* * * * * *",
        "0 0 * * 1#6",
    ],
    "timeZone": ["Etc/UTC", "Europe/Berlin", "America/St_Johns", "Mars/Olympus", "../../etc/passwd", "Europe/\u0000"],
    "key": [
        "id BIGINT",
        "id BIGINT, name STRING",
        "id",
        "id NONSENSE",
        "a STRUCT<b INT>",
        "id BIGINT, id INT",
        "\u5217 STRING",
    ],
    "value": ["", "v STRING", "v DECIMAL(38,2)", "v DECIMAL(99,2)", "v ARRAY<", "id BIGINT"],
    "address": ["redis:6379", "[::1]:6379", "r:0"],
    "endpoint": ["http://s3:9000", "https://user:hunter2@s3"],
}
TEXTS = [
    "a",
    "text with 'quotes' and \n lines",
    "redis://me:hunter2@r:6379/0",
    "\u5217\U0001f600",
    "x" * 300,
    "-",
    "0",
    "${HOME}",
]
TEMPLATES = [
    {},
    {"spec": {"nodeSelector": {"disk": "ssd"}}},
    {"metadata": {"labels": {"a": "b"}}},
    {"spec": {"containers": [{"name": "x"}]}},
]
SHARDS = ["one", "two", "three"]
REFUSALS = [
    ApiError("403 pods is forbidden: exceeded quota", status=403),
    ApiError("409 the namespace is being terminated", status=409),
    ApiError("422 Pod is invalid", status=422),
    ApiError("429 too many requests", status=429),
    ApiError("500 etcdserver: leader changed", status=500),
    ApiError("timed out", status=0),
]
DENIABLE = [
    ("create", "Pod"),
    ("create", "ConfigMap"),
    ("create", "Job"),
    ("create", "Event"),
    ("delete", "Pod"),
    ("find", "Pod"),
    ("find", "Job"),
]


parsed = functools.cache(regex.parse)


class Draws:
    """Random values of a structural schema. Each optional field is present with probability 1/2."""

    def __init__(self, seed):
        self.random = generator(seed)

    def value(self, schema, name=""):
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return copy.deepcopy(self.random.choice(TEMPLATES))
        if schema.get("x-kubernetes-int-or-string"):
            return self.random.choice([self.random.randrange(1, 10**11), self.text(schema, name)])
        match schema.get("type"):
            case "object":
                return self.mapping(schema)
            case "array":
                count = self.random.randrange(schema.get("minItems", 0), 4)
                items = [self.value(schema["items"]) for _ in range(count)]
                return items if schema.get("x-kubernetes-list-type") != "set" else list(dict.fromkeys(items))
            case "boolean":
                return self.random.random() < 0.5
            case "integer":
                low, high = schema.get("minimum", 0), schema.get("maximum", 2**31 - 1)
                return self.random.choice([low, high, min(high, low + 1), self.random.randint(low, high)])
            case _:
                return self.text(schema, name)

    def mapping(self, schema):
        if "additionalProperties" in schema:
            keys = [
                f"{self.random.choice(['a.b', 'spark.x', 'path', 'header'])}{i}"
                for i in range(self.random.randrange(4))
            ]
            return {key: self.value(schema["additionalProperties"]) for key in keys}
        needed = schema.get("required", ())
        chosen = [one for one in schema.get("properties", {}) if one in needed or self.random.random() < 0.5]
        return {one: self.value(schema["properties"][one], one) for one in chosen}

    def text(self, schema, name):
        pattern = schema.get("pattern")
        choices = WRITTEN.get(name) or (TEXTS if pattern is None else ())
        fitting = [
            one
            for one in choices
            if schema.get("minLength", 0) <= len(one) <= schema.get("maxLength", 9999)
            and (pattern is None or re.search(pattern, one))
        ]
        if fitting:
            return self.random.choice(fitting)
        return self.matching(parsed(pattern or ".{9,12}"))[: schema.get("maxLength", 9999)]

    def matching(self, pieces):
        return "".join(self.piece(code, argument) for code, argument in pieces)

    def piece(self, code, argument):
        match code:
            case sre.LITERAL:
                return chr(argument)
            case sre.AT:
                return ""
            case sre.ANY:
                return self.random.choice("abc.-/ 9")
            case sre.NOT_LITERAL:
                return self.random.choice([one for one in "abc.-?=&9" if one != chr(argument)])
            case sre.IN:
                if argument[0][0] is sre.NEGATE:
                    return self.random.choice("abc.-?=&9")
                return self.piece(*self.random.choice(argument))
            case sre.RANGE:
                return chr(self.random.randint(*argument))
            case sre.MAX_REPEAT:
                low, high, inner = argument
                return "".join(self.matching(inner) for _ in range(self.random.randint(low, min(high, low + 5))))
            case sre.SUBPATTERN:
                return self.matching(argument[3])
            case sre.BRANCH:
                return self.matching(self.random.choice(argument[1]))
            case _:
                raise AssertionError(f"no way to draw {code}")


#: Fields of a sink's envelope, and the types for which they have a meaning.
MEANT_FOR = {
    "orderColumn": ("Upsert", "Debezium"),
    "deleteColumn": ("Upsert",),
    "timestampColumn": ("Append", "Diff"),
    "diffColumn": ("Diff",),
}


def agree(source, spec, schema):
    """Makes the fields of a sink agree that rarely do by chance. Most of the time went into drawing sinks that were then refused."""
    if spec.get("mode", "Once") == "Once" or spec.get("writeMode") == "ReadOnly":
        spec.pop("freshness", None)
    elif "freshness" in spec:
        spec["freshness"]["targetSeconds"] += spec.get("commitIntervalSeconds", 0)
    asked = spec["input"]["type"].lower()
    for block in {"format", "shard"} - {asked}:
        spec["input"].pop(block, None)
    if asked in ("format", "shard") and asked not in spec["input"]:
        spec["input"][asked] = source.value(schema["properties"]["input"]["properties"][asked])
    if spec.get("mode") != "Streaming":
        spec["input"].get("shard", {}).pop("refresh", None)
    for field, types in MEANT_FOR.items():
        if spec["envelope"]["type"] not in types:
            spec["envelope"].pop(field, None)
    if (limits := spec.get("restart", {})).keys() >= {"backoffSeconds", "maxBackoffSeconds"}:
        ordered = sorted((limits["backoffSeconds"], limits["maxBackoffSeconds"]))
        limits["backoffSeconds"], limits["maxBackoffSeconds"] = ordered
    dynamic, scheduler = (spec.get("spark", {}).get(one) for one in ("dynamicAllocation", "scheduler"))
    if dynamic is not None:
        limits = sorted(source.random.sample(range(1, 100), 2))
        names_of = ("minExecutors", "maxExecutors")
        dynamic.update(dict(zip(names_of, limits, strict=True)) if dynamic["enabled"] else {})
        for one in names_of if not dynamic["enabled"] else ():
            dynamic.pop(one, None)
    if scheduler is not None and scheduler["name"] == "Default":
        scheduler.pop("queue", None)
    elif scheduler is not None:
        scheduler["queue"] = "team"


def drawn(source, kind, number):
    """A resource that the API server would accept."""
    schemas = load_schemas()
    spec_schema = schemas.schema(kind)["properties"]["spec"]
    while True:
        spec = source.mapping(spec_schema)
        spec.setdefault("suspend", False)
        spec["suspend"] = spec["suspend"] and source.random.random() < 0.3
        if kind == "PersistShard":
            spec.pop(source.random.choice(["storage", "storageProfile"]), None)
            if source.random.random() < 0.5:
                spec.pop("storage", None)
                spec["storageProfile"] = "default"
            if spec.get("reclaimPolicy") != "Purge":
                spec.pop("deletionConfirmation", None)
        else:
            spec["shardRef"]["name"] = source.random.choice(["sound", "sound", "sound", *SHARDS])
            if (spec.get("mode") == "Scheduled") != ("schedule" in spec):
                spec["mode"], _ = "Once", spec.pop("schedule", None)
            if spec.get("mode") == "Streaming":
                spec.get("timeouts", {}).pop("activeDeadlineSeconds", None)
            else:
                spec.pop("commitIntervalSeconds", None)
                spec.pop("rollout", None)
                spec.get("restart", {}).pop("resetAfterSeconds", None)
            agree(source, spec, spec_schema)
        name = f"{source.random.choice('abc')}-{number}"
        if kind == "PersistShard" and number % 20 < len(SHARDS) * 2:
            name = SHARDS[number % 20 // 2]
        metadata = {"namespace": "team", "name": name, "generation": 1, "uid": f"uid-{number}"}
        resource = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}
        if schemas.check(resource) == []:
            return schemas.default(resource)


class World:
    """One batch: a cluster, a store, one operator."""

    def __init__(self, seed):
        self.draws, self.env = Draws(seed), SeededEnv(seed, start_ms=1_790_000_000_000 + seed * 7_654_321)
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        location = Location(blob=f"mem:generated{seed}", consensus=f"mem:generated{seed}")
        profile = StorageProfile(allowed_namespaces=ANY_NAMESPACE, blob=location.blob, consensus=location.consensus)
        self.settings = OperatorSettings(
            storage_profiles={"default": profile}, workload=WorkloadSettings(allow=WorkloadAllow(secrets=("*",)))
        )
        # All stores that resources name are this one.
        self.bridge = Bridge(self.settings, env=self.env, open_client=lambda _: PersistClient.open(location))
        self.reconciler = Reconciler(
            self.cluster, self.bridge, self.settings, self.env, OperatorMetrics(CollectorRegistry())
        )

    def look(self, key):
        """(whether an action was refused, whether an observation was). Only the refusal of an observation may escape."""
        before = self.cluster.denied.copy()
        try:
            self.reconciler.reconcile(key)
        except ApiError:
            assert sum((self.cluster.denied - before).values()) > 0
        now = self.cluster.denied - before
        return any(verb != "find" and kind != "Event" for verb, kind in now), any(verb == "find" for verb, _ in now)

    def move_pods(self):
        """Change the phases of pods as kubelets do."""
        for pod in self.cluster.find(POD, "team", {}):
            if self.draws.random.random() < 0.5:
                continue
            phase = self.draws.random.choice(["Pending", "Running", "Succeeded", "Failed"])
            ended = {"exitCode": 0 if phase == "Succeeded" else self.draws.random.choice([1, 70, 72]), "message": "{}"}
            state = {
                "Pending": {"waiting": {"reason": "ImagePullBackOff", "message": "none"}},
                "Running": {"running": {}},
            }
            container = {"name": "driver", "state": state.get(phase, {"terminated": ended})}
            status = {"phase": phase, "containerStatuses": [container]}
            self.cluster.edit(
                POD, "team", pod["metadata"]["name"], lambda one, status=status: one.update(status=status)
            )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BATCHES))
def test_generated_resources_have_truthful_statuses(seed, kstatus, kstatus_twin):
    world, resources = World(seed), []
    try:
        sound = drawn(world.draws, "PersistShard", 1)
        sound["metadata"]["name"], sound["metadata"]["uid"] = "sound", "uid-sound"
        sound["spec"].update(schema={"key": "id BIGINT", "value": ""}, storageProfile="default")
        for unsound in ("storage", "shardId"):
            sound["spec"].pop(unsound, None)
        world.cluster.create(BY_KIND["PersistShard"], sound)
        for _ in range(3):
            world.look(Key("PersistShard", "team", "sound"))
        for number in range(BATCH):
            kind = ("PersistShard", "SparkSink")[number % 2]
            resource = drawn(world.draws, kind, number)
            resource["metadata"]["creationTimestamp"] = times.to_text(world.env.now_ms() - 3_600_000)
            key = Key(kind, "team", resource["metadata"]["name"])
            if not world.cluster.create(BY_KIND[kind], resource):
                remove(world, kind, key.name)
                world.cluster.create(BY_KIND[kind], resource)
            if world.draws.random.random() < 0.4:
                world.cluster.deny[world.draws.random.choice(DENIABLE)] = world.draws.random.choice(REFUSALS)
            live(world, key, kstatus_twin)
            world.cluster.deny.clear()
            world.env.advance_ms(world.draws.random.choice([1000, 130_000, 4_000_000]))
            world.move_pods()
            live(world, key, kstatus_twin)
            resources.append(world.cluster.get(BY_KIND[kind], "team", key.name))
            if key.name not in SHARDS:
                remove(world, kind, key.name)
                world.look(key)
            if number % 20 < 2:
                assert load_schemas().check(resources[-1]) == []
    finally:
        world.bridge.close()
    assert kstatus(resources) == [kstatus_twin(one) for one in resources]
    assert "hunter2" not in str([one["status"] for one in resources])


def remove(world, kind, name):
    """Delete the resource without its shard: its finalizer is removed first, as by hand."""
    world.cluster.edit(BY_KIND[kind], "team", name, lambda one: one["metadata"].update(finalizers=[]))
    world.cluster.delete(BY_KIND[kind], "team", name)


def live(world, key, kstatus_twin):
    """Reconcile twice and check the status each time. The second reconcile must show a refusal of the first."""
    refused = False
    for _ in range(2):
        acted, looked = world.look(key)
        resource = world.cluster.get(BY_KIND[key.kind], "team", key.name)
        status = resource.get("status")
        assert status, key
        if looked and "conditions" not in status:  # The first observation was refused: the definition's default stands.
            assert kstatus_twin(resource) == "InProgress"
            continue
        outcome = [one for one in conditions.OUTCOME if conditions.is_true(status, one)]
        assert len(outcome) == 1, (key, status["conditions"])
        assert (
            kstatus_twin(resource) == {"Ready": "Current", "Reconciling": "InProgress", "Stalled": "Failed"}[outcome[0]]
        )
        if refused:
            assert outcome != ["Ready"], (key, status["conditions"])
        refused = acted or (refused and looked)
        world.env.advance_ms(1000)
