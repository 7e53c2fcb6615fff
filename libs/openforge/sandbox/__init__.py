"""Sandboxes: one contract, several drivers."""
