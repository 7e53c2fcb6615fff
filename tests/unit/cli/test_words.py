"""What a service's log ends with, as people are told it."""

import logging
from pathlib import Path

from openforge.cli.words import last_words
from openforge.service import JsonLines


def line(level: int, event: str, error: Exception | None = None, **fields: object) -> str:
    """As a service writes it."""
    record = logging.LogRecord("openforge", level, "", 0, event, None, error and (type(error), error, None))
    record.fields = fields
    return JsonLines("learner").format(record)


def test_of_a_service_its_errors_are_told_in_words_and_each_once(tmp_path: Path) -> None:
    refused = ValueError("row_tokens is too small")
    lines = (
        line(logging.INFO, "started", pid=7),
        line(logging.ERROR, "rank ended", rank=1, exit_code=1),
        line(logging.ERROR, "died", refused),
        line(logging.INFO, "started", pid=8),
        line(logging.ERROR, "died", refused),
        line(logging.ERROR, "bad settings", why="learner.threads = 0"),
    )
    (tmp_path / "log").write_text("\n".join(lines))
    assert last_words(tmp_path / "log", 3) == [
        "rank ended (rank 1, exit_code 1)",
        "died: ValueError: row_tokens is too small",
        "bad settings: learner.threads = 0",
    ]


def test_a_group_of_errors_is_told_by_its_last_one_and_lines_that_were_cut_are_left_out(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    group: Exception
    try:
        try:
            full()
        except OSError as error:
            raise ExceptionGroup("two tasks", [error]) from None
    except ExceptionGroup as raised:
        group = raised
        told = line(logging.ERROR, "died", group)
    (tmp_path / "log").write_text("\n".join((told, told[:60] + told, told[:200])))
    assert last_words(tmp_path / "log", 3) == ["died: OSError: [Errno 28] No space left on device"]


def test_of_a_long_log_no_half_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join("x " * 150 + str(number) for number in range(900)))
    assert all(len(one) == len("x " * 150) + 3 for one in last_words(tmp_path / "log", 1000))


def test_where_no_error_was_said_the_last_lines_are_told(tmp_path: Path) -> None:
    lines = ("of another program", line(logging.INFO, "started", pid=7), line(logging.INFO, "ready", run="r"), "")
    (tmp_path / "log").write_text("\n".join(lines))
    assert last_words(tmp_path / "log", 2) == ["started (pid 7)", "ready (run r)"]
    assert last_words(tmp_path / "log", 3)[0] == "of another program"
    (tmp_path / "log").write_text("")
    assert last_words(tmp_path / "log", 2) == []
