"""`openforge conformance`: every harness of the table, unmodified, through the real services, token for token."""
