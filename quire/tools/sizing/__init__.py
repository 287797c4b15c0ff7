"""`quire plan`: which devices, how many, in which format serve a model within limits of latency, and at what cost."""
