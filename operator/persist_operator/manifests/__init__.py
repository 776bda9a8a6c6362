"""Manifests of all objects that the operator creates. Pure: values in, dictionaries out."""
