"""The meaning of rows as Arrow columns: schemas, order, conditions and statistics."""
