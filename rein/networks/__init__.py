"""Modules that agents are built from."""
