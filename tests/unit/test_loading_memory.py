"""Host memory while weights are loaded: the model, and at most its largest tensor beside it."""

import gc
import json
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import gguf
import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from tiny_checkpoints import published_arrays

from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import llama_key_map
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.two_towers.config import SiglipConfig, SiglipTextConfig, SiglipVisionConfig
from mmqa_jax.tasks.base_llm import base_loader
from mmqa_jax.tasks.language_model import LanguageModelObjective
from mmqa_jax.training.state import abstract_state, pretrained_state, split_model
from mmqa_jax.weights.convert import convert
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.formats.orbax_reader import aligned_empty
from mmqa_jax.weights.formats.safetensors import ArraySource, write_sharded
from mmqa_jax.weights.keymap import load_model
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.registry import architecture
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

SLACK = 7 << 17  # bytes of Python's own objects
_LLAMA = {"vocab_size": 2800, "hidden": 256, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 256}
# Of 10 to 22 MB, the largest tensor of 3 to 4 MB.
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_LLAMA, positions=64),
    "t5": T5Config(
        vocab_size=2800, hidden=256, head_size=64, heads=4, mlp=256, encoder_layers=2,
        decoder_layers=2, gated=True, activation="gelu_new", tied=False, scaled=False,
    ),
    "siglip": SiglipConfig(
        SiglipVisionConfig(32, 8, width=256, layers=3, heads=4, mlp_width=256),
        SiglipTextConfig(2800, 16, width=256, layers=3, heads=4, mlp_width=256, embed_dim=256),
    ),
    "qwen_vl": QwenVLConfig(
        QwenVisionConfig(width=256, layers=3, heads=4, mlp=256, out=256, full_layers=(1,)),
        LlamaConfig(
            **_LLAMA, family="qwen2", attention_bias=True, out_bias=False, mrope=(8, 12, 12),
        ),
        image_token=40,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _earlier_tests_objects():
    """They are not looked through again whenever garbage is collected here."""
    gc.collect()
    gc.freeze()


def _published(model: str, arrays: dict[str, np.ndarray], folder) -> None:
    """config.json beside weights of any format."""
    entry, config = architecture(model), CONFIGS[model]
    made = nnx.eval_shape(lambda: entry.build(config, rngs=nnx.Rngs()))
    described = entry.publish(config, nnx.state(made)).config
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(arrays, folder / "model.safetensors")


def _sizes(model: nnx.Module) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest tensor of a checkpoint: a layer's, of a stack."""
    leaves = flatten_named(nnx.state(model)).items()
    sizes = [x.nbytes // (x.shape[0] if "layers/" in name else 1) for name, x in leaves]
    return sum(x.nbytes for _, x in leaves), max(sizes)


def _holds_little_more_than_the_model(load: Callable[[], nnx.Module], factor: float = 1) -> None:
    """Loads and compares; on the CPU all arrays lie in numpy's memory, which tracemalloc counts.

    factor: size of the largest tensor in the checkpoint, as a share of that in the model.
    """
    load()  # what is imported and traced once
    gc.collect()
    tracemalloc.start()
    try:
        model = load()
        jax.block_until_ready(nnx.state(model))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    total, largest = _sizes(model)
    assert held > total, "the model is not in the memory that is counted"
    assert largest > 3 * SLACK
    assert peak - total < factor * largest + SLACK


@pytest.mark.parametrize("model", CONFIGS)
def test_published_weights(model, tmp_path):
    _published(model, published_arrays(model, CONFIGS[model]), tmp_path / "hf")
    _holds_little_more_than_the_model(lambda: load_published(model, tmp_path / "hf"))


@pytest.mark.parametrize("layout", ["bfloat16", "shards", "torch", "converted"])
def test_layouts(layout, tmp_path):
    folder, load, factor = tmp_path / "hf", load_published, 1.0
    arrays = published_arrays(
        "llama", CONFIGS["llama"], "bfloat16" if layout == "bfloat16" else "float32"
    )
    _published("llama", arrays, folder)
    if layout == "bfloat16":
        factor = 0.5
    elif layout == "shards":
        (folder / "model.safetensors").unlink()
        write_sharded(folder, ArraySource(arrays), shard_bytes=5 << 20)
    elif layout == "torch":
        (folder / "model.safetensors").unlink()
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        torch.save(tensors, folder / "pytorch_model.bin")
    elif layout == "converted":
        convert("llama", folder, tmp_path / "converted")
        folder = tmp_path / "converted"
        load = lambda _, folder: load_converted(folder)  # noqa: E731
    del arrays
    _holds_little_more_than_the_model(lambda: load("llama", folder), factor)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32"])
def test_a_gguf_tensor_is_dequantized_piece_by_piece(kind, tmp_path):
    rng, kinds = np.random.default_rng(0), gguf.GGMLQuantizationType
    values = rng.standard_normal((2048, 2048), np.float32)
    stored = gguf.quants.quantize(values, kinds[kind])
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", stored, raw_dtype=kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(tmp_path / "x.gguf")
    source.read("x")
    tracemalloc.start()
    found = source.read("x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(found, gguf.quants.dequantize(stored, kinds[kind]))
    assert peak < found.nbytes + (4 << 20)  # of 16 MiB


class _Watched(ArraySource):
    """Notes how many bytes of arrays there are whenever a tensor is read."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        super().__init__(arrays)
        self.most = 0

    def read(self, key: str) -> np.ndarray:
        self.most = max(self.most, _alive())
        return super().read(key)


def _alive() -> int:
    """Bytes of all arrays."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_model_that_exists_is_filled_without_a_second_one():
    config = CONFIGS["llama"]
    source, before = _Watched(published_arrays("llama", config)), _alive()
    model = drawn(lambda: Llama(config, rngs=nnx.Rngs()))
    load_model(model, llama_key_map(config), source)
    assert source.most - before < _sizes(model)[0]
    want = source.read("model.norm.weight")
    np.testing.assert_array_equal(model.norm.scale[...], want)


@pytest.mark.parametrize("converted", [False, True])
def test_a_run_starts_from_a_base_without_a_second_model(converted, tmp_path, monkeypatch):
    config, folder = CONFIGS["llama"], tmp_path / "hf"
    arrays = published_arrays("llama", config)
    _published("llama", arrays, folder)
    if converted:
        convert("llama", folder, tmp_path / "converted")
        folder = tmp_path / "converted"
    seen, before = [], _alive()
    objective, sgd = LanguageModelObjective(config), optax.identity()
    model = split_model(objective, 0)
    abstract = abstract_state(model, sgd, make_mesh(devices=jax.devices()[:1]), DEFAULT_RULES)
    section = types.SimpleNamespace(lora=None)
    load = base_loader(
        types.SimpleNamespace(init=str(folder), architecture="llama", mesh={}, model=section)
    )

    def noting(shape, dtype):
        seen.append(_alive())
        return aligned_empty(shape, dtype)

    for module in ("keymap", "formats.orbax_reader"):
        monkeypatch.setattr(f"mmqa_jax.weights.{module}.aligned_empty", noting)
    state = pretrained_state(model, sgd, 0, abstract, load)
    assert seen
    assert max(seen) - before < _sizes(model.merge(state.params, state.frozen))[0]
    np.testing.assert_array_equal(state.params["norm"]["scale"][...], arrays["model.norm.weight"])
