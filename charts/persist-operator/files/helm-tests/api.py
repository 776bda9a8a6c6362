"""Asks the API server, as the account of this pod: `rights JSON` or `samples NAMESPACE JSON`. Exits with a message when an answer is wrong.

API_SERVER and ACCOUNT replace the address of the API server and the folder of the token.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRON = os.environ  # noqa: TID251 - a program of its own
ACCOUNT = Path(ENVIRON.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def address() -> str:
    """The URL of the API server."""
    host = ENVIRON.get("KUBERNETES_SERVICE_HOST", "")
    host = f"[{host}]" if ":" in host else host
    return ENVIRON.get("API_SERVER") or f"https://{host}:{ENVIRON.get('KUBERNETES_SERVICE_PORT', '443')}"


def post(path: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The code and the body of the answer to a POST."""
    url, token = address() + path, (ACCOUNT / "token").read_text().strip()
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if url.startswith("https") else None
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(document).encode(), headers)  # noqa: S310 - see address
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        return error.code, json.loads(text) if text.startswith("{") else {"message": text}


def attributes(scopes: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """What a review asks for each verb of each rule of `scopes`, a list of {namespace, rules} with rules as a Role has them."""
    for scope in scopes:
        for rule in scope["rules"]:
            name = (rule.get("resourceNames") or [""])[0]
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    plural, _, sub = resource.partition("/")
                    for verb in rule["verbs"]:
                        asked = {"namespace": scope["namespace"], "group": group, "resource": plural}
                        yield {**asked, "subresource": sub, "verb": verb, "name": name}


def holds(asked: dict[str, str]) -> bool:
    """Whether the account of this pod has the right."""
    spec = {"resourceAttributes": {name: value for name, value in asked.items() if value}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}, "spec": spec}
    code, answer = post(REVIEWS, review)
    if code >= 300:
        sys.exit(f"the API server does not review rights: {code} {answer.get('message')}")
    return (answer.get("status") or {}).get("allowed") is True


def shown(asked: dict[str, str]) -> str:
    """The right as a text."""
    resource = "/".join(filter(None, (asked["group"], asked["resource"], asked["subresource"])))
    return f"{asked['verb']} {resource} in {asked['namespace'] or 'all namespaces'}"


def rights(text: str) -> list[str]:
    """The problems with the rights of a JSON object: the account lacks one of `wanted`, or has one of `unwanted`."""
    document = json.loads(text)
    lacking = [one for one in attributes(document["wanted"]) if not holds(one)]
    beyond = [one for one in attributes(document["unwanted"]) if holds(one)]
    return [f"the operator may not {shown(one)}: see templates/rbac.yaml" for one in lacking] + [
        f"the operator may {shown(one)}, and must not: a role beside those of the chart says so" for one in beyond
    ]


def samples(namespace: str, text: str) -> list[str]:
    """The problems with a JSON list of {plural, accepted, resource}, which the API server judges in a dry run."""
    problems = []
    for sample in json.loads(text):
        resource = sample["resource"]
        path = f"/apis/{resource['apiVersion']}/namespaces/{namespace}/{sample['plural']}"
        code, answer = post(f"{path}?dryRun=All&fieldValidation=Strict", resource)
        name, said = f"{resource['kind']} {resource['metadata']['name']}", f"{code} {answer.get('message')}"
        if sample["accepted"] and code >= 300:
            problems.append(f"{name} is refused: {said}")
        if not sample["accepted"] and code != 422:
            problems.append(f"{name} is not refused as invalid: {said}; are the resource definitions old?")
    return problems


found = {"rights": rights, "samples": samples}[sys.argv[1]](*sys.argv[2:])
sys.exit("\n".join(found) if found else 0)
