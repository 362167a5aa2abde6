"""The tokenizer of the tiny random checkpoints."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors


def save_tokenizer(folder: Path, vocab: int, encoder: bool) -> None:
    """Saves a tokenizer with the words w0, w1, ... and the special tokens of the family around a text."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|endoftext|>"]
    words = specials + [f"w{i}" for i in range(vocab - len(specials))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    single = "[CLS] $A [SEP]" if encoder else "$A <|endoftext|>"
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if encoder else "$A $B:1 <|endoftext|>:1"
    used = [(word, words.index(word)) for word in specials if word in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    tokenizer.save(str(folder / "tokenizer.json"))
