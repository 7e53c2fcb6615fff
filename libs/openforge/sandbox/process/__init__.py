"""Driver `process`: sandboxes as processes of this host. Starts no image, needs no daemon."""

from openforge.sandbox.contract import CannotIsolate
from openforge.sandbox.process.driver import ProcessDriver

__all__ = ["CannotIsolate", "ProcessDriver"]
