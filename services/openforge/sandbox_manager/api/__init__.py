"""Sandboxes over HTTP and WebSocket, as clients written for Orchard expect them, and what we add to that.

Listens on a port of its own, to holders of its keys alone. Promises: a command that a client repeats because it
never got the answer is run once; a time-out ends the command and not the sandbox; nothing outlives its time.
"""
