"""Models by themselves: logits, loss, gradients, generation, sharding of a tiny LLaMA's folder."""

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_llm import LETTERS, tiny_llama, write_folder

import mmqa_jax as mmqa
from tests.refusals import refuses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mmqa.load_model(write_folder(tmp_path_factory.mktemp("llama") / "tiny"))


def test_forward_and_loss_are_the_networks(model):
    ids, mask = model.tokens(["hello you", "hi"])
    assert ids.tolist()[1] == [LETTERS.index("h"), LETTERS.index("i")] + 7 * [0]
    logits = model.forward(ids, mask)
    np.testing.assert_allclose(logits, tiny_llama()(ids, mask), atol=1e-5)
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    by_hand = [
        -log_probs[row, n, ids[row, n + 1]] for row, last in ((0, 8), (1, 1)) for n in range(last)
    ]
    assert float(model.loss(ids, mask)) == pytest.approx(np.mean(by_hand), rel=1e-5)
    loss, gradients = nnx.value_and_grad(model.loss_of)(model.network, ids, mask)
    assert float(loss) == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert float(abs(gradients["head"]["kernel"][...]).max()) > 0


def test_generation_takes_the_likeliest_tokens(model):
    text = model.generate("hello", max_new_tokens=3)
    ids, mask = model.tokens([f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{text}"])
    begin = ids.shape[1] - len(text)
    likeliest = np.asarray(model.forward(ids, mask))[0, begin - 1 : -1].argmax(-1)
    assert likeliest.tolist() == ids[0, begin:].tolist()


def test_parameters_are_sharded_by_the_rules(model):
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"))
    shardings = jax.tree.leaves(model.shardings(mesh))
    assert {axis for s in shardings for axis in s.spec if axis} == {"fsdp", "tensor"}


def test_what_is_no_decoder_says_so(tmp_path):
    encoder = mmqa.load_model("minilm")
    vectors = encoder.encode(["Lima", "The capital of Peru"])
    np.testing.assert_allclose(vectors, mmqa.embed(["Lima", "The capital of Peru"]), atol=1e-6)
    refuses(
        "forward: minilm is a bert, which is no decoder", encoder.forward, np.ones((1, 3), np.int32)
    )
    refuses("no such file or folder", mmqa.load_model, "nowhere")
    refuses("dtype='half' is not auto", mmqa.load_model, "minilm", dtype="half")
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    refuses("model_type is 'unheard'", mmqa.load_model, tmp_path)
