"""Loggers: write metrics to files and services. docs/how_to/loggers.md has examples."""
