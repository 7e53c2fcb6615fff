"""Conversations and their tokens."""
