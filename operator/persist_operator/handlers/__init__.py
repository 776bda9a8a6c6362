"""The outside of the operator: watches, the work queue and its workers, probes. Thin; all deciding is done below."""
