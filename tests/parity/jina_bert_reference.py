"""JinaBERT as Jina's code defines it, with the same keys and tensor names. It has no packing, so all texts have one length.

The file has both implementations: the first one, and with `qk_post_norm` the one of jina-embeddings-v2-base-code.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


class JinaConfig(PreTrainedConfig):
    model_type = "jina_bert_reference"


def layer_norm(config: JinaConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def slopes(heads: int) -> list[float]:
    """https://github.com/ofirpress/attention_with_linear_biases"""
    if heads & (heads - 1) == 0:
        return [(2 ** (-8 / heads)) ** power for power in range(1, heads + 1)]
    power_of_two = 1
    while power_of_two * 2 <= heads:
        power_of_two *= 2
    return slopes(power_of_two) + slopes(2 * power_of_two)[::2][: heads - power_of_two]


class Attend(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        c, self.heads = config.hidden_size, config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(c, c) for _ in range(3))
        self.qk_post_norm = config.qk_post_norm
        if self.qk_post_norm:
            self.layer_norm_q, self.layer_norm_k = layer_norm(config), layer_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.qk_post_norm:
            q, k = self.layer_norm_q(q), self.layer_norm_k(k)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        at = torch.arange(x.shape[1], device=x.device)
        alibi = torch.tensor(slopes(self.heads), device=x.device)[:, None, None] * -(at[:, None] - at[None, :]).abs()
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5 + alibi.to(x.dtype)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


class Output(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(config.hidden_size, config.hidden_size), layer_norm(config)


class SelfAttention(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.self, self.output = Attend(config), Output(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.output.LayerNorm(self.output.dense(self.self(x)) + x)


class Mlp(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        c, wide = config.hidden_size, config.intermediate_size
        self.gated_layers, self.wo, self.layernorm = nn.Linear(c, 2 * wide, bias=False), nn.Linear(wide, c), layer_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        gated, other = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(self.wo(F.gelu(gated) * other) + x)


class SecondMlp(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        c, wide = config.hidden_size, config.intermediate_size
        self.up_gated_layer, self.down_layer = nn.Linear(c, 2 * wide, bias=False), nn.Linear(wide, c)

    def forward(self, x: Tensor) -> Tensor:
        up, gated = self.up_gated_layer(x).chunk(2, dim=-1)
        return self.down_layer(up * F.gelu(gated))


class Layer(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(config), Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class SecondLayer(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(config), SecondMlp(config)
        self.layer_norm_1, self.layer_norm_2 = layer_norm(config), layer_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm_1(x + self.attention(x))
        return self.layer_norm_2(x + self.mlp(x))


class Embeddings(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = layer_norm(config)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        return self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids))


class Encoder(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        make = SecondLayer if config.qk_post_norm else Layer
        self.layer = nn.ModuleList(make(config) for _ in range(config.num_hidden_layers))


class Pooler(nn.Module):
    def __init__(self, config: JinaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)


class JinaBertModel(PreTrainedModel):
    config_class = JinaConfig

    def __init__(self, config: JinaConfig) -> None:
        super().__init__(config)
        self.embeddings, self.encoder, self.pooler = Embeddings(config), Encoder(config), Pooler(config)
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> BaseModelOutput:
        hidden = self.embeddings(input_ids, torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        for layer in self.encoder.layer:
            hidden = layer(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class JinaBertForSequenceClassification(PreTrainedModel):
    config_class = JinaConfig

    def __init__(self, config: JinaConfig) -> None:
        super().__init__(config)
        self.bert, self.classifier = JinaBertModel(config), nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> SequenceClassifierOutput:
        first = self.bert(input_ids, token_type_ids).last_hidden_state[:, 0]
        return SequenceClassifierOutput(logits=self.classifier(torch.tanh(self.bert.pooler.dense(first))))


AutoConfig.register(JinaConfig.model_type, JinaConfig)
AutoModelForSequenceClassification.register(JinaConfig, JinaBertForSequenceClassification)
AutoModel.register(JinaConfig, JinaBertModel)
