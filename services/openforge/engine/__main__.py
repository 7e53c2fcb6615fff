"""`python -m openforge.engine`."""

from openforge.engine.serve import serve
from openforge.engine.settings import Settings
from openforge.service import run_service

if __name__ == "__main__":
    run_service("engine", Settings, serve)
