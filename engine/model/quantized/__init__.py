"""Checkpoints that were published in 4 or 8 bits: what config.json says of them, and how each format's tensors are read.

`scheme.py` reads config.json. `fp8.py`, `gptq.py`, `awq.py` and `compressed_tensors.py` bring the tensors of one format into the
layouts of `layout.py`. `files.py` shows the matrices as if a checkpoint held them in 16 bits.
"""
