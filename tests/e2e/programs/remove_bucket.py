"""Removes the bucket that a store URL names, with all that is in it, where there is one. Usage: BLOB CONSENSUS."""

import json
import sys
from urllib.parse import parse_qs, urlsplit

import boto3


def main(blob: str, _consensus: str) -> None:
    url = urlsplit(blob)
    options = parse_qs(url.query)
    client = boto3.client("s3", endpoint_url=options["endpoint"][0], region_name=options["region"][0])
    there = url.netloc in {one["Name"] for one in client.list_buckets()["Buckets"]}
    if there:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=url.netloc):
            for one in page.get("Contents", ()):
                client.delete_object(Bucket=url.netloc, Key=one["Key"])
        client.delete_bucket(Bucket=url.netloc)
    print(json.dumps({"removed": there}))


if __name__ == "__main__":
    main(*sys.argv[1:])
