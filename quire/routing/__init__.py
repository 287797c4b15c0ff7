"""Which of several replicas serves a request: by the prefixes that each has had, and by load. Pure; given a clock."""
