"""An address that cannot be listened on is named with its way out."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openforge.proxy.listening import listen
from openforge.proxy.settings import Settings as ProxySettings
from openforge.sandbox_manager.api.serve import listening_for
from openforge.sandbox_manager.api.settings import ApiSettings
from openforge.service import BadSettings
from openforge.service.sockets import bound, host_and_port


@pytest.fixture
def taken() -> Iterator[int]:
    with bound("127.0.0.1", 0, "OPENFORGE_TEST", 0) as tcp:
        tcp.listen()
        yield tcp.getsockname()[1]


def test_a_taken_port_is_named_with_its_setting(taken: int) -> None:
    with pytest.raises(BadSettings, match=rf"OPENFORGE_TEST = {taken} .*Address already in use.*use a free port"):
        bound("127.0.0.1", taken, "OPENFORGE_TEST", taken)


def test_an_address_can_be_shared_only_by_those_who_ask_for_it() -> None:
    with bound("127.0.0.1", 0, "OPENFORGE_TEST", 0, shared=True) as one:
        port = one.getsockname()[1]
        with bound("127.0.0.1", port, "OPENFORGE_TEST", port, shared=True) as other:
            assert other.getsockname()[1] == port
        one.listen()
        with pytest.raises(BadSettings, match="use a free port"):
            bound("127.0.0.1", port, "OPENFORGE_TEST", port)


def test_the_proxy_refuses_a_taken_port(taken: int) -> None:
    url = f"http://127.0.0.1:{taken}"
    with pytest.raises(BadSettings, match=rf"OPENFORGE_PROXY_URL = '{url}' .*use a free port"):
        listen(ProxySettings(run="r", engine_url=url, proxy_url=url))


def test_proxies_of_equal_pid_share_a_path_and_names_of_dead_ones_are_swept(
    tmp_path: Path,
) -> None:
    """As in containers, where each of them is process 1."""
    start = f"""
import os, sys
from openforge.proxy import listening
from openforge.proxy.settings import Settings
os.getpid = lambda: 1
sockets = listening.listen(Settings(run="r", engine_url="http://127.0.0.1:9", proxy_url="http://127.0.0.1:0",
    sockets={str(tmp_path)!r}, proxy_replicas=2))
print("up", flush=True)
sys.stdin.read()
"""
    proxies = []
    try:
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            proxies.append(process)
            assert process.stdout
            assert process.stdout.readline() == b"up\n"
            if len(proxies) == 2:
                assert len(list(tmp_path.glob(".proxy.sock*"))) == 2
                proxies[0].kill()
                proxies[0].wait()
        names = list(tmp_path.glob(".proxy.sock*"))
        assert len(names) == 2
        for name in (*names, tmp_path / "proxy.sock"):
            with socket.socket(socket.AF_UNIX) as unix:
                unix.connect(str(name))
    finally:
        for process in proxies:
            process.kill()
            process.communicate()


def test_the_sandbox_api_refuses_a_taken_port(taken: int) -> None:
    with pytest.raises(BadSettings, match=rf"OPENFORGE_SANDBOX_API_PORT = {taken} .*use a free port"):
        listening_for(ApiSettings(sandbox_api_port=taken))


@pytest.mark.parametrize("url", ["127.0.0.1:99", "https://127.0.0.1:99", "http://127.0.0.1", "http://127.0.0.1:port"])
def test_an_address_without_host_and_port_is_refused(url: str) -> None:
    with pytest.raises(BadSettings, match=r"OPENFORGE_TEST = '.*' names no host and port: use http://HOST:PORT"):
        host_and_port(url, "OPENFORGE_TEST")


def test_a_port_can_be_taken_over_from_a_process_that_just_ended() -> None:
    with bound("127.0.0.1", 0, "OPENFORGE_TEST", 0) as first:
        port = first.getsockname()[1]
    with bound("127.0.0.1", port, "OPENFORGE_TEST", port) as second:
        assert second.getsockname()[1] == port
