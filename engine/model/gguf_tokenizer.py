"""Makes a `tokenizers.Tokenizer` from a GGUF file's vocabulary. It gives the ids of the model's own tokenizer.json."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.errors import ModelError
from engine.model.gguf import Header

# ggml's types of tokens. Control tokens are special. User-defined tokens are found in a text before the text is split.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# The pattern that splits a text before BPE. Source: the published tokenizer.json of Llama 3 and of Qwen2.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORDS % "{1,3}"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORDS % ""
_PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2")


def build_tokenizer(header: Header) -> Tokenizer:
    """The tokenizer, with the special tokens that the file puts around a text.

    Raises: ModelError for a vocabulary that is damaged or of another kind than byte-level BPE and SentencePiece's BPE.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in makers:
        raise ModelError(f"{header.path}: tokenizer.ggml.model {kind!r:.80} is not supported (gpt2 and llama are)")
    tokens, types = _texts(header, "tokens"), _numbers(header, "token_type")
    if len(set(tokens)) < len(tokens):
        raise ModelError(f"{header.path}: tokenizer.ggml.tokens has a token twice; convert the model again")
    if types and len(types) != len(tokens):
        raise ModelError(f"{header.path} has {len(types)} token types for {len(tokens)} tokens; convert the model again")
    try:
        tokenizer = makers[kind](header, tokens, types or [_NORMAL] * len(tokens))
        _add_special_tokens(tokenizer, tokens, types)
        _add_template(header, tokenizer, kind)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{header.path}: its tokenizer cannot be built: {error}") from error
    return tokenizer


def _byte_level(header: Header, tokens: list[str], types: list[int]) -> Tokenizer:  # noqa: ARG001
    pre = header.metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{header.path}: tokenizer.ggml.pre {pre!r:.80} is not supported ({', '.join(_PRE_TOKENIZERS)} are); a file without "
            "this key is from an old converter"
        )
    merges = [_pair(header, merge) for merge in _texts(header, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in ("llama-bpe", "qwen2"):
        split: Any = pre_tokenizers.Split(Regex(_QWEN2 if pre == "qwen2" else _LLAMA3), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, tokens: list[str], types: list[int]) -> Tokenizer:
    """BPE whose merges follow from the vocabulary. In Gemma's files the order of the ids, not of the scores, gives the merges."""
    is_gemma, scores = header.architecture == "gemma3", _numbers(header, "scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{header.path} has {len(scores)} scores for {len(tokens)} tokens; convert the model again")
    # Gemma's files write tokens of spaces only as spaces, and all other spaces as U+2581.
    spelled = [token.replace(" ", "▁") if token.isspace() and not token.strip(" ") else token for token in tokens]
    pieces = {token: id for id, (token, kind) in enumerate(zip(spelled, types, strict=True)) if kind in (_NORMAL, _USER_DEFINED)}
    merges = []
    for token, id in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                rank = id if is_gemma else -scores[id]
                merges.append((rank, id, pieces[left], pieces[right], left, right))
    merges.sort()
    unknown = header.token_id("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(spelled)},
            [merge[-2:] for merge in merges],
            unk_token=None if unknown is None else spelled[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = {_CONTROL: tokenizer.add_special_tokens, _USER_DEFINED: tokenizer.add_tokens}
    for kind, add in added.items():
        found = [token for token, each in zip(tokens, types, strict=False) if each == kind]
        add([AddedToken(token, normalized=False) for token in found if tokenizer.token_to_id(token) is not None])


def _add_template(header: Header, tokenizer: Tokenizer, kind: str) -> None:
    """Add the special tokens around a text. By default llama.cpp puts a BOS before texts of SentencePiece and of Llama 3."""
    by_default = kind == "llama" or header.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    around = {"bos": header.metadata.get("tokenizer.ggml.add_bos_token", by_default)}
    around["eos"] = header.metadata.get("tokenizer.ggml.add_eos_token", False)
    specials = {}
    for name, wanted in around.items():
        id = header.token_id(f"{name}_token_id")
        if wanted and id is None:
            raise ModelError(f"{header.path}: tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id")
        if wanted and id is not None:
            specials[name] = (str(tokenizer.id_to_token(id)), id)
    if specials:
        first, last = ([specials[name][0]] if name in specials else [] for name in around)
        single = [*first, "$A", *last]
        pair = [*single, *(f"{part}:1" for part in (*first, "$B", *last))]
        tokenizer.post_processor = TemplateProcessing(single, pair, list(dict.fromkeys(specials.values())))


def _pair(header: Header, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{header.path}: the merge {merge!r:.80} is not two tokens; convert the model again")
    return left, right


def _texts(header: Header, key: str) -> list[str]:
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ModelError(f"{header.path} has no list of texts tokenizer.ggml.{key}; convert the model again")
    return value


def _numbers(header: Header, key: str) -> list[Any]:
    value = header.metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(value, list) or any(isinstance(each, str) for each in value):
        raise ModelError(f"{header.path}: tokenizer.ggml.{key} is not a list of numbers; convert the model again")
    return value
