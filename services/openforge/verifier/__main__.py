"""`python -m openforge.verifier`."""

from openforge.service import run_service
from openforge.verifier.serve import serve
from openforge.verifier.settings import Settings

if __name__ == "__main__":
    run_service("verifier", Settings, serve)
