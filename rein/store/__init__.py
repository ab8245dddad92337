"""Trajectories, checkpoints and metrics of runs on disk."""
