"""The environment `conformance`: real harnesses at a task that takes several turns, for `openforge conformance`."""
