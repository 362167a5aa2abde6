"""The settings of tokenizer_config.json that override tokenizer.json, as in transformers. No torch here."""

from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel

from engine.model.keys import Keys

# The classes of transformers that override the normalizer, or the space before the first word.
_BERTS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_PREFIXED = ("RobertaTokenizer", "GPT2Tokenizer")
# The settings of BERT's tokenizers: the normalizer's name for each, the allowed values, and the value that these classes take if
# the file has no such setting.
_OF_BERT = {
    "do_lower_case": ("lowercase", (True, False), True),
    "strip_accents": ("strip_accents", (True, False, None), None),
    "tokenize_chinese_chars": ("handle_chinese_chars", (True, False), True),
}


def override(tokenizer: Tokenizer, settings: Keys) -> None:
    """Changes the tokenizer where tokenizer_config.json contradicts it.

    Raises: ModelError for a value that is not supported.
    """
    settings.refuse("split_special_tokens", (False, None))
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if isinstance(tokenizer.normalizer, BertNormalizer) and (name in _BERTS or not name):
        normalizer = tokenizer.normalizer
        for key, (attribute, allowed, usual) in _OF_BERT.items():
            if name or key in settings.values:
                settings.refuse(key, allowed)
                setattr(normalizer, attribute, settings.get(key, usual))
        tokenizer.normalizer = normalizer
    if isinstance(tokenizer.pre_tokenizer, ByteLevel) and name in _PREFIXED:
        settings.refuse("add_prefix_space", (True, False, None))
        pre_tokenizer = tokenizer.pre_tokenizer
        pre_tokenizer.add_prefix_space = bool(settings.get("add_prefix_space"))
        tokenizer.pre_tokenizer = pre_tokenizer
