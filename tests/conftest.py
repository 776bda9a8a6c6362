"""Properties draw the same examples in every run: what CI sees everybody sees, and a failure is the change's own.

`make test ARGS=--hypothesis-profile=default` draws others, and remembers those that failed; what it finds becomes a test.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
