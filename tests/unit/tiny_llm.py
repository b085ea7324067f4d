"""A tiny random LLaMA with a tokenizer of letters and ChatML's template, as a published folder."""

import dataclasses
import functools
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models

from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import publish_llama
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.keys import publish_llava
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.onevision.keys import publish_onevision
from mmqa_jax.models.onevision.network import Onevision, OnevisionConfig
from mmqa_jax.models.qwen_vl.keys import publish_qwen_vl
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVL, QwenVLConfig
from mmqa_jax.models.two_towers.config import SiglipVisionConfig, VisionConfig
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, TextTokenizer
from mmqa_jax.weights.published import write_published
from tests.drawn_weights import drawn

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:?\n"
SPECIAL = ("<|im_start|>", "<|im_end|>")
END = len(LETTERS) + 1


def llama_config(vocab_size: int, positions: int = 192) -> LlamaConfig:
    """A tiny LLaMA whose random parameters are large enough to tell tokens apart."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp=48,
        positions=positions,
        init_stddev=0.4,
        unroll=1,
    )


MODEL = llama_config(len(LETTERS) + 2)
# Five pages for a sequence of 160 tokens.
SIZES = EngineConfig(slots=4, length=160, buckets=(8, 32), prefill_tokens=64)  # pages of 32
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(config: LlamaConfig = MODEL, seed: int = 6) -> Llama:
    """A LLaMA of random weights that are large enough to tell tokens apart."""
    return drawn(lambda: Llama(config, rngs=nnx.Rngs()), seed, stddev=0.3)


def letters() -> Tokenizer:
    """One token a letter."""
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(LETTERS)}, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def text_tokenizer() -> TextTokenizer:
    """The same with template and end."""
    return TextTokenizer(letters(), ChatTemplate(TEMPLATE), (END,))


def make_engine() -> Engine:
    """The engine of the tiny model."""
    return Engine(tiny_llama(), text_tokenizer(), end_ids=(END,), config=SIZES)


def tiny_backend(engine: Engine, fingerprint: str = "tiny") -> EngineBackend:
    """A backend over an engine that is there."""
    return EngineBackend(
        lambda demand: engine, text_tokenizer(), length=SIZES.length, fingerprint=fingerprint
    )


def tiny_llava() -> EngineBackend:
    """A backend of a tiny random LLaVA, whose engine is its own."""
    vision = VisionConfig(
        image_size=12, patch_size=4, width=24, layers=2, heads=2, mlp_width=20, embed_dim=16
    )
    config = LlavaConfig(vision, dataclasses.replace(MODEL, positions=320), image_token=-200)
    sizes = dataclasses.replace(SIZES, length=320, buckets=(32,), slots=2)
    model = drawn(lambda: Llava(config, rngs=nnx.Rngs()), 3, MODEL.init_stddev)
    engine = Engine(model, text_tokenizer(), config=sizes)
    return EngineBackend(
        lambda demand: engine, text_tokenizer(), length=320, fingerprint="llava", pictures=config
    )


def by_id(results: Iterable[Any]) -> dict[Any, Any]:
    """Results in the order in which they came, under their ids."""
    return {result.id: result for result in results}


def flag(color: tuple[int, int, int] = (200, 30, 40), size: tuple[int, int] = (6, 4)) -> Picture:
    """A picture of one color, called red.png."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return Picture(file.getvalue(), "red.png")


@functools.cache  # once for all files of a worker
def _published_llama(config: LlamaConfig) -> Any:
    return publish_llama(config, nnx.state(tiny_llama(config)))


@functools.cache
def _published_qwen_vl() -> Any:
    config = qwen_vl_config()
    model = drawn(lambda: QwenVL(config, rngs=nnx.Rngs()), 3, config.llama.init_stddev)
    return publish_qwen_vl(config, nnx.state(model))


