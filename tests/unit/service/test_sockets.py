"""An address that cannot be listened on is named with its way out."""

from collections.abc import Iterator

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
