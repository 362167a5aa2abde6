"""The layers all families share, in plain torch: the CPU path, and the reference for the CUDA kernels to come."""
