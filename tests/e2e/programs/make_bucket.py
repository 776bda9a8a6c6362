"""Creates the bucket that a store URL names, if it does not exist. Usage: BLOB CONSENSUS."""

import json
import sys
from urllib.parse import parse_qs, urlsplit

import boto3


def main(blob: str, _consensus: str) -> None:
    url = urlsplit(blob)
    options = parse_qs(url.query)
    boto3.client("s3", endpoint_url=options["endpoint"][0], region_name=options["region"][0]).create_bucket(
        Bucket=url.netloc
    )
    print(json.dumps({"bucket": url.netloc}))


if __name__ == "__main__":
    main(*sys.argv[1:])
