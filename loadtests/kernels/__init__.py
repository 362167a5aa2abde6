"""Each of our kernels beside torch's own, and how far both are from what the chip can do."""
