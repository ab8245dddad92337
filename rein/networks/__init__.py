"""Networks of agents and building blocks of custom agents; the names are in `__init__.pyi`."""

from rein.lazy import export

export(__name__)
