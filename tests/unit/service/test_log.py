"""Every line of the log is one JSON object."""

import json
import logging
import sys
from collections.abc import Iterator
from io import StringIO

import pytest

from openforge.service import log, set_up_logs


@pytest.fixture
def lines() -> Iterator[StringIO]:
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    stream = StringIO()
    set_up_logs("proxy", stream=stream)
    yield stream
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)


def test_a_line_has_the_event_and_its_fields(lines: StringIO) -> None:
    log.bind(run="r").info("turn recorded", turn=3, path=StringIO)
    [line] = map(json.loads, lines.getvalue().splitlines())
    assert (line["service"], line["level"], line["event"], line["run"], line["turn"]) == (
        "proxy",
        "info",
        "turn recorded",
        "r",
        3,
    )
    assert line["at"].endswith("+00:00")


def test_an_error_has_its_traceback_in_the_same_line(lines: StringIO) -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        log.error("failed", error=error)
    [line] = map(json.loads, lines.getvalue().splitlines())
    assert "ValueError: no\nway" in line["traceback"]


def test_other_libraries_log_in_the_same_shape(lines: StringIO) -> None:
    logging.getLogger("somebody").warning("hello %s", "you")
    [line] = map(json.loads, lines.getvalue().splitlines())
    assert (line["event"], line["logger"]) == ("hello you", "somebody")
