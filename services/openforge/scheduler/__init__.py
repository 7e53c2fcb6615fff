"""Paces a run: opens groups that can still be trained within the bound, tries failed attempts again.

Listens to all facts of runs, groups, episodes, trajectories and the policy.
Tells `GroupOpened`, `EpisodeRequested` and `GroupClosed`.
Promises never to exceed the limits, to open one attempt of a slot at a time, to refill what was retired.
"""
