"""Named runs. Each module defines a function with the name of the module, which returns a loop.

The other public names are in `__init__.pyi`.
"""

from rein.lazy import export

export(__name__)
