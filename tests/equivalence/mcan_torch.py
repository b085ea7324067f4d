"""Torch restatements of the layers that Prophet's and openvqa's MCAN share, keys as published.

Read in MILVLG/prophet prophet/stage1/model/layers.py and MILVLG/openvqa openvqa/models/mcan/.
"""

from __future__ import annotations

import torch
from torch import nn


class FC(nn.Module):
    def __init__(self, a: int, b: int):
        super().__init__()
        self.linear = nn.Linear(a, b)

    def forward(self, x):
        return self.linear(x).relu()


class MLP(nn.Module):
    def __init__(self, a: int, b: int, c: int):
        super().__init__()
        self.fc = FC(a, b)
        self.linear = nn.Linear(b, c)

    def forward(self, x):
        return self.linear(self.fc(x))


class Projections(nn.Module):
    """The four linears of an attention, and the attention itself."""

    def __init__(self, size: int, heads: int, value_bias: bool):
        super().__init__()
        self.linear_v = nn.Linear(size, size, bias=value_bias)
        self.linear_k = nn.Linear(size, size)
        self.linear_q = nn.Linear(size, size)
        self.linear_merge = nn.Linear(size, size)
        self.heads = heads

    def split(self, x):  # [B, L, H] -> [B, heads, L, head_dim]
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def attend(self, query, key, value, closed):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if closed is not None:
            scores = scores.masked_fill(closed[:, None, None], -1e9)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2)
        return self.linear_merge(mixed.reshape(*mixed.shape[:2], -1))


class MHAtt(Projections):
    def forward(self, x, context, closed):
        query = self.split(self.linear_q(x))
        key, value = self.split(self.linear_k(context)), self.split(self.linear_v(context))
        return self.attend(query, key, value, closed)


class AttFlat(nn.Module):
    def __init__(self, size: int, inner: int, glimpses: int, out: int):
        super().__init__()
        self.mlp = MLP(size, inner, glimpses)
        self.linear_merge = nn.Linear(size * glimpses, out)

    def forward(self, x, closed):
        weights = self.mlp(x)
        if closed is not None:
            weights = weights.masked_fill(closed[:, :, None], -1e9)
        weights = weights.softmax(1)
        sums = [(weights[:, :, n, None] * x).sum(1) for n in range(weights.shape[-1])]
        return self.linear_merge(torch.cat(sums, 1))
