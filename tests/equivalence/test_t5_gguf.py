"""T5 in GGUF files: tensors of a torch model under llama.cpp's names, read by us, and refusals.

Names are those of the package `gguf`, metadata those of llama.cpp's conversion/t5.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, forward, randomize
from tiny_t5 import EXTRA, VOCABULARY, add_spiece, write_spiece

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.models.t5.keys import open_multimodal_t5, open_t5
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.registry import model_of
from tests.refusals import refuses

pytestmark = pytest.mark.slow

ROWS = VOCABULARY + EXTRA + 10  # of the table, more than tokens as published ones
SIZES = {
    "vocab_size": ROWS,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 20,
    "layer_norm_epsilon": 1e-3,
    "decoder_start_token_id": 3,
    "initializer_factor": 0.5,
    "attn_implementation": "eager",
}
TYPES = gguf.GGMLQuantizationType
TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


class Case(NamedTuple):
    """A kind of T5 in transformers; all but T5 1.0 have a head of their own."""

    kind: type[transformers.PreTrainedModel]
    values: Mapping[str, Any]


CASES = {
    "T5": Case(
        transformers.T5ForConditionalGeneration, {"feed_forward_proj": "relu", "pad_token_id": 4}
    ),
    "Flan-T5": Case(
        transformers.T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mT5": Case(transformers.MT5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu"}),
}


def make(name: str) -> transformers.PreTrainedModel:
    """The torch model at random."""
    torch.manual_seed(0)
    case = CASES[name]
    theirs = case.kind(case.kind.config_class(**SIZES, **case.values))
    if name != "T5":
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(ROWS, SIZES["d_model"]) * 0.5)
    return randomize(theirs, 0, 0.1)


def rounded(theirs: transformers.PreTrainedModel, kind: TYPES) -> None:
    """Puts in place of each matrix what is left of it in the type, by the package `gguf`."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            stored = packed(parameter.numpy(), kind)
            if stored.dtype != np.float32:
                plain = gguf.quants.dequantize(stored, kind)
                parameter.copy_(torch.from_numpy(plain.astype(np.float32)))


def packed(x: np.ndarray, kind: TYPES) -> np.ndarray:
    """As llama.cpp stores it: norms, and rows that no block fits, in float32."""
    fits = x.ndim > 1 and x.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return gguf.quants.quantize(x, kind) if fits else np.ascontiguousarray(x)


