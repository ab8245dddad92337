"""`python -m rein` is the same program as `rein`."""

from rein.cli import main

if __name__ == "__main__":
    main()
