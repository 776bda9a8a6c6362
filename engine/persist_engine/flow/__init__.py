"""Room 2: dataflow machines without I/O."""
