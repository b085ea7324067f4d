"""Training of Qwen2.5-VL and Qwen3-VL against transformers: every gradient, and LoRA."""

import jax
import numpy as np
import pytest
import torch
from compare import LAYER, WHOLE, copied
from flax import nnx
from qwen_vl_pair import CASES, IMAGE, Pair, make_pair, torch_inputs
from qwen_vl_prompts import small_pictures

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.batches.texts import RowSize, TokenExample
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.models.llama.keys import to_rule_tensors
from mmqa_jax.models.llama.lora import LoraConfig, add_lora
from mmqa_jax.models.qwen_vl.keys import publish_qwen_vl
from mmqa_jax.prompting.picture_format import QwenFormat
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.tasks.vision_language import PicturedRows, TrainingPictures, VisionLanguageObjective
from mmqa_jax.weights.formats.safetensors import ArraySource
from tests.pictures import encoded

pytestmark = pytest.mark.slow

SIZE = RowSize(120, 40)  # prompts of 500 tokens and more: test_qwen_vl.py
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q", "v", "down"))


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, tmp_path_factory.getbasetemp() / f"{request.param}_tiny")


@pytest.fixture(scope="module")
def rows(pair) -> PicturedRows:
    """Over a corpus of three questions, whose pictures have other sizes each."""
    files = {f"{number}.png": encoded(one) for number, one in enumerate(small_pictures())}
    asked = [Question(name, "train", "What?", image=name, answers=("a",)) for name in files]
    config = pair.ours.config
    shown = QwenFormat(config, open_text_tokenizer(pair.folder))
    made = TrainingPictures(Corpus([], asked, files.__getitem__), shown, config)
    assert made.readable(asked) == asked
    return PicturedRows(SIZE, config, made)


def examples() -> list[tuple[TokenExample, tuple[int, ...]]]:
    """With their pictures: a long prompt with the picture amid its words, and two shorter ones."""
    words = np.random.default_rng(4).integers(3, IMAGE, 120).astype(np.int32)
    made = []
    for number, (length, place, start) in enumerate(((115, 70, 80), (60, 0, 44), (40, 9, 38))):
        tokens = words[:length].copy()
        tokens[place] = IMAGE
        made.append((TokenExample(tokens, start, (f"{number}.png",)), (number,)))
    return made


def conversations() -> list[tuple[TokenExample, tuple[int, ...]]]:
    """Of several pictures each, with answers between them that are learned."""
    words = np.random.default_rng(5).integers(3, IMAGE, 90).astype(np.int32)
    made = []
    for places, shown in (((0, 2, 40), (2, 0, 1)), ((9, 50), (0, 0))):
        tokens = words.copy()
        tokens[list(places)] = IMAGE
        learned = np.array([*range(20, 30), *range(70, 88)], np.int32)
        names = tuple(f"{number}.png" for number in shown)
        made.append((TokenExample(tokens, 20, names, learned), shown))
    return made


def batch_of(rows: PicturedRows, made=examples) -> dict[str, jax.Array]:
    """All in the largest one's bucket, and an empty row."""
    own = [example for example, _ in made()]
    batch = rows.batch([*own, None], rows.pictures.buckets(own)[-1])
    return jax.device_put(batch)


def their_loss(pair: Pair, model: torch.nn.Module, made=examples) -> torch.Tensor:
    """The mean over all targets, example by example."""
    total, count = torch.zeros(()), 0
    given = pair.processor(images=small_pictures(), return_tensors="pt")
    for example, used in made():
        inputs = torch_inputs(given, example.tokens.tolist(), used)
        model.model.rope_deltas = None  # of the prompt before
        logs = model(**inputs).logits[0].log_softmax(-1)
        ids = inputs["input_ids"][0]
        if example.learned is None:
            at = torch.arange(len(ids) - example.targets, len(ids))
        else:  # the words' places behind their pictures' tokens
            order = np.cumsum(example.tokens != IMAGE) - 1
            at = torch.nonzero(ids != IMAGE)[order[example.learned], 0]
        total = total - logs[at - 1, ids[at]].sum()
        count += example.targets
    return total / count


def copy_of(pair: Pair) -> torch.nn.Module:
    return type(pair.theirs).from_pretrained(pair.folder, attn_implementation="eager").train()


def gradient_of(objective: VisionLanguageObjective, model: nnx.Module):
    """(state, batch) -> loss and gradient; and the state."""
    graphdef, state = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def step(state, batch):
        return objective.loss(nnx.merge(graphdef, state), batch, jax.random.key(0))[0]

    return step, state


