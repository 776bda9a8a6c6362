"""Generated protobuf code; only codec imports it."""
