"""Multimodal-CoT's T5 against PyTorch: transformers' T5 with the fusion that its authors add.

amazon-science/mm-cot model.py, JointEncoder.forward, from the last norm on.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, randomize, same_parameters
from flax import nnx
from transformers.modeling_outputs import BaseModelOutput

from mmqa_jax.decoding.t5_engine import beam_search, score
from mmqa_jax.models.t5.keys import publish_multimodal_t5
from mmqa_jax.models.t5.network import MultimodalT5, PicturedTexts
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses

pytestmark = pytest.mark.slow

VOCABULARY, END, HIDDEN, VECTORS, FEATURES = 99, 1, 40, 7, 10
LENGTHS, TARGET = np.array([520, 5, 222]), 9


class Fused(torch.nn.Module):
    """A T5 with the layers of JointEncoder, under their names."""

    def __init__(self, t5: Any):
        super().__init__()
        self.t5 = t5
        encoder = t5.encoder
        encoder.image_dense = torch.nn.Linear(FEATURES, HIDDEN)
        encoder.mha_layer = torch.nn.MultiheadAttention(
            embed_dim=HIDDEN, kdim=HIDDEN, vdim=HIDDEN, num_heads=1, batch_first=True
        )
        encoder.gate_dense = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def encoded(self, ids, mask, features) -> BaseModelOutput:
        encoder = self.t5.encoder
        text = encoder(input_ids=ids, attention_mask=mask)[0]
        picture = encoder.image_dense(features)
        seen, _ = encoder.mha_layer(text, picture, picture)
        gate = torch.sigmoid(encoder.gate_dense(torch.cat([text, seen], dim=-1)))
        return BaseModelOutput(last_hidden_state=(1 - gate) * text + gate * seen)


class Pair(NamedTuple):
    """A torch model, and ours loaded from its checkpoint."""

    theirs: Fused
    ours: MultimodalT5


@functools.cache
def make_pair(folder) -> Pair:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=12, d_ff=56, num_layers=3,
        num_decoder_layers=2, num_heads=3, relative_attention_num_buckets=20,
        relative_attention_max_distance=77, layer_norm_epsilon=1e-3, dropout_rate=0.0,
        initializer_factor=0.5, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    theirs = randomize(Fused(transformers.T5ForConditionalGeneration(config)), 0, 0.1)
    with torch.no_grad():
        theirs.t5.lm_head.weight[END] *= 4  # so that answers end
    folder.mkdir()
    config.architectures = ["T5ForMultimodalGeneration"]
    config.save_pretrained(folder)
    torch.save(theirs.t5.state_dict(), folder / "pytorch_model.bin")
    return Pair(theirs.eval(), load_published("multimodal_t5", folder, unroll=1))


@pytest.fixture
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.getbasetemp() / "mm-cot")


@pytest.fixture(scope="module")
def inputs() -> PicturedTexts:
    """Texts of different lengths; the second has no picture, which is one of zeros."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((len(LENGTHS), VECTORS, FEATURES)).astype(np.float32)
    features[1] = 0
    ids = rng.integers(4, VOCABULARY, (len(LENGTHS), LENGTHS[0]))
    return PicturedTexts(ids, LENGTHS, features)