def test_loss_and_every_gradient_are_torchs(pair, rows):
    """Of all parameters, those of the tower too."""
    theirs, batch = copy_of(pair), batch_of(rows)
    config = pair.ours.config
    step, state = gradient_of(VisionLanguageObjective(config, tower=True), pair.ours)
    loss, gradient = step(state, batch)
    want = their_loss(pair, theirs)
    want.backward()
    np.testing.assert_allclose(loss, want.item(), **LAYER)
    got = publish_qwen_vl(config, gradient).source
    prefix = "model." if config.vision.family in ("qwen2_vl", "qwen2_5_vl") else ""
    wanted = {name.removeprefix(prefix): parameter for name, parameter in theirs.named_parameters()}
    renamed = {
        name.replace("language_model.", "model.") if name not in got.specs() else name: parameter
        for name, parameter in wanted.items()
    }
    if config.llama.family == "glm4_moe":  # files have each expert for itself
        arrays = {name: parameter.grad.numpy() for name, parameter in wanted.items()}
        chosen_by = "mlp.gate.e_score_correction_bias"  # nothing is learned through it
        of_torch = to_rule_tensors(ArraySource(arrays), config.llama)
        of_torch = {name: of_torch.read(name) for name in of_torch.specs()}
        got = to_rule_tensors(got, config.llama)
        for name in [name for name in got.specs() if name.endswith(chosen_by)]:
            of_torch[name] = np.zeros(got.specs()[name].shape, np.float32)
    else:
        of_torch = {name: parameter.grad for name, parameter in renamed.items()}
    assert got.specs().keys() == of_torch.keys()
    for name, want in of_torch.items():
        # The hub's files of Qwen3-VL's mixtures have the last two axes exchanged.
        turned = ".experts." in name and config.llama.family == "qwen3_moe"
        want = want.swapaxes(1, 2) if turned else want
        np.testing.assert_allclose(got.read(name), want, **WHOLE, err_msg=name)
    assert min(float(x.grad.abs().max()) for x in renamed.values()) > 0


@pytest.mark.parametrize("pair", ["qwen3_vl"], indirect=True)  # its pictures enter three layers
def test_conversations_with_several_pictures_have_torchs_loss_and_gradient(pair, rows):
    theirs, batch = copy_of(pair), batch_of(rows, conversations)
    config = pair.ours.config
    step, state = gradient_of(VisionLanguageObjective(config, tower=True), pair.ours)
    loss, gradient = step(state, batch)
    want = their_loss(pair, theirs, conversations)
    want.backward()
    np.testing.assert_allclose(loss, want.item(), **LAYER)
    name = "visual.patch_embed.proj.weight"  # all pictures' way into the model
    got = publish_qwen_vl(config, gradient).source
    (theirs_name,) = [n for n, _ in theirs.named_parameters() if n.endswith(name)]
    (ours_name,) = [n for n in got.specs() if n.endswith(name)]
    wanted = theirs.get_parameter(theirs_name).grad
    assert float(wanted.abs().max()) > 0
    np.testing.assert_allclose(got.read(ours_name), wanted, **WHOLE)


_LINEARS = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}


@pytest.mark.parametrize(
    "pair", ["qwen2_5_vl"], indirect=True
)  # both families' decoders are LLaMA's
def test_lora_is_pefts_formula(pair, rows):
    """W + alpha / r B A in torch's weights (peft's LoraLayer), loss and gradients of A and B; what
    is frozen has none, the tower included."""
    graphdef, state = nnx.split(pair.ours)
    ours = nnx.merge(graphdef, jax.tree.map(copied, state))
    add_lora(ours.llama, LORA, rngs=nnx.Rngs(2))
    theirs, added, rng = copy_of(pair), {}, np.random.default_rng(7)
    for name in LORA.targets:
        linear = getattr(ours.llama.layers, name)
        shape = linear.lora_b.shape
        linear.lora_b.set_value(jax.device_put(rng.normal(0, 0.1, shape).astype(np.float32)))
        for number, layer in enumerate(theirs.model.language_model.layers):
            ab = [
                torch.tensor(np.asarray(getattr(linear, f"lora_{x}")[...])[number]).requires_grad_()
                for x in "ab"
            ]
            added[name, number] = ab
            own = layer.get_submodule(_LINEARS[name])
            weight = own.weight.detach() + LORA.alpha / LORA.rank * (ab[0] @ ab[1]).T
            del own.weight
            own.weight = weight
    want = their_loss(pair, theirs)
    want.backward()
    objective = VisionLanguageObjective(pair.ours.config, LORA)
    step, state = gradient_of(objective, ours)
    loss, gradient = step(state, batch_of(rows))
    np.testing.assert_allclose(loss, want.item(), **LAYER)
    named = {name: np.asarray(x) for name, x in flatten_named(gradient).items()}
    for (name, number), pairs in added.items():
        for letter, x in zip("ab", pairs, strict=True):
            got = named[f"llama/layers/{name}/lora_{letter}"][number]
            np.testing.assert_allclose(got, x.grad.numpy(), **LAYER, err_msg=name)
    base = flatten_named(nnx.state(pair.ours, nnx.Param))
    kept = flatten_named(nnx.state(objective.finish(ours), nnx.Param))
    assert set(kept) == set(base)
    for (name, number), (a, b) in added.items():
        kernel = f"llama/layers/{name}/kernel"
        added_to = LORA.alpha / LORA.rank * (a @ b).detach().numpy()
        np.testing.assert_allclose(
            np.asarray(kept[kernel])[number], np.asarray(base[kernel])[number] + added_to, **LAYER
        )
