"""Tiny random Qwen3-VL-Embedding and -Reranker, and transformers run by their published recipes.

The originals (QwenLM/Qwen3-VL-Embedding src/models/) need packages that are not here; what they do
between the chat template and `Qwen3VLModel` is restated: pictures through qwen_vl_utils' sizes,
which transformers has as `smart_resize`, then the image processor without resizing.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from byte_tokenizer import byte_tokenizer
from PIL import Image
from qwen_vl_pair import SPECIAL, TEMPLATE, UNIT, pictures, save_torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

LEAST, MOST = 4 * UNIT**2, 1800 * UNIT**2


class Published(NamedTuple):
    """A saved checkpoint and what transformers has of it."""

    model: torch.nn.Module  # Qwen3VLForConditionalGeneration
    processor: Qwen2VLImageProcessorPil
    tokenizer: transformers.PreTrainedTokenizerFast
    folder: Path

    def states(self, conversation: list[dict], pictures: list[Image.Image]) -> torch.Tensor:
        """The last layer's normed states [L, H] of a conversation."""
        text = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        given = {}
        if pictures:
            shown = []
            for one in pictures:
                height, width = smart_resize(one.height, one.width, UNIT, LEAST, MOST)
                shown.append(one.convert("RGB").resize((width, height)))
            given = dict(self.processor(images=shown, do_resize=False, return_tensors="pt"))
            before, *rest = text.split("<|image_pad|>")
            counts = (given["image_grid_thw"].prod(-1) // 4).tolist()
            assert len(rest) == len(counts)
            for part, count in zip(rest, counts, strict=True):
                before += "<|image_pad|>" * count + part
            text = before
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        image = self.model.config.image_token_id
        self.model.model.rope_deltas = None
        with torch.no_grad():
            return self.model.model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == image).int(),
                **given,
            ).last_hidden_state[0]


def make_published(folder: Path, *around: str) -> Published:
    """Saves a checkpoint whose tokenizer puts tokens around a text."""
    tokenizer = byte_tokenizer(*around, more=SPECIAL[2:])
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(SPECIAL[2:])), strict=True))
    sizes = {"vocab_size": len(tokenizer) + 3, "max_position_embeddings": 4096}
    sizes["num_hidden_layers"] = 2  # deepstack goes to both
    model, processor = save_torch("qwen3_vl", folder, sizes, **ids)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return Published(model.eval(), processor, tokenizer, folder)


def small_pictures() -> list[Image.Image]:
    """Of three sizes, the second too small."""
    sizes = [(115, 80), (10, 16), (44, 36)]  # width, height
    return [one.resize(size) for one, size in zip(pictures(), sizes, strict=True)]


def says(text: str) -> dict[str, str]:
    """A text of a message."""
    return {"type": "text", "text": text}


def write_json(file: Path, content: object) -> None:
    """A file of sentence-transformers."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
