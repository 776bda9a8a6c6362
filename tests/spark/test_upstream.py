"""Spark still has the defects that this project works around. When one is gone, its workaround can go too."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "upstream" / "spark_python_pushdown.py"


def test_spark_still_applies_the_filters_of_one_scan_to_all_scans_of_a_frame(local_spark):
    spec = importlib.util.spec_from_file_location("spark_python_pushdown", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = local_spark.conf.get(script.SETTING)
    wrong = [query for query, expected, actual in script.findings(local_spark) if expected != actual]
    assert wrong, "this Spark separates the filters of scans: revisit ADR 4, point 5"
    assert local_spark.conf.get(script.SETTING) == before
