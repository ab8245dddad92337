"""Handlers: functions that attach to a loop. docs/reference/handlers.md has an example of each."""

from rein.lazy import export

export(__name__)
