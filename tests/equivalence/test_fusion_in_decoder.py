"""Fusion-in-Decoder against its authors' method, restated in PyTorch over transformers' T5.

facebookresearch/FiD src/model.py runs with transformers 3.0.2 alone; what it does is this: the
encoder sees every passage as a row of its own, and the decoder their encodings in one.
"""

import copy
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, randomize, same_parameters
from flax import nnx
from safetensors.torch import load_file
from transformers.modeling_outputs import BaseModelOutput

from mmqa_jax.data.batches.texts import PassagesSize, passage_arrays
from mmqa_jax.decoding.t5_engine import beam_search
from mmqa_jax.models.t5.keys import publish_t5
from mmqa_jax.models.t5.network import T5, Passages
from mmqa_jax.weights.published import load_published, write_published

pytestmark = pytest.mark.slow

VOCABULARY, END, TARGET = 99, 1, 9
# Questions with passages of different lengths, the last with fewer of them: 3 x 200 tokens.
LENGTHS = ((200, 3, 57), (120, 200, 11), (64, 199))
SIZE = PassagesSize(count=3, length=200, targets=TARGET)
_BETWEEN = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


class Pair(NamedTuple):
    """A torch model, its tensors as FiD's authors name them, and ours loaded from those."""

    theirs: Any
    tensors: dict[str, torch.Tensor]
    ours: T5


def wrapped(key: str) -> str:
    """The name that EncoderWrapper and CheckpointWrapper give a T5's tensor."""
    if not key.startswith("encoder."):
        return key
    key = "encoder." + key
    if key.startswith("encoder.encoder.block."):
        *first, number, rest = key.split(".", 4)
        key = ".".join([*first, number, "module", rest])
    return key


@functools.cache
def make_pair(folder) -> Pair:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=40, d_kv=12, d_ff=56, num_layers=3, num_decoder_layers=2,
        num_heads=3, relative_attention_num_buckets=20, relative_attention_max_distance=77,
        layer_norm_epsilon=1e-3, dropout_rate=0.0, initializer_factor=0.5,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    theirs = randomize(transformers.T5ForConditionalGeneration(config), 0, 0.1)
    with torch.no_grad():
        theirs.lm_head.weight[END] *= 4  # so that answers end
    tensors = {wrapped(key): value.clone() for key, value in theirs.state_dict().items()}
    assert any(".module." in key for key in tensors)
    tensors[_BETWEEN] = torch.zeros(20, 3)
    folder.mkdir()
    config.save_pretrained(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    return Pair(theirs, tensors, load_published("t5", folder, unroll=1))


@pytest.fixture
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.getbasetemp() / "fid")


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    texts = [[rng.integers(4, VOCABULARY, n).tolist() for n in lengths] for lengths in LENGTHS]
    return passage_arrays(texts, SIZE)


def encoded(model, batch) -> tuple[BaseModelOutput, torch.Tensor]:
    """What EncoderWrapper gives, and the mask of the decoder's attention over it."""
    ids = torch.from_numpy(batch["input_ids"]).long()
    mask = torch.arange(SIZE.length) < torch.from_numpy(batch["prompt_lengths"])[..., None]
    rows = len(ids)
    states = model.encoder(
        input_ids=ids.view(rows * SIZE.count, SIZE.length),
        attention_mask=mask.view(rows * SIZE.count, SIZE.length).long(),
    )[0]
    states = states.view(rows, SIZE.count * SIZE.length, -1)
    return BaseModelOutput(last_hidden_state=states), mask.view(rows, -1).long()


def logits_of(theirs, batch, target) -> np.ndarray:
    with torch.no_grad():
        states, mask = encoded(theirs, batch)
        labels = torch.from_numpy(target)
        # Without a cache, by whose length transformers 5 would move the positions of the source.
        found = theirs(encoder_outputs=states, attention_mask=mask, labels=labels, use_cache=False)
        return found.logits.numpy()


