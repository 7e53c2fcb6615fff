"""Driver `process`: sandboxes as processes of this host. Starts no image, needs no daemon."""

from openforge.sandbox.process.driver import CannotIsolate, ProcessDriver

__all__ = ["CannotIsolate", "ProcessDriver"]
