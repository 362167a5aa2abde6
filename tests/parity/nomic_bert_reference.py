"""NomicBERT as nomic-ai's code defines it, with its keys and tensor names. It has no packing, so all texts have one length.

transformers has the variant with SwiGLU and without biases. This file has the other variants, and the mixture of experts.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class NomicConfig(PreTrainedConfig):
    model_type = "nomic_bert_reference"
    attribute_map = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotates [B, L, H, D] in pairs: a value of a head's first half, and a value of its second half."""
    length, dim = x.shape[1], x.shape[3]
    inv_freq = base ** -(torch.arange(0, dim, 2, device=x.device).float() / dim)
    angles = torch.arange(length, device=x.device).float()[:, None] * inv_freq
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.heads, self.base = config.n_head, config.rotary_emb_base
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.qkv_proj_bias)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.qkv_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.Wqkv(x).chunk(3, dim=-1))
        q, k = rotate(q, self.base), rotate(k, self.base)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        return self.out_proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        c, wide = config.n_embd, config.n_inner
        self.gate = {"swiglu": F.silu, "geglu": F.gelu, "gelu": None}[config.activation_function]
        if self.gate is None:
            self.fc1 = nn.Linear(c, wide, bias=config.mlp_fc1_bias)
        else:
            wide = (wide + 255) // 256 * 256
            self.fc11 = nn.Linear(c, wide, bias=config.mlp_fc1_bias)
            self.fc12 = nn.Linear(c, wide, bias=config.mlp_fc1_bias)
        self.fc2 = nn.Linear(wide, c, bias=config.mlp_fc2_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)) if self.gate is None else self.fc11(x) * self.gate(self.fc12(x)))


class Router(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(config.n_embd, config.num_experts, bias=False)


class ExpertWeights(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(config.num_experts * config.n_inner, config.n_embd) * 0.02)
        self.w2 = nn.Parameter(torch.randn(config.num_experts * config.n_inner, config.n_embd) * 0.02)


class Experts(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.mlp, self.bias = ExpertWeights(config), nn.Parameter(torch.zeros(config.n_embd))


class Mixture(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)
        self.num_experts, self.top_k = config.num_experts, config.moe_top_k

    def forward(self, x: Tensor) -> Tensor:
        """Computes one token after another. Each token has its own experts."""
        tokens = x.flatten(0, 1)
        weights = self.router.layer(tokens).float().softmax(-1)
        w1, w2 = (w.unflatten(0, (self.num_experts, -1)) for w in (self.experts.mlp.w1, self.experts.mlp.w2))
        out = []
        for token, weight in zip(tokens, weights, strict=True):
            chosen = weight.argsort(descending=True)[: self.top_k]
            out.append(sum(weight[e].to(x.dtype) * (F.gelu(w1[e] @ token) @ w2[e]) for e in chosen) + self.experts.bias)
        return torch.stack(out).view_as(x)


class Block(nn.Module):
    def __init__(self, config: NomicConfig, index: int) -> None:
        super().__init__()
        self.attn = SelfAttention(config)
        every = config.moe_every_n_layers
        self.mlp = Mixture(config) if every and index % every == 1 else Mlp(config)
        self.norm1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.norm2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.attn(x) + x)
        return self.norm2(self.mlp(x) + x)


class Embeddings(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.n_embd)

    def forward(self, input_ids: Tensor) -> Tensor:
        words = self.word_embeddings(input_ids)
        return words + self.token_type_embeddings.weight[0] if hasattr(self, "token_type_embeddings") else words


class Encoder(nn.Module):
    def __init__(self, config: NomicConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.n_layer))


class NomicBertModel(PreTrainedModel):
    config_class = NomicConfig

    def __init__(self, config: NomicConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.emb_ln = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.encoder = Encoder(config)
        self.post_init()

    def forward(self, input_ids: Tensor) -> BaseModelOutput:
        hidden = self.emb_ln(self.embeddings(input_ids))
        for layer in self.encoder.layers:
            hidden = layer(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


AutoConfig.register(NomicConfig.model_type, NomicConfig)
AutoModel.register(NomicConfig, NomicBertModel)