def write_gguf(
    file: Path,
    theirs: transformers.PreTrainedModel,
    kind: TYPES = TYPES.F32,
    *,
    architecture: str = "t5",
    metadata: Mapping[str, int] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    tokenizer: bool = False,
) -> Path:
    """The model as llama.cpp's conversion writes it; `metadata` and `tensors` change that, None
    leaves a tensor out. A tokenizer takes the package seconds to read."""
    config = theirs.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_decoder_block_count(config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_decoder_start_token_id(config.decoder_start_token_id)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_uint32(key, value)
    if tokenizer:
        spiece = file.with_suffix(".spiece")
        write_spiece(spiece)
        add_spiece(writer, spiece, ROWS)
    else:
        writer.add_pad_token_id(config.pad_token_id)
    layers = max(config.num_layers, config.num_decoder_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, layers)
    found = {
        names.get_name(key, (".weight",)): tensor.numpy()
        for key, tensor in theirs.state_dict().items()
        if key.removesuffix(".weight") not in (*TABLES[1:], *["lm_head"] * is_tied(theirs))
    }
    for name, array in (found | dict(tensors or {})).items():
        if array is not None:
            stored = packed(array, kind)
            plain = stored.dtype == np.float32
            writer.add_tensor(name, stored, raw_dtype=TYPES.F32 if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def is_tied(theirs: transformers.PreTrainedModel) -> bool:
    return theirs.lm_head.weight is theirs.shared.weight


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("T5", TYPES.F32),
        ("T5", TYPES.Q8_0),
        ("Flan-T5", TYPES.F32),
        ("Flan-T5", TYPES.F16),
        ("mT5", TYPES.F32),
        ("mT5", TYPES.Q8_0),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_gguf_file_is_the_model_that_was_written(name, kind, tmp_path):
    theirs = make(name)
    file = write_gguf(tmp_path / "model.gguf", theirs, kind)
    ours = load_published("t5", file, unroll=1)
    rng = np.random.default_rng(1)
    source, target = (rng.integers(5, ROWS, (2, length)) for length in (520, 40))
    with torch.no_grad():
        exact = theirs(torch.from_numpy(source), decoder_input_ids=torch.from_numpy(target)).logits
        rounded(theirs, kind)
        want = theirs(torch.from_numpy(source), decoder_input_ids=torch.from_numpy(target)).logits
    got = compiled(ours, forward)(source, np.ones_like(source), target)
    np.testing.assert_allclose(got, want.numpy(), **WHOLE)
    assert want.abs().max() > 1
    assert (exact - want).abs().max() > 1e-3 or kind == TYPES.F32
    config = ours.config
    assert (config.tied, config.scaled, config.gated) == (
        (True, True, False) if name == "T5" else (False, False, True)
    )
    assert (config.start, config.pad) == (3, theirs.config.pad_token_id)


def test_a_head_beside_the_table_of_a_t5_is_the_table_again(tmp_path):
    """Checkpoints in torch's format hold both; so does a table between the stacks, unused."""
    theirs = make("T5")
    table = theirs.shared.weight.detach().numpy()
    unused = {"dec.blk.0.cross_attn_rel_b.weight": np.ones((20, 4), np.float32)}
    twice = {"output.weight": table, **unused}
    ours = load_published("t5", write_gguf(tmp_path / "a.gguf", theirs, tensors=twice))
    assert ours.config.tied
    np.testing.assert_array_equal(ours.tokens.table[...], table)
    other = {"output.weight": table + 1}
    with pytest.raises(UserError, match=r"output\.weight is not token_embd.*tied=false"):
        load_published("t5", write_gguf(tmp_path / "b.gguf", theirs, tensors=other))
    own = load_published("t5", tmp_path / "b.gguf", tied=False, scaled=False)
    np.testing.assert_array_equal(own.head.kernel[...], (table + 1).T)


def test_whether_gates_without_a_head_are_scaled_is_asked_for(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", make("Flan-T5"), tensors={"output.weight": None})
    refuses(r"scaled.*--set scaled=False", load_published, "t5", file)
    assert load_published("t5", file, scaled=True).config.tied


def test_a_backend_opens_the_file_alone(tmp_path):
    """Known by its content, with the tokenizer in it; a folder with the file is the file."""
    file = write_gguf(tmp_path / "model.gguf", make("T5"), tokenizer=True)
    assert model_of(file) == model_of(tmp_path) == "t5"
    backend = open_backend(file, engine={"length": 64})
    assert backend.tokenizer.vocab_size == VOCABULARY + EXTRA
    assert backend.tokenizer.end_ids == (1,)
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    assert model_of(tmp_path) == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "t5encoder"}, "'t5encoder', an encoder alone, expected 't5'"),
        ({"architecture": "llama"}, "is 'llama', expected 't5'"),
        ({"metadata": {"t5.attention.value_length": 8}}, "value_length is 8, a head has 16"),
        ({"metadata": {"t5.attention.head_count_kv": 2}}, "head_count_kv is 2"),
        ({"metadata": {"t5.attention.head_count": 0}}, "head_count is 0, expected at least 1; con"),
        ({"metadata": {"t5.new_trick": 3}}, r"key 't5\.new_trick'"),
        (
            {"tensors": {"enc.blk.1.attn_rel_b.weight": np.ones((20, 4), np.float32)}},
            r"enc\.blk\.1\.attn_rel_b.*UMT5",
        ),
        ({"tensors": {"token_embd.weight": None}}, r"holds no token_embd\.weight"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, message, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", make("T5"), **changes)
    refuses(message, open_t5, file)


def test_the_original_pictures_need_a_folder(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", make("T5"))
    refuses("--model=t5 --export=hf", open_multimodal_t5, file)
