"""The console: shards and sinks in a browser."""
