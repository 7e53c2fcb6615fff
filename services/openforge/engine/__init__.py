"""Listens to: `RunSubmitted`, `PolicyPublished`; and over HTTP to generation calls on vLLM's wire.

Tells: `PolicyServed`, and `EngineMeasured` where the run asks how busy it is.

Promises: serves the newest published policy and stamps each token with the version that sampled it; weights that
are not exactly what was published are never served.
"""
