import subprocess
import sys

import pytest

_STARTS = """
import os, sys, time
from openforge.ending import ends_with_us

before_exec, us = ends_with_us(), os.getpid()
if child := os.fork():
    if sys.argv[1] == "stays":
        os.waitpid(child, 0)
    os._exit(0)
while sys.argv[1] == "ends" and os.getppid() == us:
    time.sleep(0.01)
before_exec()
print("began", flush=True)
"""


@pytest.mark.parametrize(("parent", "said"), [("stays", b"began\n"), ("ends", b"")])
def test_a_child_does_not_begin_where_its_parent_ended_before_it_could_ask_to_be_told(parent: str, said: bytes) -> None:
    done = subprocess.run((sys.executable, "-c", _STARTS, parent), stdout=subprocess.PIPE, timeout=60)
    assert done.stdout == said
