"""Environments: tasks, agents at work, verification."""
