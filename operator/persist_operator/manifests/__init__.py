"""Manifests of everything the operator starts. Pure: values in, dictionaries out."""
