"""Audits: what live versions name, against what lies in the store."""
