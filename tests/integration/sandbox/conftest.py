"""Real sandboxes on this host: `driver` and `box` of every case of the contract."""

from sandbox_fixtures import box, case, daemons, driver, used

__all__ = ["box", "case", "daemons", "driver", "used"]
