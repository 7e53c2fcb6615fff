"""`openforge`, and `python -m openforge.cli`."""

import signal


def main() -> None:
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # Python forgets a Ctrl-C that comes within a callback of its import
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from openforge.cli.main import main as run

    signal.signal(signal.SIGINT, heard)
    run()


if __name__ == "__main__":
    main()
