"""Streaming sinks: everything about a stream except the runs that append its batches."""
