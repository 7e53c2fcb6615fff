"""The engine's wire."""
