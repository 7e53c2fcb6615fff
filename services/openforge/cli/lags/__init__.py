"""What asynchrony gains and costs: one run file at several `max_lag`, beside synchronous runs of the same seeds."""
