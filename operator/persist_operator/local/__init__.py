"""The local runner: the same resources and the same planner, with processes of this machine instead of pods."""
