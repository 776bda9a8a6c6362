"""Removes the bucket that a store URL names, with its contents, if it exists, and the logs of its consensus store: neither store
is usable without the other. Usage: BLOB CONSENSUS.
"""

import json
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import boto3
import redis


def main(blob: str, consensus: str) -> None:
    url = urlsplit(blob)
    options = parse_qs(url.query)
    client = boto3.client("s3", endpoint_url=options["endpoint"][0], region_name=options["region"][0])
    there = url.netloc in {one["Name"] for one in client.list_buckets()["Buckets"]}
    if there:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=url.netloc):
            for one in page.get("Contents", ()):
                client.delete_object(Bucket=url.netloc, Key=one["Key"])
        client.delete_bucket(Bucket=url.netloc)
    print(json.dumps({"removed": there, "logs": remove_logs(consensus)}))


def remove_logs(consensus: str) -> int:
    url = urlsplit(consensus)
    options = parse_qs(url.query)
    password = Path(options["credentials_dir"][0], "redis-password").read_text().strip()
    store = redis.Redis(host=url.hostname, port=url.port, db=int(url.path.strip("/") or 0), password=password)
    return sum(store.delete(key) for key in store.scan_iter(match=f"{options['prefix'][0]}{{*"))


if __name__ == "__main__":
    main(*sys.argv[1:])
