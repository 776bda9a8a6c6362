"""Spark over persist shards: the sink job (mint -> write -> append), the executor entry and the data source
`persist`.
"""
