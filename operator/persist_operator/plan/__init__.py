"""The decisions: pure functions from (resource, observed, now) to actions and a status.

Must not know: Kubernetes manifests, processes. The operator and the local runner carry out the same actions.
"""
