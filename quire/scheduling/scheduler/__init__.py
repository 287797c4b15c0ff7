"""Who moves forward by how many tokens in the next step, and what its result means for each request. No torch."""
