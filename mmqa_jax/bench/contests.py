"""The rows of `mmqa bench models`: the same work by our model and by PyTorch's, one row each.

Weights are random, in the sizes of published models. Inputs of both sides come from the same
arrays and lie ready on the device.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from transformers.models.bart.modeling_bart import shift_tokens_right

from mmqa_jax.bench import peers
from mmqa_jax.core.mesh import init_sharded, make_mesh
from mmqa_jax.models.bart import Bart
from mmqa_jax.models.bart_config import BartConfig, bart_base, bart_large_cnn
from mmqa_jax.models.bert import Bert, BertConfig, bert_base_uncased
from mmqa_jax.models.clip import CLIP, CLIPConfig, vit_b_32, vit_l_14
from mmqa_jax.models.llama import Llama, unstack_layers
from mmqa_jax.models.llama_config import LlamaConfig, llama2_7b, smollm2_135m
from mmqa_jax.models.vlp import VLP, VLPConfig, VLPInputs, mixed_mask, vlp_base_x101
from mmqa_jax.training.answer import AnswerTask
from mmqa_jax.weights.exports import publish_bart, publish_bert, publish_clip

ROWS = (
    *("clip_image", "clip_text", "bert", "vlp", "vlp_train", "vlp_train_dropout"),
    *("bart_score", "llama_prefill"),
)
_ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# Largest deviation from the peer, as a share of its largest value: the sides compute the same.
_AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1}
_MASKED = 8  # words of an answer that a training step predicts


@dataclasses.dataclass(frozen=True)
class Suite:
    """The models that are measured, and how much they are given at a time."""

    clip: CLIPConfig
    pictures: int
    texts: int
    bert: BertConfig
    bert_batch: tuple[int, int]  # rows, tokens
    vlp: VLPConfig
    vlp_batch: tuple[int, int, int]  # rows, regions, tokens
    bart: BartConfig
    bart_batch: tuple[int, int, int]  # rows, source tokens, target tokens
    llama: LlamaConfig
    llama_batch: tuple[int, int]  # rows, tokens
    matmul: int  # side of the matrices that the peak is measured with
    dtype: str = "float32"  # of compute, on both sides
    attention: str = "xla"  # of rows without a mask (see layers.attention)


def small() -> Suite:
    """About three minutes on two CPU cores."""
    return Suite(
        clip=vit_b_32(),
        pictures=8,
        texts=16,
        bert=bert_base_uncased(),
        bert_batch=(8, 128),
        vlp=vlp_base_x101(),
        vlp_batch=(2, 100, 200),
        bart=bart_base(),
        bart_batch=(4, 128, 64),
        llama=smollm2_135m(),
        llama_batch=(1, 512),
        matmul=2048,
    )


def full() -> Suite:
    """For a GPU of 80 GB: CLIP ViT-L/14, BART-large, LLaMA-2-7B."""
    return Suite(
        clip=vit_l_14(),
        pictures=128,
        texts=256,
        bert=bert_base_uncased(),
        bert_batch=(64, 512),
        vlp=vlp_base_x101(),
        vlp_batch=(64, 100, 200),
        bart=bart_large_cnn(),
        bart_batch=(32, 512, 128),
        llama=llama2_7b(),
        llama_batch=(4, 1024),
        matmul=8192,
        dtype="bfloat16",
        attention="cudnn",
    )


# A model of ours for a compute type, what calls it, its inputs; and PyTorch's model, likewise.
Ours = tuple[Callable[[str], nnx.Module], Callable[..., Any], Mapping[str, np.ndarray]]
Theirs = tuple[torch.nn.Module, Callable[..., torch.Tensor], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Contest:
    """One row.

    Attributes:
      name: of ROWS.
      work: what is done, for the table.
      ours, peer: do it once and return what is compared.
      ours_low, peer_low: the same in bfloat16, where that is not the type already and it is asked
        for; not compared.
      count: `peer` without torch.compile, to count its operations.
      weight_bytes: of the parameters that are read.
      agreement: largest deviation allowed.
    """

    name: str
    work: str
    ours: Callable[[], jax.Array]
    peer: peers.Work
    ours_low: Callable[[], jax.Array] | None
    peer_low: peers.Work | None
    count: peers.Work
    weight_bytes: int
    agreement: float


def contests(suite: Suite, wanted: tuple[str, ...]) -> Iterator[Contest]:
    """The rows `wanted`, each built when it is asked for."""
    groups = (
        (_clip, ("clip_image", "clip_text")),
        (_bert, ("bert",)),
        (_vlp, ("vlp", "vlp_train", "vlp_train_dropout")),
        (_bart, ("bart_score",)),
        (_llama, ("llama_prefill",)),
    )
    for build, names in groups:
        if set(names) & set(wanted):
            yield from (contest for contest in build(suite) if contest.name in wanted)


def _clip(suite: Suite) -> Iterator[Contest]:
    def build(dtype):
        change = {"dtype": dtype, "attention": suite.attention}
        both = (
            dataclasses.replace(tower, **change) for tower in (suite.clip.vision, suite.clip.text)
        )
        return CLIP(CLIPConfig(*both), rngs=nnx.Rngs(0))

    ours = _in_types(build)
    model = ours(suite.dtype)
    theirs = peers.torch_model(publish_clip(model.config, nnx.state(model)))
    vision, text = suite.clip.vision, suite.clip.text
    rng = np.random.default_rng(0)
    side = vision.image_size
    pixels = rng.normal(size=(suite.pictures, side, side, 3)).astype(np.float32)
    yield _forward(
        suite,
        "clip_image",
        f"ViT {vision.layers}x{vision.width}/{vision.patch_size}, {suite.pictures} x {side} px",
        (lambda dtype: ours(dtype).vision, lambda model, pixels: model(pixels), {"pixels": pixels}),
        (
            theirs,
            lambda model, pixels: model.get_image_features(pixel_values=pixels).pooler_output,
            {"pixels": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))},
        ),
    )
    ids = rng.integers(0, text.vocab_size - 2, (suite.texts, text.context))
    ids[:, -1] = text.vocab_size - 1  # end of text, the largest id
    yield _forward(
        suite,
        "clip_text",
        f"{text.layers}x{text.width}, {suite.texts} x {text.context} tokens",
        (lambda dtype: ours(dtype).text, lambda model, ids: model(ids), {"ids": ids}),
        (
            theirs,
            lambda model, ids: model.get_text_features(input_ids=ids).pooler_output,
            {"ids": ids},
        ),
    )


def _bert(suite: Suite) -> Iterator[Contest]:
    config = suite.bert
    ours = _in_types(lambda dtype: Bert(dataclasses.replace(config, dtype=dtype), rngs=nnx.Rngs(0)))
    published = publish_bert(config, nnx.state(ours(suite.dtype)))
    rows, length = suite.bert_batch
    rng = np.random.default_rng(1)
    arrays = {
        "ids": rng.integers(0, config.vocab_size, (rows, length)),
        "mask": _real_tokens(rng, rows, length),
    }
    yield _forward(
        suite,
        "bert",
        f"{config.layers}x{config.hidden}, {rows} x {length} tokens",
        (ours, lambda model, ids, mask: model(ids, mask), arrays),
        (
            peers.torch_model(published, add_pooling_layer=False),
            lambda model, ids, mask: model(ids, attention_mask=mask).last_hidden_state,
            arrays,
        ),
    )


def _vlp(suite: Suite) -> Iterator[Contest]:
    config, trunk = suite.vlp, suite.vlp.bert

    def build(dtype):
        changed = dataclasses.replace(config, bert=dataclasses.replace(trunk, dtype=dtype))
        return VLP(changed, rngs=nnx.Rngs(0))

    ours = _in_types(build)
    theirs = peers.torch_vlp(ours("float32"))
    on_gpu = suite.dtype == "bfloat16"
    rows, regions, length = suite.vlp_batch
    work = f"{trunk.layers}x{trunk.hidden}, {rows} x ({regions} regions + {length - regions})"
    inputs, targets = _vlp_batch(suite)
    mask = np.asarray(mixed_mask(inputs["context_mask"], inputs["answer_mask"]))

    def encode(model, **inputs):
        return model.encode(VLPInputs(**inputs))

    yield _forward(
        suite,
        "vlp",
        work,
        (ours, encode, inputs),
        # A copy: training needs float32.
        (
            copy.deepcopy(theirs),
            lambda model, **inputs: model(inputs),
            inputs | {"mask": mask},
        ),
    )
    batch = {"inputs": VLPInputs(**inputs), **targets, "masked_weights": np.ones((rows, _MASKED))}
    # Parameters that are trained stay float32 in every compute type.
    model = ours(suite.dtype, "float32")
    step = _OurTrainStep(model, AnswerTask(config), batch)
    arrays = {**inputs, **targets, "mask": mask}
    low = None
    if not on_gpu:
        low = peers.TrainStep(copy.deepcopy(theirs), arrays, "bfloat16", _ADAMW)
    peer = peers.TrainStep(theirs, arrays, suite.dtype, _ADAMW, compiled=on_gpu)
    # With dropout the losses of one step differ by chance.
    for name, dropout, agreement in (
        ("vlp_train", False, _AGREEMENT[suite.dtype]),
        ("vlp_train_dropout", True, 0.1),
    ):
        yield Contest(
            name,
            f"{work}, AdamW",
            functools.partial(step, dropout),
            functools.partial(peer, dropout),
            None,
            None if low is None else functools.partial(low, dropout),
            functools.partial(peer, dropout),
            _bytes(model),
            agreement,
        )


def _vlp_batch(suite: Suite) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """An image source with a question and a masked answer: VLPInputs, and what is predicted."""
    config, (rows, regions, length) = suite.vlp, suite.vlp_batch
    rng = np.random.default_rng(2)
    answer = np.broadcast_to(np.arange(length) >= length - 2 * _MASKED, (rows, length))
    shape = (rows, length)
    inputs = {
        "input_ids": rng.integers(0, config.bert.vocab_size, shape),
        "token_type_ids": np.where(answer, 5, np.where(np.arange(length) <= regions, 0, 1)),
        "position_ids": np.broadcast_to(np.arange(length), shape).copy(),
        "context_mask": ~answer,
        "answer_mask": answer.copy(),
        "region_features": rng.random((rows, regions, config.region_features), np.float32),
        "region_positions": rng.random((rows, regions, config.region_positions), np.float32),
    }
    targets = {
        "masked_positions": np.broadcast_to(
            length - 2 * _MASKED + 2 * np.arange(_MASKED), (rows, _MASKED)
        ).copy(),
        "masked_ids": rng.integers(0, config.bert.vocab_size, (rows, _MASKED)),
    }
    return inputs, targets


def _bart(suite: Suite) -> Iterator[Contest]:
    config = suite.bart
    ours = _in_types(lambda dtype: Bart(dataclasses.replace(config, dtype=dtype), rngs=nnx.Rngs(0)))
    theirs = peers.torch_model(publish_bart(config, nnx.state(ours(suite.dtype))))
    rows, source, target = suite.bart_batch
    rng = np.random.default_rng(3)
    arrays = {
        "ids": rng.integers(3, config.vocab_size, (rows, source)),
        "mask": _real_tokens(rng, rows, source),
        "targets": rng.integers(3, config.vocab_size, (rows, target)),
    }

    def score(model, ids, mask, targets):
        shifted = shift_tokens_right(targets, config.pad, config.start)
        logits = model(ids, attention_mask=mask, decoder_input_ids=shifted, use_cache=False).logits
        return -peers.cross_entropy(logits.float().mT, targets, reduction="none")

    yield _forward(
        suite,
        "bart_score",
        f"{config.encoder_layers}+{config.decoder_layers}x{config.hidden}, "
        f"{rows} x {source} -> {target} tokens",
        (ours, lambda model, ids, mask, targets: model.log_probs(ids, mask, targets), arrays),
        (theirs, score, arrays),
    )


def _llama(suite: Suite) -> Iterator[Contest]:
    config = dataclasses.replace(suite.llama, attention=suite.attention)
    stacked = _in_types(
        lambda dtype: Llama(dataclasses.replace(config, dtype=dtype), rngs=nnx.Rngs(0))
    )
    theirs = peers.torch_llama(stacked(suite.dtype))

    def ours(dtype):  # as the generation engine has it
        model = stacked(dtype)
        unstack_layers(model)
        return model

    rows, length = suite.llama_batch
    arrays = {"ids": np.random.default_rng(4).integers(0, config.vocab_size, (rows, length))}

    def prefill(model, ids):
        hidden, cache = model.prefill(model.embed(ids))
        return model.logits(hidden[:, -1:]), cache

    yield _forward(
        suite,
        "llama_prefill",
        f"{config.layers}x{config.hidden}, {rows} x {length} tokens",
        (ours, prefill, arrays),
        (
            theirs,
            lambda model, ids: model(ids, use_cache=True, logits_to_keep=1).logits,
            arrays,
        ),
    )


def _forward(suite: Suite, name: str, work: str, ours: Ours, theirs: Theirs) -> Contest:
    """A row of a forward pass."""
    on_gpu = suite.dtype == "bfloat16"
    of_type, call, arrays = ours
    model, their_call, their_arrays = theirs
    ours_low = peer_low = None
    if not on_gpu:
        ours_low = _our_work(of_type("bfloat16"), call, arrays)
        low = copy.deepcopy(model)
        peer_low = peers.forward_work(low, their_call, their_arrays, "bfloat16")
    mine = of_type(suite.dtype)
    return Contest(
        name,
        work,
        _our_work(mine, call, arrays),
        peers.forward_work(model, their_call, their_arrays, suite.dtype, compiled=on_gpu),
        ours_low,
        peer_low,
        peers.forward_work(model, their_call, their_arrays, suite.dtype),
        _bytes(mine),
        _AGREEMENT[suite.dtype],
    )


def _our_work(
    model: nnx.Module, call: Callable[..., Any], arrays: Mapping[str, np.ndarray]
) -> Callable[[], jax.Array]:
    """What runs `call(model, **arrays)` jitted and returns, when all is done, its first result."""
    graphdef, state = nnx.split(model)
    inputs = jax.device_put(dict(arrays))
    run = jax.jit(lambda state, inputs: call(nnx.merge(graphdef, state), **inputs))
    return lambda: jax.tree.leaves(jax.block_until_ready(run(state, inputs)))[0]


class _OurTrainStep:
    """AdamW on one batch, step after step; the counterpart of `peers.TrainStep`.

    The first step gives the model's arrays away.
    """

    def __init__(self, model: VLP, task: AnswerTask, batch: dict[str, Any]):
        self._graphdef, params = nnx.split(model)
        options = dict(_ADAMW)
        b1, b2 = options.pop("betas")
        self._optimizer = optax.adamw(options.pop("lr"), b1, b2, **options)
        self._task = task
        # All in one place, where every step leaves it: it would be compiled twice otherwise.
        self._carry = jax.device_put(
            (params, self._optimizer.init(params), jnp.zeros((), jnp.int32)), jax.devices()[0]
        )
        self._batch = jax.device_put(batch)
        self._step = jax.jit(self._one, donate_argnums=0, static_argnums=2)

    def _one(self, carry: Any, batch: Any, dropout: bool) -> tuple[Any, jax.Array]:
        params, moments, number = carry
        key = jax.random.fold_in(jax.random.key(0), number) if dropout else None

        def loss(params):
            return self._task.loss(nnx.merge(self._graphdef, params), batch, key)[0]

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments, number + 1), value

    def __call__(self, dropout: bool) -> jax.Array:
        """One step; returns the loss before it."""
        self._carry, loss = jax.block_until_ready(self._step(self._carry, self._batch, dropout))
        return loss


def _in_types(build: Callable[[str], nnx.Module]) -> Callable[..., nnx.Module]:
    """One random model in several compute types.

    Args:
      build: makes the module for a compute type.

    Returns:
      (dtype, params=None) -> the model with compute type `dtype`; its parameters are a copy in
      `params`, or in `dtype` too.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    state = nnx.state(init_sharded(lambda: build("float32"), mesh))

    def of_type(dtype: str, params: str | None = None) -> nnx.Module:
        graphdef = nnx.split(nnx.eval_shape(lambda: build(dtype)))[0]
        return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.array(x, params or dtype), state))

    return of_type


def _real_tokens(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Masks [rows, length] of texts that fill three quarters of it or more."""
    lengths = rng.integers(3 * length // 4, length + 1, (rows, 1))
    return np.arange(length) < lengths


def _bytes(model: nnx.Module) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
