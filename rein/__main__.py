"""`python -m rein` is the same program as `rein`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` searches the working directory first, so a file there could replace a module that is imported later.
    # A source tree in the working directory stays on the path, but comes last.
    if not sys.flags.safe_path:
        here = sys.path.pop(0)
        if here == os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
            sys.path.append(here)

    from rein.cli import main

    main()
