"""What the HTTP proxy of sandboxes lets through, decided without a network."""

import pytest

from openforge.sandbox.egress import Refused, Rules


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("example.org", "example.org", 443),
        ("Example.org", "example.org", 80),
        ("*.example.org", "deep.down.example.org", 443),
        ("example.org:8443", "example.org", 8443),
        ("192.0.2.7", "192.0.2.7", 80),
        ("::1", "::1", 443),
    ],
)
def test_what_is_listed_may_be_reached(entry: str, host: str, port: int) -> None:
    Rules("allowlist", [entry]).check_name(host, port)


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("example.org", "example.org", 8443),
        ("example.org", "sub.example.org", 443),
        ("*.example.org", "example.org", 443),
        ("*.example.org", "badexample.org", 443),
        ("example.org:8443", "example.org", 443),
    ],
)
def test_what_is_not_listed_may_not(entry: str, host: str, port: int) -> None:
    with pytest.raises(Refused, match=f"{host}:{port}"):
        Rules("allowlist", [entry]).check_name(host, port)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111"])
def test_an_open_box_may_dial_public_addresses(address: str) -> None:
    rules = Rules("open", [])
    rules.check_name("anything.example", 5000)
    rules.check_address(address, "anything.example", 5000)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
    ],
)  # fmt: skip
def test_no_name_leads_to_a_private_address(address: str) -> None:
    for rules in (Rules("open", []), Rules("allowlist", ["rebound.example"])):
        with pytest.raises(Refused, match="no public address"):
            rules.check_address(address, "rebound.example", 443)


@pytest.mark.parametrize("entry", ["", "*", "a*b.org", "http://a.org", "a.org:0", "a.org:http", "a b"])
def test_an_entry_that_names_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="hosts has"):
        Rules("allowlist", [entry])
