"""VLP in plain torch: the published layers of BertForWebqa, under the published keys.

Read in WebQnA/WebQA_Baseline pytorch_pretrained_bert/modeling.py.
"""

import itertools
import math

import torch
from torch import nn

from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.vlp.network import VLPConfig


def modules(**named: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(named)


class Layer(nn.Module):
    def __init__(self, c: BertConfig):
        super().__init__()
        linear = lambda a, b: modules(dense=nn.Linear(a, b))  # noqa: E731
        ended = lambda a: modules(  # noqa: E731
            dense=nn.Linear(a, c.hidden),
            LayerNorm=nn.LayerNorm(c.hidden, eps=c.eps),
            dropout=nn.Dropout(c.dropout),
        )
        parts = {name: nn.Linear(c.hidden, c.hidden) for name in ("query", "key", "value")}
        parts["dropout"] = nn.Dropout(c.attention_dropout)
        self.attention = nn.ModuleDict({"self": modules(**parts), "output": ended(c.hidden)})
        self.intermediate = linear(c.hidden, c.mlp)
        self.output = ended(c.mlp)
        self.heads = c.heads

    def mix(self, q, k, v, additive):
        """Attention [B, heads, L, head_dim]."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + additive
        return self.attention["self"]["dropout"](scores.softmax(-1)) @ v

    def forward(self, h, additive):
        b, n, size = h.shape
        width = size // self.heads
        own, output = self.attention["self"], self.attention["output"]
        q, k, v = (
            own[name](h).view(b, n, self.heads, width).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = self.mix(q, k, v, additive).transpose(1, 2).reshape(b, n, size)
        h = output["LayerNorm"](output["dropout"](output["dense"](attended)) + h)
        down = self.output["dense"](nn.functional.gelu(self.intermediate["dense"](h)))
        return self.output["LayerNorm"](self.output["dropout"](down) + h)


class Predictions(nn.Module):
    def __init__(self, c: BertConfig, words: nn.Embedding):
        super().__init__()
        norm = nn.LayerNorm(c.hidden, eps=c.eps)
        self.transform = modules(dense=nn.Linear(c.hidden, c.hidden), LayerNorm=norm)
        self.decoder = nn.Linear(c.hidden, c.vocab_size, bias=False)
        self.decoder.weight = words.weight
        self.bias = nn.Parameter(torch.zeros(c.vocab_size))

    def forward(self, h):
        h = self.transform["LayerNorm"](nn.functional.gelu(self.transform["dense"](h)))
        return self.decoder(h) + self.bias


class TorchVLP(nn.Module):
    """Without the pooler, which the original has and uses in neither task."""

    def __init__(self, config: VLPConfig):
        super().__init__()
        c = config.bert
        embeddings = modules(
            word_embeddings=nn.Embedding(c.vocab_size, c.hidden),
            position_embeddings=nn.Embedding(c.positions, c.hidden),
            token_type_embeddings=nn.Embedding(c.types, c.hidden),
            LayerNorm=nn.LayerNorm(c.hidden, eps=c.eps),
            dropout=nn.Dropout(c.dropout),
        )
        encoder = modules(layer=nn.ModuleList(Layer(c) for _ in range(c.layers)))
        self.bert = modules(embeddings=embeddings, encoder=encoder)
        self.cls = modules(predictions=Predictions(c, embeddings["word_embeddings"]))
        widths = (config.region_features, *config.visual_hidden, c.hidden)
        linears = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.vis_embed = nn.Sequential(*itertools.chain(*linears), nn.Dropout(c.dropout))
        self.vis_pe_embed = nn.Sequential(
            nn.Linear(config.region_positions, c.hidden), nn.ReLU(), nn.Dropout(c.dropout)
        )
        self.context_classifier = nn.Linear(c.hidden, 2)

    def forward(self, x: dict[str, torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
        """The embeddings and each layer's states [B, L, H]; mask [B, row, column] as published."""
        parts = self.bert["embeddings"]
        words = parts["word_embeddings"](x["input_ids"])
        places = parts["position_embeddings"](x["position_ids"])
        regions = x["region_features"].shape[1]
        if regions:  # overwritten in place, as the original does
            words[:, 1 : regions + 1] = self.vis_embed(x["region_features"])
            places[:, 1 : regions + 1] = self.vis_pe_embed(x["region_positions"])
        types = parts["token_type_embeddings"](x["token_type_ids"])
        states = [parts["dropout"](parts["LayerNorm"](words + places + types))]
        additive = (1.0 - mask.to(types.dtype))[:, None] * -10000.0
        for layer in self.bert["encoder"]["layer"]:
            states.append(layer(states[-1], additive))
        return states

    def source(self, h):
        """Source selection [B, 2] from the last states; class 0 = relevant."""
        return self.context_classifier(h[:, 0])

    def words(self, h):
        """Word logits [B, L, V]."""
        return self.cls["predictions"](h)