def in_torch(inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = torch.from_numpy(np.array(inputs.mask)).long()
    return torch.from_numpy(inputs.input_ids), mask, torch.from_numpy(inputs.features)


def test_encoding_and_logits_equal(pair, inputs):
    theirs, ours = pair
    target = np.random.default_rng(1).integers(4, VOCABULARY, (len(LENGTHS), TARGET))
    ids, mask, features = in_torch(inputs)
    with torch.no_grad():
        states = theirs.encoded(ids, mask, features)
        want = theirs.t5(
            encoder_outputs=states, attention_mask=mask, labels=torch.from_numpy(target)
        ).logits.numpy()

    def run(model, inputs, target):
        encoded = inputs.encode(model)
        return encoded.states, model.encoded_target_logits(*encoded, target)

    got, logits = compiled(ours, run)(inputs, target)
    real = np.asarray(inputs.mask)
    np.testing.assert_allclose(np.asarray(got)[real], states[0].numpy()[real], **WHOLE)
    np.testing.assert_allclose(logits, want, **WHOLE)
    assert np.abs(want).max() > 1
    other = compiled(ours, run)(inputs.replace(features=-inputs.features), target)[1]
    assert np.abs(np.asarray(other) - want)[0].max() > 0.01  # the picture counts


def test_greedy_generation_equals(pair, inputs):
    theirs, ours = pair
    ids, mask, features = in_torch(inputs)
    with torch.no_grad():
        want = theirs.t5.generate(
            encoder_outputs=theirs.encoded(ids, mask, features), attention_mask=mask,
            do_sample=False, max_length=12, eos_token_id=END,
        ).numpy()[:, 1:]  # fmt: skip
    got = beam_search(*nnx.split(ours), inputs, end_id=END, num_beams=1, max_new_tokens=11)
    for row, length in enumerate(np.asarray(got.lengths)[:, 0]):
        np.testing.assert_array_equal(got.tokens[row, 0, :length], want[row, :length])


def test_export_has_the_authors_names(pair, tmp_path):
    theirs, ours = pair
    write_published(tmp_path, publish_multimodal_t5(ours.config, nnx.state(ours)))
    back = load_published("multimodal_t5", tmp_path, unroll=1)
    assert back.config == ours.config
    assert ours.config.features == FEATURES
    same_parameters(back, ours)
    from safetensors.torch import load_file

    written, own = load_file(tmp_path / "model.safetensors"), theirs.t5.state_dict()
    for name in ("mha_layer.in_proj_weight", "image_dense.bias", "gate_dense.weight"):
        assert torch.equal(written[f"encoder.{name}"], own[f"encoder.{name}"])


def test_layers_of_the_first_release_are_the_models_own(pair, tmp_path):
    """mm-cot before March 2023: image_dense, not encoder.image_dense."""
    pair.theirs.t5.config.save_pretrained(tmp_path)
    older = {
        k.removeprefix("encoder.") if fused(k) else k: v
        for k, v in pair.theirs.t5.state_dict().items()
    }
    assert "image_dense.weight" in older
    torch.save(older, tmp_path / "pytorch_model.bin")
    same_parameters(load_published("multimodal_t5", tmp_path, unroll=1), pair.ours)


def test_likeliest_tokens_behind_a_given_text_equal(pair, inputs):
    """As the authors' first version judges rationales: predictions[0].argmax, no generation."""
    theirs, ours = pair
    target = np.random.default_rng(1).integers(4, VOCABULARY, (len(LENGTHS), TARGET))
    ids, mask, features = in_torch(inputs)
    with torch.no_grad():
        want = theirs.t5(
            encoder_outputs=theirs.encoded(ids, mask, features), attention_mask=mask,
            labels=torch.from_numpy(target),
        ).logits.argmax(-1)  # fmt: skip
    got = score(*nnx.split(ours), inputs, target)
    np.testing.assert_array_equal(got.likeliest, want.numpy())


def test_training_starts_from_a_plain_t5(pair, tmp_path):
    """The text's part is the T5's, the fusion is new; how wide pictures are has to be said."""
    pair.theirs.t5.config.save_pretrained(tmp_path)
    plain = {k: v for k, v in pair.theirs.t5.state_dict().items() if not fused(k)}
    torch.save(plain, tmp_path / "pytorch_model.bin")
    refuses("--set features=256", load_published, "multimodal_t5", tmp_path)
    model = load_published("multimodal_t5", tmp_path, unroll=1, features=FEATURES)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: bool((a == b).all()),
            nnx.state(model.encoder),
            nnx.state(pair.ours.encoder),
        )
    )
    assert not np.array_equal(model.fusion.gate.kernel, pair.ours.fusion.gate.kernel)


def fused(key: str) -> bool:
    return any(f".{name}" in key for name in ("image_dense", "mha_layer", "gate_dense"))
