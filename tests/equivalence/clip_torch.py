"""OpenAI's CLIP with vision transformers in plain torch, under its own keys.

Read in openai/CLIP clip/model.py.
"""

import collections

import torch
from torch import nn

from mmqa_jax.models.two_towers.config import CLIPConfig, TextConfig, VisionConfig


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, c: VisionConfig | TextConfig, mask: torch.Tensor | None):
        super().__init__()
        self.attn = nn.MultiheadAttention(c.width, c.width // 64)
        self.ln_1, self.ln_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        parts = [
            ("c_fc", nn.Linear(c.width, c.mlp_width)),
            ("gelu", QuickGELU()),
            ("c_proj", nn.Linear(c.mlp_width, c.width)),
        ]
        self.mlp = nn.Sequential(collections.OrderedDict(parts))
        self.attn_mask = mask

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=self.attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, c: VisionConfig | TextConfig, mask: torch.Tensor | None = None):
        super().__init__()
        self.resblocks = nn.Sequential(*(Block(c, mask) for _ in range(c.layers)))

    def forward(self, x):  # [B, L, width], which the blocks take as [L, B, width]
        return self.resblocks(x.permute(1, 0, 2)).permute(1, 0, 2)


class VisionTransformer(nn.Module):
    def __init__(self, c: VisionConfig):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c.width, c.patch_size, c.patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(c.width) / c.width**0.5)
        positions = torch.randn(c.patches + 1, c.width)
        self.positional_embedding = nn.Parameter(positions / c.width**0.5)
        self.ln_pre, self.ln_post = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.transformer = Transformer(c)
        self.proj = nn.Parameter(torch.randn(c.width, c.embed_dim) / c.width**0.5)

    def forward(self, x):
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        first = self.class_embedding + torch.zeros_like(x[:, :1])
        x = self.ln_pre(torch.cat([first, x], 1) + self.positional_embedding)
        return self.ln_post(self.transformer(x)[:, 0]) @ self.proj


class TorchCLIP(nn.Module):
    def __init__(self, config: CLIPConfig):
        super().__init__()
        c = config.text
        self.visual = VisionTransformer(config.vision)
        mask = torch.full((c.context, c.context), float("-inf")).triu(1)
        self.transformer = Transformer(c, mask)
        self.token_embedding = nn.Embedding(c.vocab_size, c.width)
        self.positional_embedding = nn.Parameter(torch.randn(c.context, c.width) * 0.1)
        self.ln_final = nn.LayerNorm(c.width)
        self.text_projection = nn.Parameter(torch.randn(c.width, c.embed_dim) / c.width**0.5)
        self.logit_scale = nn.Parameter(torch.tensor(2.5))

    def encode_text(self, text):
        x = self.transformer(self.token_embedding(text) + self.positional_embedding)
        last = text.argmax(-1)  # end-of-text has the largest number
        return self.ln_final(x)[torch.arange(len(x)), last] @ self.text_projection

    def forward(self, image, text):
        image, text = self.visual(image), self.encode_text(text)
        image = image / image.norm(dim=1, keepdim=True)
        text = text / text.norm(dim=1, keepdim=True)
        return self.logit_scale.exp() * image @ text.T
