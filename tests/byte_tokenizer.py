"""A tokenizer whose tokens are bytes, for tests that constrain a model with random weights to a grammar."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 ends an answer."""
    alphabet = bytes_to_chars()
    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def bytes_to_chars() -> list[str]:
    """Returns the character of each byte in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(0x100)]
