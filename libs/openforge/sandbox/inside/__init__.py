"""What runs inside a sandbox, of whatever driver: its first process, and how commands and files are done there.

Promises: it runs as the sandbox's own user under every restriction that the sandbox has, so nothing that is asked of
it can reach further than the sandbox. It starts once per sandbox, so it imports nothing but C modules: the standard
library's own wrappers would double the price of a sandbox. It is also the agent's neighbour: whoever talks to it
believes nothing it says without checking.
"""
