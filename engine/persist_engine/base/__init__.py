"""Room 0: words every other room uses. Imports nothing of ours."""
