"""Training: loops that connect agents, environments and stores."""
