"""The proxy as a process: `python -m openforge.proxy`."""

import asyncio

import uvloop

from openforge.proxy.serve import serve
from openforge.proxy.settings import Settings
from openforge.service import run_service

if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_service("proxy", Settings, serve)
