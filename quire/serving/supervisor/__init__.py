"""`quire serve` itself: owns the listening socket, the child processes, readiness, drain and the exit code."""
