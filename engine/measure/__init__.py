"""Measures this machine: whether the kernels are right here, what the device does in a second, and what our engine does on it."""
