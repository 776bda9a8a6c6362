"""The local runner: same resources and same planner as in a cluster, with processes of this machine in place of pods."""
