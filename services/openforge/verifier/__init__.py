"""Listens to EpisodeSealed; reads EpisodeEnded, EpisodeRequested, TurnRecorded and the artifacts.

Tells TrajectoryVerified or EpisodeFailed, one of them for every sealed attempt.
Promises: scores outside the agent's reach; merges exactly the sealed turns; its own failure is never a reward.
"""
