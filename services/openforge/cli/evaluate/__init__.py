"""`openforge eval`: harnesses at the same held-out tasks, in one table."""
