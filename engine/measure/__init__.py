"""Measures this machine: whether the kernels are correct, the rates of the device, and the rates of the engine."""
