"""Pure functions of tensors; they import torch and the standard library, nothing else."""
