"""`python -m tests.bench models`: our models against transformers on PyTorch.

Same random weights, inputs, threads and type on both sides, in one process, in turn; each row
first checks that both compute the same. The floor is what the row's operations take at the highest
rate of square matrices that either library reaches here, or reading the weights once, if that
takes longer. On a GPU PyTorch runs under torch.compile with its fused attention. bfloat16, which is
faster on processors with instructions for it, is shown next to float32, unless a library multiplies
it at less than half of float32's rate. Rows that were measured when a run is interrupted are not
measured again when it is started anew.

torch and transformers are needed to import this module.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers.models.bart.modeling_bart import shift_tokens_right

from mmqa_jax.decoding import kv_cache
from mmqa_jax.models.bart.keys import publish_bart
from mmqa_jax.models.bart.network import Bart, BartConfig, bart_base, bart_large_cnn
from mmqa_jax.models.bert.keys import publish_bert
from mmqa_jax.models.bert.network import Bert, BertConfig, bert_base_uncased
from mmqa_jax.models.llama.config import LlamaConfig, llama2_7b, smollm2_135m
from mmqa_jax.models.llama.network import Llama, unstack_layers
from mmqa_jax.models.mcan.network import MCANOpenVQA, MCANOpenVQAConfig, mcan_large, mcan_small
from mmqa_jax.models.two_towers.config import CLIPConfig, vit_b_32, vit_l_14
from mmqa_jax.models.two_towers.keys import publish_clip
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.models.vlp.network import VLPConfig, VLPInputs, mixed_mask, vlp_base_x101
from tests.bench import Options, torch_reference
from tests.bench.our_side import OurTrainStep, in_types, maker
from tests.bench.runner import (
    MATMUL,
    Case,
    Peak,
    Work,
    measure,
    open_journal,
    program_flops,
    start_device,
)
from tests.equivalence.vlp_torch import TorchVLP

ROWS = (
    *("clip_image", "clip_text", "bert", "vlp", "vlp_train", "vlp_train_dropout"),
    *("mcan_train", "mcan_train_dropout", "bart_score", "llama_prefill"),
)
_ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# Largest deviation from the peer, as a share of its largest value: the sides compute the same.
_AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1}
_MASKED = 8  # tokens of an answer that a training step predicts
_ROUNDS = 5
_ROW_SECONDS = 8.0  # that the rounds of a row may take


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
    mcan: MCANOpenVQAConfig
    mcan_batch: tuple[int, int, int]  # rows, words, regions
    bart: BartConfig
    bart_batch: tuple[int, int, int]  # rows, source tokens, target tokens
    llama: LlamaConfig
    llama_batch: tuple[int, int]  # rows, tokens
    matmul: int  # side of the matrices that the peak is measured with
    dtype: str = "float32"  # of compute, on both sides
    attention: str = "xla"  # of rows without a mask (see layers.attention)
    left_out: tuple[str, ...] = ()  # sides in bfloat16, see Peak


def small() -> Suite:
    """Under five minutes on two CPU cores of 120 GFLOP/s."""
    return Suite(
        clip=vit_b_32(), pictures=8, texts=8,
        bert=bert_base_uncased(), bert_batch=(4, 128),
        vlp=vlp_base_x101(), vlp_batch=(2, 100, 200),
        mcan=mcan_small(20_000), mcan_batch=(8, 14, 100),
        bart=bart_base(), bart_batch=(4, 128, 64),
        llama=smollm2_135m(), llama_batch=(1, 512),
        matmul=2048,
    )  # fmt: skip


def full() -> Suite:
    """For a GPU of 80 GB: CLIP ViT-L/14, BART-large, LLaMA-2-7B."""
    return Suite(
        clip=vit_l_14(), pictures=128, texts=256,
        bert=bert_base_uncased(), bert_batch=(64, 512),
        vlp=vlp_base_x101(), vlp_batch=(64, 100, 200),
        mcan=mcan_large(20_000), mcan_batch=(64, 14, 100),
        bart=bart_large_cnn(), bart_batch=(32, 512, 128),
        llama=llama2_7b(), llama_batch=(4, 1024),
        matmul=8192, dtype="bfloat16", attention="cudnn",
    )  # fmt: skip


# A model of ours for a compute type, what calls it, its inputs; and PyTorch's model, likewise.
Ours = tuple[Callable[..., nnx.Module], Callable[..., Any], Mapping[str, np.ndarray]]
Theirs = tuple[torch.nn.Module, Callable[..., torch.Tensor], Mapping[str, np.ndarray]]


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; `small` sizes on a CPU, `full` elsewhere."""
    return run_suite(small() if start_device(options) == "small" else full(), options)


