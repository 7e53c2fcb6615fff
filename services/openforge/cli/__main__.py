"""`python -m openforge.cli`."""

from openforge.cli.main import main

if __name__ == "__main__":
    main()
