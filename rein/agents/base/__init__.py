"""Base classes of agents and the code that agents share."""