def run_suite(suite: Suite, options: Options) -> dict[str, Any]:
    """Measures the rows of a suite; returns what `--json` prints."""
    wanted = options.chosen(ROWS)
    torch_reference.prepare_torch()
    peak = Peak(suite.matmul, suite.dtype, with_torch=True)
    suite = dataclasses.replace(suite, left_out=tuple(peak.left_out))
    with open_journal("models", suite, options.rounds, torch.__version__) as journal:
        missing = tuple(name for name in wanted if name not in journal)
        squares = [] if MATMUL in journal else [peak.case()]
        return measure(
            "models",
            itertools.chain(squares, cases(suite, missing)),
            (MATMUL, *wanted),
            options.rounds or _ROUNDS,
            peak=peak,
            budget=None if options.rounds else _ROW_SECONDS,
            journal=journal,
            dtype=suite.dtype,
            threads=torch.get_num_threads(),
            left_out=list(peak.left_out.values()),
        )


def cases(suite: Suite, wanted: tuple[str, ...]) -> Iterator[Case]:
    """The rows `wanted`, each built when it is needed."""
    groups = (
        (_clip, ("clip_image", "clip_text")),
        (_bert, ("bert",)),
        (_vlp, ("vlp", "vlp_train", "vlp_train_dropout")),
        (_mcan, ("mcan_train", "mcan_train_dropout")),
        (_bart, ("bart_score",)),
        (_llama, ("llama_prefill",)),
    )
    for build, names in groups:
        if set(names) & set(wanted):
            yield from (case for case in build(suite) if case.name in wanted)


def _clip(suite: Suite) -> Iterator[Case]:
    def build(rngs, **changes):
        changes = {"attention": suite.attention, **changes}
        both = (dataclasses.replace(x, **changes) for x in (suite.clip.vision, suite.clip.text))
        return TwoTowers(CLIPConfig(*both), rngs=rngs)

    ours = in_types(build)
    model = ours(suite.dtype)
    theirs = torch_reference.torch_model(publish_clip(model.config, nnx.state(model)))
    vision, text = suite.clip.vision, suite.clip.text
    rng = np.random.default_rng(0)
    side = vision.image_size
    pixels = rng.normal(size=(suite.pictures, side, side, 3)).astype(np.float32)
    yield _forward(
        suite,
        "clip_image",
        f"ViT {vision.layers}x{vision.width}/{vision.patch_size}, {suite.pictures} x {side} px",
        (ours, lambda model, pixels: model.vision(pixels), {"pixels": pixels}),
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
        (ours, lambda model, ids: model.text(ids), {"ids": ids}),
        (
            theirs,
            lambda model, ids: model.get_text_features(input_ids=ids).pooler_output,
            {"ids": ids},
        ),
    )


def _bert(suite: Suite) -> Iterator[Case]:
    config = suite.bert
    ours = in_types(maker(Bert, config))
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
            torch_reference.torch_model(published, add_pooling_layer=False),
            lambda model, ids, mask: model(ids, attention_mask=mask).last_hidden_state,
            arrays,
        ),
    )


