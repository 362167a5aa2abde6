"""Checkpoints that were published in 4 or 8 bits: reads their config.json and the tensors of each format.

`quantization_config.py` reads config.json into the types of `scheme.py`. `fp8.py`, `fp4.py`, `gptq.py`, `awq.py`,
`compressed_tensors.py` and `modelopt.py` bring the tensors of one format into the layouts of `layout.py`. `files.py` shows the
matrices as if the checkpoint had them in 16 bits. `kept.py` decides which matrices stay in their codes.
"""
