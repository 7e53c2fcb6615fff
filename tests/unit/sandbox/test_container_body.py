"""What the container daemon is asked for."""

from typing import Any

import pytest

from openforge.sandbox.contract import SandboxSpec
from openforge.sandbox.docker.container import body


@pytest.mark.parametrize(("runtime", "asked"), [("runsc", {"Runtime": "runsc"}), ("", {})])
def test_a_runtime_is_asked_for_by_name_and_the_daemons_default_by_none(runtime: str, asked: dict[str, Any]) -> None:
    spec = SandboxSpec(name="box")
    said = body(spec, "image:1", ["/init"], [], binds={}, volumes=(), labels={}, runtime=runtime, podman=False)
    assert {name: value for name, value in said["HostConfig"].items() if name == "Runtime"} == asked