def _vlp(suite: Suite) -> Iterator[Case]:
    from mmqa_jax.tasks.vlp import AnswerObjective

    config, trunk = suite.vlp, suite.vlp.bert

    def build(rngs, **changes):
        changed = dataclasses.replace(config, bert=dataclasses.replace(trunk, **changes))
        return changed.build(rngs=rngs)

    ours = in_types(build)
    theirs = torch_reference.torch_vlp(ours("float32"))
    rows, regions, length = suite.vlp_batch
    work = f"{trunk.layers}x{trunk.hidden}, {rows} x ({regions} regions + {length - regions})"
    inputs, targets = _vlp_batch(suite)
    mask = np.asarray(mixed_mask(inputs["context_mask"], inputs["answer_mask"]))[:, 0]

    def encode(model, **inputs):
        return model.encode(VLPInputs(**inputs))

    yield _forward(
        suite,
        "vlp",
        work,
        (ours, encode, inputs),
        # Another one than that which is trained, in float32.
        (torch_reference.torch_vlp(ours("float32")), _torch_states, inputs | {"mask": mask}),
    )
    batch = {"inputs": VLPInputs(**inputs), **targets, "masked_weights": np.ones((rows, _MASKED))}
    arrays = {**inputs, **targets, "mask": mask}
    # Parameters that are trained stay float32 in every compute type.
    model = ours(suite.dtype, "float32")
    unrolled = ours(suite.dtype, "float32", abstract=True, unroll=True)
    task = AnswerObjective(config)
    peer = (theirs, torch_reference.vlp_loss, arrays)
    yield from _training(suite, "vlp_train", work, (model, unrolled, task, batch), peer)


def _torch_states(model: TorchVLP, **inputs: torch.Tensor) -> torch.Tensor:
    """The last layer's states [B, L, H]."""
    return model(inputs, inputs["mask"])[-1]


def _training(
    suite: Suite,
    name: str,
    work: str,
    ours: tuple[nnx.Module, nnx.Module, Any, Mapping[str, Any]],
    theirs: tuple[torch.nn.Module, Callable[..., torch.Tensor], Mapping[str, np.ndarray]],
) -> Iterator[Case]:
    """The rows of a training step, without and with dropout.

    Args:
      ours: the model, an abstract one with its layers unrolled, the task and its batch.
      theirs: PyTorch's model, its loss and the batch.
    """
    on_gpu = suite.dtype == "bfloat16"
    model, unrolled, task, batch = ours
    step = OurTrainStep(model, task, batch, _ADAMW)
    graphdef, params = nnx.split(unrolled)

    def loss(params):  # the optimizer's operations are negligible
        return task.loss(nnx.merge(graphdef, params), batch, None)[0]

    flops = program_flops(jax.value_and_grad(loss), params)
    peer = torch_reference.TrainStep(*theirs, suite.dtype, _ADAMW, compiled=on_gpu)
    # With dropout the losses of one step differ by chance.
    for row, dropout, agreement in (
        (name, False, _AGREEMENT[suite.dtype]),
        (f"{name}_dropout", True, 0.1),
    ):
        yield Case(
            row,
            "ms",
            functools.partial(step, dropout),
            functools.partial(peer, dropout),
            flops=flops,
            read_bytes=_bytes(unrolled),
            agreement=agreement,
            notes={"work": f"{work}, AdamW"},
        )


def _mcan(suite: Suite) -> Iterator[Case]:
    from mmqa_jax.tasks.vqa import VQAObjective

    config = suite.mcan

    def build(rngs, **changes):
        fusion = dataclasses.replace(config.fusion, **changes)
        return MCANOpenVQA(dataclasses.replace(config, fusion=fusion), rngs=rngs)

    ours = in_types(build)
    theirs = torch_reference.torch_mcan(ours("float32"))
    batch = _mcan_batch(config, suite.mcan_batch)
    rows, words, regions = suite.mcan_batch
    fusion = config.fusion
    work = f"{fusion.layers}x{fusion.hidden}, {rows} x ({words} words + {regions} regions)"
    model = ours(suite.dtype, "float32")
    unrolled = ours(suite.dtype, "float32", abstract=True, unroll=True)
    peer = (theirs, torch_reference.mcan_loss, batch)
    yield from _training(
        suite, "mcan_train", work, (model, unrolled, VQAObjective(config), batch), peer
    )


