"""openvqa's MCAN in PyTorch, the peer of a training step in `mmqa bench models`.

Its own layers, restated; it loads what we publish.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flax import nnx
from torch import nn

from mmqa_jax.bench import torch_reference
from mmqa_jax.models.mcan_layers import FusionConfig
from mmqa_jax.models.mcan_openvqa import MCANOpenVQAConfig
from mmqa_jax.weights.models.mcan import publish_mcan_openvqa


def random_batch(config: MCANOpenVQAConfig, sizes: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Questions of different lengths, pictures with all regions, and targets.

    sizes: rows, words, regions.
    """
    rows, words, regions = sizes
    rng = np.random.default_rng(5)
    ids = rng.integers(1, config.vocab_size, (rows, words))
    ids[np.arange(words) >= rng.integers(words // 2, words + 1, (rows, 1))] = 0
    return {
        "question_ids": ids,
        "image": rng.random((rows, regions, config.region_features), np.float32),
        "targets": (rng.random((rows, config.answers)) < 0.002).astype(np.float32),
    }


class TorchMCAN(nn.Module):
    """openvqa/models/mcan/net.py with mca.py, in PyTorch; `loss` as openvqa trains it."""

    def __init__(self, config: MCANOpenVQAConfig):
        super().__init__()
        c = config.fusion
        self.embedding = nn.Embedding(config.vocab_size, config.word_features)
        self.lstm = nn.LSTM(config.word_features, c.hidden, batch_first=True)
        self.adapter = nn.ModuleDict({"frcn_linear": nn.Linear(config.region_features, c.hidden)})
        encoder = nn.ModuleList(_Layer(c, guided=False) for _ in range(c.layers))
        decoder = nn.ModuleList(_Layer(c, guided=True) for _ in range(c.layers))
        self.backbone = nn.ModuleDict({"enc_list": encoder, "dec_list": decoder})
        self.attflat_lang, self.attflat_img = _Flatten(c), _Flatten(c)
        self.proj_norm = _Norm(c.flat_out, c.eps)
        self.proj = nn.Linear(c.flat_out, config.answers)

    def forward(self, ids: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        """Logits [B, answers]."""
        seen, visible = ids != 0, (regions != 0).any(-1)
        question, _ = self.lstm(self.embedding(ids))
        image = self.adapter["frcn_linear"](regions)
        for layer in self.backbone["enc_list"]:
            question = layer(question, seen)
        for layer in self.backbone["dec_list"]:
            image = layer(image, visible, question, seen)
        fused = self.attflat_lang(question, seen) + self.attflat_img(image, visible)
        return self.proj(self.proj_norm(fused))

    def loss(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy summed over answers, mean over the batch."""
        logits = self(inputs["question_ids"], inputs["image"]).float()
        cross_entropy = nn.functional.binary_cross_entropy_with_logits
        return cross_entropy(logits, inputs["targets"], reduction="sum") / len(logits)


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        deviation = x.std(-1, keepdim=True)
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (deviation + self.eps) + self.b_2


class _MLP(nn.Module):
    def __init__(self, inside: int, inner: int, outside: int, rate: float):
        super().__init__()
        self.fc = nn.ModuleDict({"linear": nn.Linear(inside, inner)})
        self.linear, self.dropout = nn.Linear(inner, outside), nn.Dropout(rate)

    def forward(self, x):
        return self.linear(self.dropout(self.fc["linear"](x).relu()))


class _Attention(nn.Module):
    def __init__(self, c: FusionConfig):
        super().__init__()
        for name in ("linear_v", "linear_k", "linear_q", "linear_merge"):
            setattr(self, name, nn.Linear(c.hidden, c.hidden))
        self.heads, self.rate = c.heads, c.dropout

    def forward(self, x, context, visible):
        query, key, value = (
            linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, y in (
                (self.linear_q, x),
                (self.linear_k, context),
                (self.linear_v, context),
            )
        )
        rate = self.rate if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible[:, None, None], dropout_p=rate
        )
        return self.linear_merge(mixed.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """SA, or with `guided` SGA."""

    def __init__(self, c: FusionConfig, *, guided: bool):
        super().__init__()
        kinds = ("mhatt1", "mhatt2") if guided else ("mhatt",)
        self.attentions = kinds
        for name in kinds:
            setattr(self, name, _Attention(c))
        self.ffn = nn.ModuleDict({"mlp": _MLP(c.hidden, c.mlp, c.hidden, c.dropout)})
        for number in range(len(kinds) + 1):
            setattr(self, f"norm{number + 1}", _Norm(c.hidden, c.eps))
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, visible, question=None, seen=None):
        contexts = ((None, visible), (question, seen))
        for number, name in enumerate(self.attentions):
            context, open_ = contexts[number]
            y = getattr(self, name)(x, x if context is None else context, open_)
            x = getattr(self, f"norm{number + 1}")(x + self.dropout(y))
        last = getattr(self, f"norm{len(self.attentions) + 1}")
        return last(x + self.dropout(self.ffn["mlp"](x)))


class _Flatten(nn.Module):
    def __init__(self, c: FusionConfig):
        super().__init__()
        self.mlp = _MLP(c.hidden, c.flat_mlp, c.glimpses, c.dropout)
        self.linear_merge = nn.Linear(c.hidden * c.glimpses, c.flat_out)

    def forward(self, x, visible):
        weights = self.mlp(x).masked_fill(~visible[:, :, None], -1e9).softmax(1)
        return self.linear_merge(torch.einsum("blg,blh->bgh", weights, x).flatten(1))


def torch_mcan(config: MCANOpenVQAConfig, state: nnx.State) -> TorchMCAN:
    """TorchMCAN with the weights of ours, on PyTorch's device."""
    source = publish_mcan_openvqa(config, state).source
    model = TorchMCAN(config)
    model.load_state_dict({key: torch.tensor(source.read(key)) for key in source.specs()})
    return model.eval().to(torch_reference.prepare_torch())
