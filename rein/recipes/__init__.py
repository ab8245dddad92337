"""Named runs: each module holds one function of the same name that returns a loop, ready to run.

The other public names are in `__init__.pyi`.
"""

from rein.lazy import export

export(__name__)