def _mcan_batch(config: MCANOpenVQAConfig, sizes: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Questions of different lengths, pictures with all regions, and targets.

    sizes: rows, words, regions.
    """
    rows, words, regions = sizes
    rng = np.random.default_rng(5)
    ids = rng.integers(1, config.vocab_size, (rows, words))
    ids[np.arange(words) >= rng.integers(words // 2, words + 1, (rows, 1))] = 0
    return {
        "question_ids": ids,
        "image": rng.random((rows, regions, config.region_features), np.float32),
        "targets": (rng.random((rows, config.answers)) < 0.002).astype(np.float32),
    }


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


def _bart(suite: Suite) -> Iterator[Case]:
    config = suite.bart
    ours = in_types(maker(Bart, config))
    theirs = torch_reference.torch_model(publish_bart(config, nnx.state(ours(suite.dtype))))
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
        return -torch_reference.cross_entropy(logits.float().mT, targets, reduction="none")

    yield _forward(
        suite,
        "bart_score",
        f"{config.encoder_layers}+{config.decoder_layers}x{config.hidden}, "
        f"{rows} x {source} -> {target} tokens",
        (ours, lambda model, ids, mask, targets: model.log_probs(ids, mask, targets), arrays),
        (theirs, score, arrays),
    )


def _llama(suite: Suite) -> Iterator[Case]:
    config = suite.llama
    ours = in_types(maker(Llama, config))
    theirs = torch_reference.torch_llama(ours(suite.dtype))
    rows, length = suite.llama_batch
    arrays = {"ids": np.random.default_rng(4).integers(0, config.vocab_size, (rows, length))}

    def prefill(model, ids):
        hidden, cache = kv_cache.forward(
            model,
            model.embed(ids),
            kv_cache.empty(config, rows, length, model.config.dtype),
            table=kv_cache.page_each(rows),
            starts=jnp.zeros(rows, jnp.int32),
            ends=jnp.full(rows, length),
        )
        return model.logits(hidden[:, -1:]), cache

    yield _forward(
        suite,
        "llama_prefill",
        f"{config.layers}x{config.hidden}, {rows} x {length} tokens",
        (ours, prefill, arrays),
        (theirs, lambda model, ids: model(ids, use_cache=True, logits_to_keep=1).logits, arrays),
        prepare=unstack_layers,  # as in the generation engine
    )


def _forward(
    suite: Suite,
    name: str,
    work: str,
    ours: Ours,
    theirs: Theirs,
    prepare: Callable[[nnx.Module], None] = lambda model: None,
) -> Case:
    """A row of a forward pass.

    prepare: changes a model of ours, in place, before it runs.
    """
    on_gpu = suite.dtype == "bfloat16"
    build, call, arrays = ours
    model, their_call, their_arrays = theirs

    def our_side(dtype: str) -> Work:
        made = build(dtype)
        prepare(made)
        return _our_work(made, call, arrays)

    others = {}
    if not on_gpu and "ours_bfloat16" not in suite.left_out:
        others["ours_bfloat16"] = our_side("bfloat16")
    if not on_gpu and "peer_bfloat16" not in suite.left_out:
        low = copy.deepcopy(model)
        others["peer_bfloat16"] = torch_reference.forward_work(
            low, their_call, their_arrays, "bfloat16"
        )
    unrolled = build(suite.dtype, abstract=True, unroll=True, attention="xla")
    graphdef, state = nnx.split(unrolled)
    return Case(
        name,
        "ms",
        our_side(suite.dtype),
        torch_reference.forward_work(model, their_call, their_arrays, suite.dtype, compiled=on_gpu),
        others=others,
        flops=program_flops(
            lambda state, inputs: call(nnx.merge(graphdef, state), **inputs), state, dict(arrays)
        ),
        read_bytes=_bytes(unrolled),
        agreement=_AGREEMENT[suite.dtype],
        notes={"work": work},
    )


def _our_work(
    model: nnx.Module, call: Callable[..., Any], arrays: Mapping[str, np.ndarray]
) -> Work:
    """Runs `call(model, **arrays)` jitted and returns, when all is done, its first result."""
    graphdef, state = nnx.split(model)
    inputs = jax.device_put(dict(arrays))
    run = jax.jit(lambda state, inputs: call(nnx.merge(graphdef, state), **inputs))
    return lambda: jax.tree.leaves(jax.block_until_ready(run(state, inputs)))[0]


def _real_tokens(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Masks [rows, length] of texts that fill three quarters of it or more."""
    lengths = rng.integers(3 * length // 4, length + 1, (rows, 1))
    return np.arange(length) < lengths


def _bytes(model: nnx.Module) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model)))
