"""Experience in memory: rollouts, replay, priorities, sequences and frames; the names are in `__init__.pyi`."""

from rein.lazy import export

export(__name__)
