"""Networks of agents and building blocks for custom agents. The public names are in `__init__.pyi`."""

from rein.lazy import export

export(__name__)
