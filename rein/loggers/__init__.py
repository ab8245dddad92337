"""Loggers: each takes down numbers in a file of its own kind; `docs/loggers.md` shows them in use."""
