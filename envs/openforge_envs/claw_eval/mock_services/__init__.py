"""Services that tasks share."""
