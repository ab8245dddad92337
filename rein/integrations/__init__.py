"""Bridges to other projects, each with its own optional import."""
