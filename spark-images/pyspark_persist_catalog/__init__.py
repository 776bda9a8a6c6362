"""Spark looks for data sources in packages whose names begin with pyspark_. Through this one the SQL catalog of persist is found by each
session, also by those without a program in Python.
"""

from persist_spark.catalog.source import CatalogSource as DefaultSource

__all__ = ["DefaultSource"]
