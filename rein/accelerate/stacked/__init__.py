"""Computation for several learners of a `Population` at once, on tensors with a leading axis of learners."""
