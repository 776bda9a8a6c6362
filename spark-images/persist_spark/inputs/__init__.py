"""The inputs of sinks: formats of Spark, functions of the user, and shards."""
