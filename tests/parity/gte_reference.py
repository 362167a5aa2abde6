"""GTE as Alibaba's code defines it, with the same keys and tensor names. It has no packing, so all texts have one length.

transformers has this network, too, but without NTK scaling of the rotary embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


class NewConfig(PreTrainedConfig):
    model_type = "new_reference"


def inverse_frequencies(config: NewConfig) -> Tensor:
    """NTK scaling by https://kexue.fm/archives/9706, formula (6)."""
    dim = config.hidden_size // config.num_attention_heads
    base, factor = config.rope_parameters["rope_theta"], config.rope_parameters["factor"]
    return 1.0 / (base * factor) ** (torch.arange(0, dim, 2).float() / dim) / factor ** (2 / dim)


def rotate(x: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotates [B, L, H, D] in pairs: a value of a head's first half, and a value of its second half."""
    angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * inv_freq.to(x.device)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.heads, self.config = config.num_attention_heads, config
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv_proj(x).chunk(3, dim=-1))
        inv_freq = inverse_frequencies(self.config)
        q, k = rotate(q, inv_freq), rotate(k, inv_freq)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.up_gate_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gate_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(config), Mlp(config)
        self.attn_ln, self.mlp_ln = (nn.LayerNorm(config.hidden_size, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_ln(x + self.attention(x))
        return self.mlp_ln(x + self.mlp(x))


class Embeddings(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        return self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids))


class Encoder(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))


class NewModel(PreTrainedModel):
    config_class = NewConfig

    def __init__(self, config: NewConfig) -> None:
        super().__init__(config)
        self.embeddings, self.encoder = Embeddings(config), Encoder(config)
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> BaseModelOutput:
        hidden = self.embeddings(input_ids, torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        for layer in self.encoder.layer:
            hidden = layer(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class Pooler(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)


class NewForSequenceClassification(PreTrainedModel):
    config_class = NewConfig

    def __init__(self, config: NewConfig) -> None:
        super().__init__(config)
        self.new, self.classifier = NewModel(config), nn.Linear(config.hidden_size, config.num_labels)
        self.new.pooler = Pooler(config)
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> SequenceClassifierOutput:
        first = self.new(input_ids, token_type_ids).last_hidden_state[:, 0]
        return SequenceClassifierOutput(logits=self.classifier(torch.tanh(self.new.pooler.dense(first))))


AutoConfig.register(NewConfig.model_type, NewConfig)
AutoModelForSequenceClassification.register(NewConfig, NewForSequenceClassification)
AutoModel.register(NewConfig, NewModel)
