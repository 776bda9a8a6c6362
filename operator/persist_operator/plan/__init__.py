"""What to do next: pure functions from (resource, what was observed, now) to actions and a status.

Knows neither Kubernetes manifests nor processes: the operator and the local runner carry the same actions out.
"""
