"""Loggers: write metrics to files and services; docs/loggers.md shows them in use."""
