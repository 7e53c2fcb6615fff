"""Runs attempts of episodes, each in a sandbox of its own.

Listens to `EpisodeRequested` and the run's own facts. Tells `EpisodeStarted`, `EpisodeEnded`.
Promises that every attempt ends by its deadline with one reason, and that nothing is left behind.
"""
