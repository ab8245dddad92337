"""Pure functions of tensors. They depend only on torch and the standard library."""
