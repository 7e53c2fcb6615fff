"""Listens to: model calls of harnesses over HTTP, `EpisodeEnded`, `PolicyServed`.
Tells: `TurnRecorded`, `EpisodeSealed`.
Promises: a turn is durable before the harness sees its end; its ids are the engine's own; only a key opens an attempt.
"""
