"""Tiny SigLIPs as transformers publishes them, of random weights and sizes off their defaults."""

import numpy as np
import sentencepiece
import torch
import transformers
from compare import randomize

TEXT = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 11, "hidden_act": "gelu",
    "layer_norm_eps": 3e-4, "projection_size": 40, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 5,
    "patch_size": 6, "layer_norm_eps": 2e-4,
}  # fmt: skip


def published(kind, folder):
    """A tiny checkpoint, as torch's model: `siglip` of a fixed size, or `siglip2`, NaFlex."""
    torch.manual_seed(0)
    if kind == "siglip":  # 27 pixels: three belong to no patch, as 384 of so400m-patch14-384
        size, parts = {"image_size": 27}, ("SiglipConfig", "SiglipModel")
    else:
        size, parts = {"num_patches": 16}, ("Siglip2Config", "Siglip2Model")
    config = getattr(transformers, parts[0])(text_config=TEXT, vision_config={**VISION, **size})
    model = randomize(getattr(transformers, parts[1])(config), 0)
    with torch.no_grad():
        model.logit_scale.fill_(1.7)
        model.logit_bias.fill_(-2.3)
    model.save_pretrained(folder)
    return model


def spiece(folder):
    """A SentencePiece model as SigLIP's: </s> is 1, and pads too."""
    rng = np.random.default_rng(0)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dog",
        "a",
        "photo",
        "of",
        "cat",
        "flag",
        "two",
        "spaces",
        "and",
    ]
    lines = [" ".join(rng.choice(words, 8)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), vocab_size=60,
        model_type="unigram", pad_id=-1, eos_id=1, unk_id=2, bos_id=0, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
