"""What each family with pictures shows beside transformers, whatever its pictures become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from compare import reloaded, same_parameters
from flax import nnx
from PIL import Image

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import tower_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.check import check
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Picture
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.picture_format import picture_format, shown_pictures
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.config_json import config_from_json, config_to_json
from mmqa_jax.weights.published import load_published, write_published
from tests.pictures import encoded

NEW = 6  # tokens of an answer
PROMPTS = [("a<image>b", [0]), ("<image>and<image>\nc", [1, 2]), ("<image><image>d", [3, 1])]
Part = str | Image.Image
Tensors = Mapping[str, torch.Tensor]


class Pair(NamedTuple):
    """A torch model, ours of its checkpoint, transformers' processor, and the folder."""

    theirs: torch.nn.Module
    ours: nnx.Module
    processor: Any
    folder: Path


def long_prompt(pictures: int) -> str:
    """More than 500 letters, and places of pictures amid them."""
    words = "".join(np.random.default_rng(1).choice(list("abcdefg hi"), 505))
    second = "<image>" if pictures == 2 else ""
    return f"{words[:17]}<image>{words[17:200]}{second}{words[200:]}"


def tokens_and_pixels(
    pair: Pair, text: str, images: Sequence[Image.Image], placeholder: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Our ids [1, L] with a placeholder for each token of a picture, and the pictures' pixels."""
    form = picture_format(pair.ours.config, open_text_tokenizer(pair.folder))
    files = shown_pictures([Picture(encoded(image), "picture") for image in images])
    counts = iter([form.tokens(file) for file in files])
    ids = [
        token
        for token in form.encode(text, files)
        for _ in range(next(counts) if token == placeholder else 1)
    ]
    return np.array([ids]), [form.read(file) for file in files]


def processor_inputs(processor: Any, parts: Sequence[Part], words: str | None = None) -> Tensors:
    """transformers' inputs of a user's message.

    Args:
      words: the message's text, where a template takes no parts.
    """
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    text = processor.apply_chat_template(
        [{"role": "user", "content": words or content}], add_generation_prompt=True
    )
    images = [part for part in parts if not isinstance(part, str)] or None
    return processor(images=images, text=text, return_tensors="pt", add_special_tokens=False)


def answers_as_generate(
    pair: Pair, messages: Mapping[str, tuple[Sequence[Part], Tensors]], end: int
) -> EngineBackend:
    """Compares answers to messages with those of transformers' `generate`.

    Args:
      messages: parts of a user's message, and transformers' inputs of its prompt, by a name.
      end: the token that ends an answer.

    Returns:
      The backend that answered: a program for each bucket of pictures, one segment of the cache.
    """
    sizes = EngineConfig(slots=2, length=260, buckets=(32,), prefill_tokens=64)
    backend = open_backend(pair.folder, engine=sizes)
    chats = []
    for name, (parts, _) in messages.items():
        content = [
            part if isinstance(part, str) else Picture(encoded(part), "picture") for part in parts
        ]
        chats.append(Chat(name, (Message("user", content),), Decoding(NEW)))
        backend.check(chats[-1])
    answers = {result.id: result for result in backend.answer(chats)}
    for chat in chats:
        inputs = messages[chat.id][1]
        with torch.no_grad():
            want = pair.theirs.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=end
            )
        count = inputs["input_ids"].shape[1]
        assert backend.prompt_tokens(chat) == answers[chat.id].prompt_tokens == count, chat.id
        assert list(answers[chat.id].candidates[0].tokens) == want[0, count:].tolist(), chat.id
    return backend


def export_is_read_by_both(pair: Pair, family: str, published: Any, out: Path) -> torch.nn.Module:
    """Ours, exported, is transformers' and ours again; and its record is read back.

    Returns:
      transformers' model of the export.
    """
    write_published(out, published)
    for pattern in ("*processor*", "tokenizer.json"):
        for file in pair.folder.glob(pattern):
            (out / file.name).write_bytes(file.read_bytes())
    again = reloaded(type(pair.theirs), out)
    got, want = again.state_dict(), pair.theirs.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    back = load_published(family, out, unroll=1)
    assert back.config == pair.ours.config
    same_parameters(back, pair.ours)
    record = json.loads(json.dumps(config_to_json(back.config)))
    assert config_from_json(type(back.config), record, "model.json") == back.config
    return again


def check_passes(folder: Path, *names: str) -> None:
    """`mmqa convert --check` compares what `names` say, and all is equal."""
    rows = check(None, folder)
    assert all(row.passed for row in rows), rows
    assert set(names) <= {row.name for row in rows}


def lower_tower(config: Any, sizes: EngineConfig) -> jax.sharding.Mesh:
    """Lowers the tower's programs of a plan, as shapes; gives the mesh they are lowered for."""
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    programs = tower_programs(config, sizes, mesh)
    with jax.set_mesh(mesh):
        for program in programs.values():
            program.function.lower(*program.arguments)
    return mesh


def changed(published: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in which some values are others, also within its objects."""
    return {
        **published,
        **{
            key: published[key] | value if isinstance(value, dict) else value
            for key, value in changes.items()
        },
    }
