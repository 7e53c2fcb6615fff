"""What asynchrony gains and what it costs: one run file at several `max_lag`, beside synchronous runs of the same seeds."""
