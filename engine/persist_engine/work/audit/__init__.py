"""Audits: compare what live versions name with what the store holds."""
