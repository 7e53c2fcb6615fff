"""Settings come from the environment, and what is wrong is said with its variable."""

from pathlib import Path

import msgspec
import pytest

from openforge.service import BadSettings, settings_from_env


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    home: Path
    threads: int = 1
    speed: float = 0.5
    strict: bool = False
    names: tuple[str, ...] = ()


def test_fields_become_variables_and_defaults_stay() -> None:
    env = {
        "OPENFORGE_RUN": "r",
        "OPENFORGE_HOME": "/x",
        "OPENFORGE_STRICT": "true",
        "OPENFORGE_NAMES": "a, b",
        "OTHER": "1",
    }
    assert settings_from_env(Settings, env) == Settings(run="r", home=Path("/x"), strict=True, names=("a", "b"))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(BadSettings) as error:
        settings_from_env(Settings, {"OPENFORGE_HOME": "/x", "OPENFORGE_THREADS": "two", "OPENFORGE_STRICT": "maybe"})
    message = str(error.value)
    assert "OPENFORGE_RUN is not set" in message
    assert "OPENFORGE_THREADS = 'two' is not a whole number" in message
    assert "OPENFORGE_STRICT = 'maybe' is not true or false" in message


def test_an_empty_variable_leaves_the_default() -> None:
    assert (
        settings_from_env(Settings, {"OPENFORGE_RUN": "r", "OPENFORGE_HOME": "/x", "OPENFORGE_THREADS": ""}).threads
        == 1
    )
