"""Environments around environments: one file each; what they do not change is the inner environment's."""
