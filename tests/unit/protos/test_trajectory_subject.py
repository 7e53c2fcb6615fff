import pytest

from openforge.protos import env_token


@pytest.mark.parametrize(
    ("env", "token"),
    [("shell", "shell"), ("/srv/my envs/web.v2/env.py", "web_v2"), ("./envs/files", "files"), ("env.py", "_")],
)
def test_an_environment_given_by_path_still_has_a_place_in_the_subject(env: str, token: str) -> None:
    assert env_token(env) == token
