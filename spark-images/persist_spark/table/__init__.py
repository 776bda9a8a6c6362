"""A shard as a table with Python calls, for what Spark's SQL cannot ask of a Python data source."""
