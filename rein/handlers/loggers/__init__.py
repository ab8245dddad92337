"""Loggers write metrics to files and services. docs/how_to/log_metrics.md shows them in use.

The exported names are in `__init__.pyi`.
"""

from rein.lazy import export

export(__name__)