def our_logits(model, ids, lengths, target):
    return model.encoded_target_logits(*Passages(ids, lengths).encode(model), target)


def test_logits_equal_over_600_tokens_of_passages(pair, batch):
    theirs, _, ours = pair
    target = np.random.default_rng(1).integers(4, VOCABULARY, (len(LENGTHS), TARGET))
    want = logits_of(theirs, batch, target)
    got = compiled(ours, our_logits)(batch["input_ids"], batch["prompt_lengths"], target)
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1
    # The passages are not one text, whose positions would go on.
    joined = jnp.asarray(batch["input_ids"]).reshape(len(LENGTHS), 1, -1)
    whole = compiled(ours, our_logits)(joined, np.full((len(LENGTHS), 1), joined.shape[-1]), target)
    assert np.abs(np.asarray(whole) - want).max() > 0.01


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_equals(pair, batch, beams):
    check_generation(pair, batch, beams)


def check_generation(pair, batch, beams):
    theirs, _, ours = pair
    with torch.no_grad():
        states, mask = encoded(theirs, batch)
        found = theirs.generate(
            encoder_outputs=states, attention_mask=mask, num_beams=beams, do_sample=False,
            max_length=12, num_return_sequences=beams, eos_token_id=END, use_cache=False,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    inputs = Passages.of(batch)
    got = beam_search(
        *nnx.split(ours), inputs, end_id=END, num_beams=beams, max_new_tokens=11, length_penalty=1.0
    )
    want = found.sequences.numpy().reshape(len(LENGTHS), beams, -1)[:, :, 1:]
    lengths = np.asarray(got.lengths)
    for row, beam in np.ndindex(lengths.shape):
        length = lengths[row, beam]
        np.testing.assert_array_equal(got.tokens[row, beam, :length], want[row, beam, :length])
    if beams > 1:
        np.testing.assert_allclose(np.ravel(got.scores), found.sequences_scores.numpy(), **WHOLE)


@functools.cache
def make_older_pair(folder) -> Pair:
    """With relative positions between the stacks, as transformers 3.0.2 computes them.

    Its T5Attention adds a table of the first decoder layer's EncDecAttention to the scores of all.
    """
    plain = make_pair(folder.with_name("fid"))
    theirs = copy.deepcopy(plain.theirs)
    cross = theirs.decoder.block[0].layer[1].EncDecAttention
    torch.manual_seed(3)
    cross.relative_attention_bias = torch.nn.Embedding(20, 3)
    cross.has_relative_attention_bias = True
    tensors = {**plain.tensors, _BETWEEN: cross.relative_attention_bias.weight.detach().clone()}
    folder.mkdir()
    theirs.config.save_pretrained(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    return Pair(theirs, tensors, load_published("t5", folder, unroll=1))


def test_positions_between_the_stacks_equal(pair, batch, tmp_path_factory, tmp_path):
    """Logits, generation, and the weights under the authors' names again."""
    older = make_older_pair(tmp_path_factory.getbasetemp() / "fid302")
    assert older.ours.config.between
    target = np.random.default_rng(1).integers(4, VOCABULARY, (len(LENGTHS), TARGET))
    want = logits_of(older.theirs, batch, target)
    got = compiled(older.ours, our_logits)(batch["input_ids"], batch["prompt_lengths"], target)
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want - logits_of(pair.theirs, batch, target)).max() > 0.01
    check_generation(older, batch, 3)
    write_published(tmp_path, publish_t5(older.ours.config, nnx.state(older.ours)))
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() <= older.tensors.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, older.tensors[name]), name
    same_parameters(load_published("t5", tmp_path, unroll=1), older.ours)


def test_a_t5_of_transformers_has_the_same_weights(pair, tmp_path):
    pair.theirs.save_pretrained(tmp_path)
    same_parameters(load_published("t5", tmp_path, unroll=1), pair.ours)
