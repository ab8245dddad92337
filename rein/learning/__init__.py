"""What several agents share: how they act, keep what they saw, and turn a batch into a step of the optimizer."""
