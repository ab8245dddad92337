"""Named runs: functions that build a loop. Their names are also those of `rein train`, with hyphens.

`__init__.pyi` lists them with the modules that define them.
"""

from rein.lazy import export

export(__name__)
