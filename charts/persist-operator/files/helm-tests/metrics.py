"""Scrapes the operator's metrics at the URL that is the argument. Exits with a message when the series of an operator are missing."""

import sys
import urllib.request

NAMES = ("persist_operator_reconcile_total", "persist_operator_leader")
url = sys.argv[1]
for path in ("/healthz", "/metrics"):
    with urllib.request.urlopen(url + path, timeout=10) as answer:  # noqa: S310 - a URL of the chart
        body = answer.read().decode()
missing = [name for name in NAMES if name not in body]
sys.exit(f"no {missing} among the metrics of {url}" if missing else 0)
