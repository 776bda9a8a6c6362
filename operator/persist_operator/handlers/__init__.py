"""The operator's connection to Kubernetes and HTTP: watches, the work queue with its workers, probes. Other rooms decide."""
