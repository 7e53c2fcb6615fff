"""Every test here may have a proxy at work."""

from proxy_fixtures import idle_proxy, proxy, stub_engine

__all__ = ["idle_proxy", "proxy", "stub_engine"]
