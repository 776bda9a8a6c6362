"""Defects of Spark that this project works around are still there: when one is gone, the way around it can go, too."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "upstream" / "spark_python_pushdown.py"


def test_what_one_scan_pushes_still_holds_for_all_scans_of_a_frame(local_spark):
    spec = importlib.util.spec_from_file_location("spark_python_pushdown", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = local_spark.conf.get(script.SETTING)
    wrong = [query for query, expected, actual in script.findings(local_spark) if expected != actual]
    assert wrong, "this Spark keeps apart what scans push: ADR 4, point 5, may be revisited"
    assert local_spark.conf.get(script.SETTING) == before
