"""What outlives a request: responses, files and batches, in one bounded file that all API processes share."""
