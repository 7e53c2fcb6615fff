"""`python -m openforge.scheduler`."""

from openforge.scheduler.service import serve
from openforge.scheduler.settings import Settings
from openforge.service import run_service


def main() -> None:
    run_service("scheduler", Settings, serve)


if __name__ == "__main__":
    main()
