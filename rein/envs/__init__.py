"""Environments of tensors: N at once, on any device; one file each."""
