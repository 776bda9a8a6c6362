"""Lists and maps in columns."""
