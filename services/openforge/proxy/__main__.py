"""The proxy as a process: `python -m openforge.proxy`."""

from openforge.proxy.serve import serve
from openforge.proxy.settings import Settings
from openforge.service import run_service

if __name__ == "__main__":
    run_service("proxy", Settings, serve)
