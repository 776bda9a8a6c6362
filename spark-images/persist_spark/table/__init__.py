"""A shard as a table with Python calls, for operations that Spark's SQL cannot request from a Python data source."""
