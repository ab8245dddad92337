"""Where trajectories and checkpoints are kept; import a store from its own module."""
