"""EmbeddingGemma 2 with its pictures beside transformers' EmbeddingGemma2Model, float32."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from compare import WHOLE, randomize
from flax import nnx
from PIL import Image
from safetensors.torch import load_file
from tiny_encoders import texts
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.pictures.decode import decode_to_pixels
from mmqa_jax.models.encoders.pictured_gemma import (
    GemmaEncoder,
    embedding_gemma_2,
    load_pictured,
    published_pictured,
    read_pictured_config,
)
from mmqa_jax.retrieval.vlm_encoder import load_gemma_embedder
from mmqa_jax.tasks.embedder import open_embedder
from tests.pictures import encoded, smooth
from tests.refusals import refuses

pytestmark = pytest.mark.slow

PATCH, MERGE, BUDGET, WIDTH = 4, 3, 70, 24
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 12},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 20},
    **{"num_global_key_value_heads": 1, "sliding_window": 36, "rms_norm_eps": 1e-3},
    **{"hidden_size_per_layer_input": 10, "embedding_dim": WIDTH, "max_position_embeddings": 900},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}
TOWER = {
    **{"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "head_dim": 12},
    **{"num_attention_heads": 5, "num_key_value_heads": 5, "patch_size": PATCH},
    **{"rms_norm_eps": 3e-4, "position_embedding_size": 300, "pooling_kernel_size": MERGE},
    **{"standardize": True, "use_clipped_linears": True},
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
SOUND = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 24},
}
# Lying, standing, smaller than a unit, and one row of units.
SIZES = [(50, 33), (20, 71), (9, 9), (200, 1)]
CAPTIONS = ["", "a flag", texts(400)[-1][:520], "b"]


class Published(NamedTuple):
    theirs: Any
    own: Any
    processor: Gemma4ImageProcessorPil
    folder: Path


def randomized(model: Any) -> Any:
    torch.manual_seed(0)
    model = randomize(model, 0, 0.12).eval()
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(-0.9 if name.endswith("_min") else 1.1)
        elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
            buffer.add_(0.3 * torch.rand(buffer.shape))
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    """With towers for pictures and for sound."""
    folder = tmp_path_factory.mktemp("pictured")
    own = byte_tokenizer("<s>", "$A", "</s>", more=("<|image>", "<|image|>", "<image|>"))
    ids = own.convert_tokens_to_ids(["<|image>", "<|image|>", "<image|>"])
    config = transformers.EmbeddingGemma2Config(
        text_config=TEXT | {"vocab_size": len(own) + 3},
        vision_config=TOWER,
        audio_config=SOUND,
        boi_token_id=ids[0],
        image_token_id=ids[1],
        eoi_token_id=ids[2],
        attn_implementation="eager",
    )
    model = randomized(transformers.EmbeddingGemma2Model(config))
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=BUDGET, patch_size=PATCH, pooling_kernel_size=MERGE
    )
    processor.save_pretrained(folder)
    # As its authors publish it, a copy of what the processor's file says.
    file = folder / "config.json"
    content = json.loads(file.read_text()) | {"vision_soft_tokens_per_image": BUDGET}
    file.write_text(json.dumps(content))
    module, layers = "sentence_transformers.models.", {"": "Transformer", "1_Pooling": "Pooling"}
    layers["2_Normalize"] = "Normalize"
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{module}{name}"}
        for number, (path, name) in enumerate(layers.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 700}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    settings = {"prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return Published(model, own, processor, folder)


@pytest.fixture(scope="module")
def ours(published):
    return load_gemma_embedder(published.folder, batch_size=2)


def vector(published: Published, text: str, picture: Image.Image | None = None) -> np.ndarray:
    """The mean over `<s> text <|image> ... <image|> </s>`, by transformers' processor of pictures.

    EmbeddingGemma2Processor needs processors of videos and sound, so that its rule for a picture
    (`replace_image_token`) is written here again.
    """
    made = {}
    if picture is not None:
        made = dict(published.processor([picture], return_tensors="pt"))
        count = int(made.pop("num_soft_tokens_per_image")[0])
        text += f"<|image>{'<|image|>' * count}<image|>"
    tokens = published.own(text, return_tensors="pt")
    with torch.no_grad():
        states = published.theirs(
            tokens["input_ids"], attention_mask=tokens["attention_mask"], **made
        )[0]
    return torch.nn.functional.normalize(states[0].mean(0), dim=0).numpy()


def pictures() -> list[Image.Image]:
    return [smooth(size, number) for number, size in enumerate(SIZES)]


def test_a_corpus_of_texts_pictures_and_both(published):
    """A text of 520 tokens and more, pictures of several sizes, with captions and without."""
    shown, snippets = pictures(), ["a", texts(400)[-1][:560]]
    corpus = corpus_of_lists(
        [*CAPTIONS, *snippets], None, [*map(encoded, shown), *[None] * len(snippets)], None
    )
    embedder, store = open_embedder(published.folder, corpus, {"batch_size": 2})
    count = len(corpus.sources)
    got = embedder.embed_rows(corpus, store, range(count))
    before = PROMPTS["document"]
    want = [
        vector(published, before + text if text else "", picture)
        for text, picture in zip(CAPTIONS, shown, strict=True)
    ]
    want += [vector(published, before + text) for text in snippets]
    assert 520 < len(embedder.tokenizer.encode(before + snippets[-1])) < 698
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(got[1] - vector(published, "", shown[1])).max() > 0.01
    # Alone as beside the others.
    alone = [embedder.embed_rows(corpus, store, [row])[0] for row in range(count)]
    np.testing.assert_allclose(alone, got, rtol=0, atol=1e-6)


def test_questions_and_pictures(published, ours):
    shown = pictures()[:2]
    pixels = [
        decode_to_pixels(encoded(one), ours.image_size, ours.resize, alpha=ours.alpha)
        for one in shown
    ]
    got = ours.embed_questions(["which flag?", "a"], [None, pixels[1]])
    before = PROMPTS["query"]
    want = [vector(published, before + "which flag?"), vector(published, before + "a", shown[1])]
    np.testing.assert_allclose(got, want, **WHOLE)
    want = [vector(published, "", one) for one in shown]
    np.testing.assert_allclose(ours.embed_pictures(pixels), want, **WHOLE)
    assert ours.dim == WIDTH


def test_a_mark_of_a_picture_in_a_text_is_plain(ours):
    """Else a source could pass for a picture."""
    prompts = ours._prompts(["a <|image|> b"], [None], "")
    assert ours._config.image_token not in prompts[0].tokens


def test_both_directions_of_weights(published):
    model = load_pictured(published.folder)
    source = published_pictured(model.config, jax.tree.map(np.asarray, state_of(model)))
    theirs = load_file(published.folder / "model.safetensors")
    theirs = {key: x for key, x in theirs.items() if "audio" not in key}
    assert source.specs().keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(source.read(key), tensor.numpy())


def state_of(model: Any) -> Any:
    return nnx.state(model, nnx.Param)


def test_the_preset_is_the_published_one():
    """By the parameters of transformers' model with its defaults, without its tower for sound."""
    config = transformers.EmbeddingGemma2Config(vision_config={}, audio_config=None)
    with torch.device("meta"):
        theirs = transformers.EmbeddingGemma2Model(config)
    sizes = embedding_gemma_2()
    made = nnx.state(nnx.eval_shape(lambda: GemmaEncoder(sizes, rngs=nnx.Rngs(0))), nnx.Param)
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(made))
    buffers = sum(x.numel() for name, x in theirs.named_buffers() if "layer_scalar" in name)
    assert count == sum(x.numel() for x in theirs.parameters()) + buffers
    assert sizes.budget == 280


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"sights": 1}, "key 'sights'"),
        ("config.json", {"vision_config": TOWER | {"model_type": "siglip"}}, "siglip"),
        ("preprocessor_config.json", {"max_soft_tokens": 0}, "max_soft_tokens"),
        ("preprocessor_config.json", {"max_soft_tokens": 900}, "a picture may have 900"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
            "pooling 'cls'",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 25}, "keeps 25 values of vectors"),
    ],
)
def test_bad_files_are_refused(published, file, change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(published.folder, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))
    refuses(message, load_gemma_embedder, folder)


def test_the_tower_for_sound_is_named(published, caplog):
    read_pictured_config(published.folder)
    assert "embeds no sound" in caplog.text
