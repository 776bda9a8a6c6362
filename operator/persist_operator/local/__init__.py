"""The local runner: the same resources and the same planner as in a cluster, with processes of this machine instead of pods."""
