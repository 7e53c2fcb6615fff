"""Where pipelines run: a process of its own for each environment, many episodes at once.

It lives in a sandbox like any other: own user, no network but the model proxy, the Python environment and
the code read-only. It reaches the episodes' sandboxes through the manager alone, each by an unguessable token.
"""
