"""The life of a process: settings from the environment, logs, health, signals, exit codes."""

from openforge.bus.errors import Zombie
from openforge.bus.settings import BadSettings
from openforge.ending import cancel, die_with_parent, ends_with_us
from openforge.service.health import Health, HealthState, health, read_health
from openforge.service.life import (
    BAD_SETTINGS,
    FAILED,
    OK,
    ZOMBIE,
    listen_for_signals,
    run_service,
    service_exit_code,
)
from openforge.service.log import JsonLines, Log, log, set_up_logs
from openforge.service.settings import settings_from_env

__all__ = [
    "BAD_SETTINGS",
    "FAILED",
    "OK",
    "ZOMBIE",
    "BadSettings",
    "Health",
    "HealthState",
    "JsonLines",
    "Log",
    "Zombie",
    "cancel",
    "die_with_parent",
    "ends_with_us",
    "health",
    "listen_for_signals",
    "log",
    "read_health",
    "run_service",
    "service_exit_code",
    "set_up_logs",
    "settings_from_env",
]
