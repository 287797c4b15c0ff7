"""Steps on devices: executors, which reach the ranks, and workers, which run the model."""
