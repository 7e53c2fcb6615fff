"""Listens to `TrajectoryVerified`, group facts and `PolicyServed`.
Tells `BatchTrained`, `TrajectoryRetired` and `PolicyPublished`.
Promises: trains only closed groups, each trajectory at most once, never beyond the bound;
a crash loses nothing verified.
"""
