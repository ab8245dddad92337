"""Integrations with optional dependencies: Minari and matplotlib."""
