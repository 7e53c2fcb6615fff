"""Code of an environment's author, `env.py` or `template.py`, may raise anything or end the process.

Promises: whatever it raised becomes one sentence that says what, and in which line of which file.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused_as(refusal: type[ValueError], what: str, *passing: type[Exception]) -> Iterator[None]:
    """Raises `refusal` with `what` in front for whatever is raised within, except what is `passing`."""
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        raise refusal(f"{what}: {type(error).__name__}: {error}{_where(error)}") from error


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its own words name file and line
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" (line {last.lineno} of {last.filename})"
