"""Streaming sinks: what a stream does beside the runs that append its batches."""
