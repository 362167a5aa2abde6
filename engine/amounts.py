"""Bytes as errors show them."""


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
