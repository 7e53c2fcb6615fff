"""A gate before a Docker daemon's socket: `python -m openforge.sandbox.docker.gate`.

Whoever holds the socket of a Docker daemon is root of its host. With the gate between, the sandbox manager and the
verifier can make sandboxes and nothing else.
"""
