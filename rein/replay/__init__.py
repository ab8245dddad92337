"""Experience in memory: rollouts, replay, priorities, sequences and frames."""
