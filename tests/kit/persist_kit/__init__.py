"""The shared support code of this repository's tests."""
