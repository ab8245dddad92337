"""Collection of transitions from environments that do not step together."""
