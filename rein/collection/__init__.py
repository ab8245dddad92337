"""Collection of steps from environments that do not step together."""
