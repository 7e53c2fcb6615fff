"""One JSON line on stderr for each event: `log.info("turn recorded", run=run, turn=3)`.

Promises: every line is one JSON object with `at`, `level`, `service`, `event`, and the ids of the `trace` and `span` in
which it was said, if any; lines of other libraries come in the same shape; logging never raises.
"""

import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

import msgspec
from opentelemetry import trace

_NOISY = ("asyncio", "httpx", "httpcore", "nats", "uvicorn.access")


class Log:
    """`bind` gives a log whose lines all carry these fields."""

    def __init__(self, logger: logging.Logger, fields: dict[str, Any] | None = None) -> None:
        self._logger = logger
        self._fields = fields or {}

    def bind(self, **fields: Any) -> "Log":
        return Log(self._logger, {**self._fields, **fields})

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, error: BaseException | None = None, **fields: Any) -> None:
        """`error` adds its traceback."""
        self._log(logging.ERROR, event, fields, error)

    def _log(self, level: int, event: str, fields: dict[str, Any], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=error, extra={"fields": {**self._fields, **fields}})


class JsonLines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
        }
        if not record.name.startswith("openforge"):
            line["logger"] = record.name
        current = trace.get_current_span().get_span_context()
        if current.is_valid:
            line |= {"trace": f"{current.trace_id:032x}", "span": f"{current.span_id:016x}"}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up_logs(service: str, *, level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything that this process logs to one stream, as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # no line tells where in the code, in which thread or process it was said: to find that out costs more than the line
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.error("died", error=error)


log = Log(logging.getLogger("openforge"))
