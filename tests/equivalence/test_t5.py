"""T5, Flan-T5 and mT5 against transformers: random weights, configs off their defaults."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import (
    LAYER,
    WHOLE,
    alone,
    compiled,
    descent,
    deviation,
    forward,
    names_its_axes,
    randomize,
    reloaded,
    same_parameters,
)
from flax import nnx

from mmqa_jax.data.batches.texts import PairSize, TokenExample, pair_batch
from mmqa_jax.decoding.t5_engine import beam_search
from mmqa_jax.models.common.encoder_decoder import relative_buckets
from mmqa_jax.models.t5.config import PRESETS
from mmqa_jax.models.t5.keys import publish_t5, t5_key_map
from mmqa_jax.models.t5.network import T5, Texts
from mmqa_jax.tasks.seq2seq import Seq2SeqObjective
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.published import load_published, write_published

pytestmark = pytest.mark.slow

VOCABULARY, END = 99, 1
SOURCE_LENGTHS, TARGET = np.array([520, 5, 222]), 40
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "T5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        {"feed_forward_proj": "relu", "decoder_start_token_id": 3, "pad_token_id": 2},
    ),
    "Flan-T5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mT5": (
        transformers.MT5ForConditionalGeneration,
        transformers.MT5Config,
        {"feed_forward_proj": "gated-silu"},
    ),
}


class Pair(NamedTuple):
    """A torch model, and ours loaded from its checkpoint."""

    theirs: Any
    ours: T5


@functools.cache
def make_pair(case: str, folder) -> Pair:
    torch.manual_seed(0)
    model, config, options = CASES[case]
    options = {"decoder_start_token_id": 0, **options}
    theirs = model(
        config(
            vocab_size=VOCABULARY, d_model=40, d_kv=12, d_ff=56, num_layers=3,
            num_decoder_layers=2, num_heads=3, relative_attention_num_buckets=20,
            relative_attention_max_distance=77, layer_norm_epsilon=1e-3, dropout_rate=0.0,
            initializer_factor=0.5, attn_implementation="eager", **options,
        )
    )  # fmt: skip
    if case != "T5":  # published ones have a head of their own, whatever the config says
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 40) * 0.5)
    theirs = randomize(theirs, 0, 0.1)
    with torch.no_grad():
        theirs.lm_head.weight[END] *= 4  # so that answers end
    theirs.save_pretrained(folder)
    return Pair(theirs, load_published("t5", folder, unroll=1))


@pytest.fixture(params=list(CASES))
def pair(request, tmp_path_factory):
    return make_pair(request.param, tmp_path_factory.getbasetemp() / f"t5 {request.param}")


@pytest.fixture
def of(tmp_path_factory):
    """A pair by its case."""
    return lambda case: make_pair(case, tmp_path_factory.getbasetemp() / f"t5 {case}")


def sources(length: int):
    """(ids, their mask), padded on the right."""
    lengths = np.minimum(SOURCE_LENGTHS, length)
    ids = np.random.default_rng(0).integers(4, VOCABULARY, (len(lengths), length))
    return ids, np.arange(length) < lengths[:, None]


def layers_of(stack, run) -> list[tuple[np.ndarray, np.ndarray]]:
    """Input and output of every block of a stack of transformers while `run` runs."""
    seen: list[Any] = []

    def note(module, inputs, options, output):
        seen.append((inputs[0] if inputs else options["hidden_states"], output[0]))

    hooks = [block.register_forward_hook(note, with_kwargs=True) for block in stack.block]
    run()
    for hook in hooks:
        hook.remove()
    return [tuple(x.detach().numpy() for x in both) for both in seen]


def test_every_layer_and_the_logits_equal(pair):
    theirs, ours = pair
    source, mask = sources(SOURCE_LENGTHS[0])
    target = np.random.default_rng(1).integers(4, VOCABULARY, (len(source), TARGET))
    found = []

    def run():
        with torch.no_grad():
            found.append(
                theirs(
                    input_ids=torch.from_numpy(source),
                    attention_mask=torch.from_numpy(mask).long(),
                    decoder_input_ids=torch.from_numpy(target),
                )
            )

    encoded = layers_of(theirs.encoder, run)
    decoded = layers_of(theirs.decoder, run)
    memory = found[0].encoder_last_hidden_state.numpy()

    def each(model, source, target, encoded, decoded, memory):
        encoder, decoder = model.encoder, model.decoder
        columns = jnp.asarray(mask)[:, None, None]
        length = source.shape[1]
        biases = encoder.bias(length), decoder.bias(TARGET)
        seen = encoder.seen(mask, length), decoder.seen(None, TARGET)
        return (
            alone(encoder.layers, lambda layer, x: layer(x, biases[0], seen[0]), encoded),
            alone(
                decoder.layers,
                lambda layer, x: layer(x, biases[1], seen[1], memory, columns),
                decoded,
            ),
            model.encode(source, mask),
            model(source, mask, target),
        )

    inputs = (np.stack([before for before, _ in layers]) for layers in (encoded, decoded))
    of_encoder, of_decoder, last, logits = compiled(ours, each)(source, target, *inputs, memory)
    for got, layers in ((of_encoder, encoded), (of_decoder, decoded)):
        np.testing.assert_allclose(got, np.stack([after for _, after in layers]), **LAYER)
    np.testing.assert_allclose(np.asarray(last)[mask], memory[mask], **WHOLE)
    np.testing.assert_allclose(logits, found[0].logits.numpy(), **WHOLE)
    assert np.abs(found[0].logits.numpy()).max() > 1  # the comparison is of numbers that matter


@pytest.mark.parametrize(
    ("case", "beams", "penalty", "early"),
    [("T5", 1, 0.0, False), ("Flan-T5", 4, 1.0, False), ("mT5", 4, 0.0, True)],
)
def test_generation_is_that_of_transformers(of, case, beams, penalty, early):
    """Sources of different lengths, answers too: all beams with their scores."""
    theirs, ours = of(case)
    source, mask = sources(40)
    scored = {"length_penalty": penalty, "early_stopping": early} if beams > 1 else {}
    with torch.no_grad():
        want = theirs.generate(
            input_ids=torch.from_numpy(source), attention_mask=torch.from_numpy(mask).long(),
            num_beams=beams, do_sample=False, max_new_tokens=12, num_return_sequences=beams,
            eos_token_id=END, output_scores=True, return_dict_in_generate=True, **scored,
        )  # fmt: skip
    got = beam_search(
        *nnx.split(ours), Texts(source, mask.sum(1)), end_id=END, num_beams=beams, max_new_tokens=12,
        length_penalty=penalty, early_stopping=early,
    )  # fmt: skip
    sequences = want.sequences.numpy().reshape(len(source), beams, -1)[:, :, 1:]
    got = jax.device_get(got)
    lengths = got.lengths
    assert beams == 1 or len(set(lengths.ravel())) > 3
    for row, beam in np.ndindex(lengths.shape):
        length = lengths[row, beam]
        want_tokens = sequences[row, beam, :length]
        np.testing.assert_array_equal(got.tokens[row, beam, :length], want_tokens)
    if beams > 1:
        np.testing.assert_allclose(np.ravel(got.scores), want.sequences_scores.numpy(), **WHOLE)


def test_three_steps_of_training_equal(of):
    theirs, ours = of("T5")
    theirs = type(theirs)(theirs.config).train()
    theirs.load_state_dict(of("T5").theirs.state_dict())
    rng = np.random.default_rng(2)
    # An example of prompt and answer lengths, and another: their means would differ.
    examples = [
        TokenExample(rng.integers(4, VOCABULARY, sum(sizes)).astype(np.int32), sizes[0])
        for sizes in ((23, 7), (9, 2))
    ]
    batch = pair_batch(examples, PairSize(24, 8))
    labels = np.where(np.arange(8) < batch["target_lengths"][:, None], batch["target_ids"], -100)
    mask = np.arange(24) < batch["prompt_lengths"][:, None]
    rate, wanted = 0.1, []
    for _ in range(3):
        theirs.zero_grad()
        loss = theirs(
            input_ids=torch.from_numpy(batch["input_ids"]).long(),
            attention_mask=torch.from_numpy(mask).long(),
            labels=torch.from_numpy(labels).long(),
        ).loss
        loss.backward()
        wanted.append(loss.item())
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter -= rate * parameter.grad
    assert wanted[0] - wanted[-1] > 0.05

    graphdef, state = nnx.split(ours)
    step = descent(Seq2SeqObjective(ours.config), graphdef, rate)
    losses = []
    for _ in range(3):
        loss, state = step(state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, wanted, **LAYER)
    trained = dict(export(state, dataclasses.replace(t5_key_map(ours.config), tied=())))
    named = dict(theirs.named_parameters())
    assert trained.keys() == named.keys()
    for name, got in trained.items():
        np.testing.assert_allclose(got, named[name].detach().numpy(), **WHOLE, err_msg=name)


def test_bfloat16_stays_near_float32(of, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "t5 T5"
    ours = of("T5").ours
    half = load_published("t5", folder, param_dtype="bfloat16", dtype="bfloat16", unroll=1)
    inputs = (*sources(40), np.full((3, 5), 7))
    got = compiled(half, forward)(*inputs)
    assert got.dtype == jnp.float32
    assert 1e-4 < deviation(got, compiled(ours, forward)(*inputs)) < 0.03


def test_export_reloads_in_transformers(pair, tmp_path):
    theirs, ours = pair
    write_published(tmp_path, publish_t5(ours.config, nnx.state(ours)))
    again = reloaded(type(theirs), tmp_path)
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name
    for key in ("scale_decoder_outputs", "dense_act_fn", "decoder_start_token_id"):
        assert getattr(again.config, key, None) == getattr(theirs.config, key, None), key
    back = load_published("t5", tmp_path, unroll=1)
    assert back.config == ours.config
    same_parameters(back, ours)
    names_its_axes(ours, {"layers", "embed", "mlp", "heads", "vocab", None})


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_all_distances_equal(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    back = np.arange(-3000, 3000)
    for count, farthest in ((32, 128), (20, 77), (64, 1000)):
        want = T5Attention._relative_position_bucket(
            torch.from_numpy(-back), bidirectional, count, farthest
        )
        got = relative_buckets(back, buckets=count, farthest=farthest, bidirectional=bidirectional)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "count"),
    [("t5_small", 60_506_624), ("t5_3b", 2_851_598_336), ("flan_t5_base", 247_577_856),
     ("flan_t5_xl", 2_849_757_184), ("mt5_small", 300_176_768)],
)  # fmt: skip
def test_presets_have_the_published_parameter_counts(name, count):
    """Those of the hub's pages."""
    config = PRESETS[name]()
    model = nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs()))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == count
