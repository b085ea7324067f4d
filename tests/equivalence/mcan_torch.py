"""Torch restatements of openvqa's MCAN and of the layers that Prophet's shares, keys as published.

Read in MILVLG/prophet prophet/stage1/model/layers.py and MILVLG/openvqa openvqa/models/mcan/.
"""

import torch
from torch import nn

from mmqa_jax.models.mcan.network import FusionConfig, MCANOpenVQAConfig


class FC(nn.Module):
    def __init__(self, a: int, b: int, rate: float = 0.0):
        super().__init__()
        self.linear = nn.Linear(a, b)
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return self.dropout(self.linear(x).relu())


class MLP(nn.Module):
    def __init__(self, a: int, b: int, c: int, rate: float = 0.0):
        super().__init__()
        self.fc = FC(a, b, rate)
        self.linear = nn.Linear(b, c)

    def forward(self, x):
        return self.linear(self.fc(x))


class Projections(nn.Module):
    """The four linears of an attention, and the attention itself."""

    def __init__(self, size: int, heads: int, value_bias: bool, rate: float = 0.0):
        super().__init__()
        self.linear_v = nn.Linear(size, size, bias=value_bias)
        self.linear_k = nn.Linear(size, size)
        self.linear_q = nn.Linear(size, size)
        self.linear_merge = nn.Linear(size, size)
        self.heads = heads
        self.dropout = nn.Dropout(rate)  # of the attention's weights

    def split(self, x):  # [B, L, H] -> [B, heads, L, head_dim]
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def mix(self, query, key, value, closed):  # -> [B, heads, L, head_dim]
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if closed is not None:
            scores = scores.masked_fill(closed[:, None, None], -1e9)
        return self.dropout(scores.softmax(-1)) @ value

    def attend(self, query, key, value, closed):
        mixed = self.mix(query, key, value, closed).transpose(1, 2)
        return self.linear_merge(mixed.reshape(*mixed.shape[:2], -1))


class MHAtt(Projections):
    def forward(self, x, context, closed):
        query = self.split(self.linear_q(x))
        key, value = self.split(self.linear_k(context)), self.split(self.linear_v(context))
        return self.attend(query, key, value, closed)


class AttFlat(nn.Module):
    def __init__(self, size: int, inner: int, glimpses: int, out: int, rate: float = 0.0):
        super().__init__()
        self.mlp = MLP(size, inner, glimpses, rate)
        self.linear_merge = nn.Linear(size * glimpses, out)

    def forward(self, x, closed):
        weights = self.mlp(x)
        if closed is not None:
            weights = weights.masked_fill(closed[:, :, None], -1e9)
        weights = weights.softmax(1)
        sums = [(weights[:, :, n, None] * x).sum(1) for n in range(weights.shape[-1])]
        return self.linear_merge(torch.cat(sums, 1))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        deviation = x.std(-1, keepdim=True)  # unbiased
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (deviation + self.eps) + self.b_2


class Feed(nn.Module):
    def __init__(self, c: FusionConfig):
        super().__init__()
        self.mlp = MLP(c.hidden, c.mlp, c.hidden, c.dropout)


class SA(nn.Module):
    def __init__(self, c: FusionConfig):
        super().__init__()
        self.mhatt = MHAtt(c.hidden, c.heads, value_bias=True, rate=c.dropout)
        self.ffn = Feed(c)
        self.norm1, self.norm2 = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, closed):
        x = self.norm1(x + self.dropout(self.mhatt(x, x, closed)))
        return self.norm2(x + self.dropout(self.ffn.mlp(x)))


class SGA(nn.Module):
    def __init__(self, c: FusionConfig):
        super().__init__()
        self.mhatt1 = MHAtt(c.hidden, c.heads, value_bias=True, rate=c.dropout)
        self.mhatt2 = MHAtt(c.hidden, c.heads, value_bias=True, rate=c.dropout)
        self.ffn = Feed(c)
        self.norm1, self.norm2, self.norm3 = (Norm(c.hidden, c.eps) for _ in range(3))
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, question, closed, question_closed):
        x = self.norm1(x + self.dropout(self.mhatt1(x, x, closed)))
        x = self.norm2(x + self.dropout(self.mhatt2(x, question, question_closed)))
        return self.norm3(x + self.dropout(self.ffn.mlp(x)))


class Backbone(nn.Module):
    def __init__(self, c: FusionConfig):
        super().__init__()
        self.enc_list = nn.ModuleList(SA(c) for _ in range(c.layers))
        self.dec_list = nn.ModuleList(SGA(c) for _ in range(c.layers))


class Adapter(nn.Module):
    def __init__(self, a: int, b: int):
        super().__init__()
        self.frcn_linear = nn.Linear(a, b)


class TorchMCAN(nn.Module):
    """openvqa's, with its own keys."""

    def __init__(self, config: MCANOpenVQAConfig):
        super().__init__()
        c = config.fusion
        self.embedding = nn.Embedding(config.vocab_size, config.word_features)
        self.lstm = nn.LSTM(config.word_features, c.hidden, batch_first=True)
        self.adapter = Adapter(config.region_features, c.hidden)
        self.backbone = Backbone(c)
        flat = (c.hidden, c.flat_mlp, c.glimpses, c.flat_out, c.dropout)
        self.attflat_img, self.attflat_lang = AttFlat(*flat), AttFlat(*flat)
        self.proj_norm = Norm(c.flat_out, c.eps)
        self.proj = nn.Linear(c.flat_out, config.answers)

    def forward(self, ids, regions):
        """Logits [B, answers]."""
        question_closed, closed = ids == 0, regions.abs().sum(-1) == 0
        x, _ = self.lstm(self.embedding(ids))
        y = self.adapter.frcn_linear(regions)
        for layer in self.backbone.enc_list:
            x = layer(x, question_closed)
        for layer in self.backbone.dec_list:
            y = layer(y, x, closed, question_closed)
        fused = self.attflat_lang(x, question_closed) + self.attflat_img(y, closed)
        return self.proj(self.proj_norm(fused))