def write_folder(folder: Path, model: LlamaConfig = MODEL) -> Path:
    """Writes the model as transformers would."""
    folder.mkdir()
    write_published(folder, _published_llama(model), more={"eos_token_id": END})
    letters().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


# Behind the others, the tokens of pictures and Qwen's template, without videos.
VISION = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
PICTURED = TEMPLATE.replace(
    "message['content'] ",
    "(message['content'] if message['content'] is string else message['content'] "
    "| map(attribute='text', default='<|vision_start|><|image_pad|><|vision_end|>') | join) ",
)


def qwen_vl_config() -> QwenVLConfig:
    """A tiny Qwen2.5-VL, whose tokenizer is `pictured_letters`."""
    first = len(LETTERS) + len(SPECIAL)
    llama = dataclasses.replace(
        llama_config(first + len(VISION), positions=512),
        family="qwen2",
        attention_bias=True,
        out_bias=False,
        mrope=(2, 1, 1),
    )
    vision = QwenVisionConfig(
        width=16, layers=2, heads=2, mlp=20, out=llama.hidden, patch=2, window=8, full_layers=(1,)
    )
    tokens = dict(
        zip(("image", "video", "vision_start", "vision_end"), range(first, first + 4), strict=True)
    )
    return QwenVLConfig(vision, llama, **{f"{name}_token": n for name, n in tokens.items()})


def pictured_letters() -> Tokenizer:
    """One token a letter, and those of pictures."""
    tokenizer = letters()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in VISION])
    return tokenizer


def write_qwen_vl(folder: Path) -> Path:
    """Writes a tiny random Qwen2.5-VL as transformers would; a picture takes 9 tokens or more."""
    folder.mkdir()
    write_published(folder, _published_qwen_vl(), more={"eos_token_id": END})
    pictured_letters().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": PICTURED}))
    sizes = {"min_pixels": 144, "max_pixels": 400, "patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


# As llava-hf's: a picture's placeholder stands before a message's words.
IN_PARTS = TEMPLATE.replace(
    "message['content'] ",
    "('<image>\\n' * (message['content'] | selectattr('type', 'equalto', 'image') | list | length)"
    " ~ (message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') "
    "| join)) ",
)


def write_onevision(folder: Path, positions: int = 512) -> Path:
    """Writes a tiny random LLaVA-OneVision as transformers would; a picture takes 5 tokens or more
    of two tiles."""
    first = len(LETTERS) + len(SPECIAL)
    llama = dataclasses.replace(
        llama_config(first + 2, positions), family="qwen2", attention_bias=True, out_bias=False
    )
    vision = SiglipVisionConfig(8, 4, width=16, layers=2, heads=2, mlp_width=20, head=False)
    config = OnevisionConfig(
        vision,
        llama,
        image_token=first,
        video_token=first + 1,
        resolutions=((8, 8), (8, 16), (16, 8)),
    )
    model = drawn(lambda: Onevision(config, rngs=nnx.Rngs()), 3, llama.init_stddev)
    published = publish_onevision(config, nnx.state(model))
    return _write_in_parts(folder, published, ("<image>", "<video>"))


def write_llava(folder: Path, positions: int = 512) -> Path:
    """Writes a tiny random LLaVA-1.5 as transformers would; a picture takes 9 tokens."""
    first = len(LETTERS) + len(SPECIAL)
    vision = VisionConfig(
        image_size=12, patch_size=4, width=24, layers=2, heads=2, mlp_width=20, embed_dim=16
    )
    config = LlavaConfig(vision, llama_config(first + 1, positions), image_token=first)
    model = drawn(lambda: Llava(config, rngs=nnx.Rngs()), 3, config.llama.init_stddev)
    return _write_in_parts(folder, publish_llava(config, nnx.state(model)), ("<image>",))


def _write_in_parts(folder: Path, published: Any, marks: Sequence[str]) -> Path:
    folder.mkdir()
    write_published(folder, published, more={"eos_token_id": END})
    tokenizer = letters()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": IN_PARTS}))
    return folder
