"""configs/openstax and configs/webqa/contrastive.py, each in its mode `runlocal`."""

import contextlib

import jax
import pytest
from cli_runs import ROOT, TINY, TINY_OF, done, question, rows_of, write_documents
from flax import nnx

from mmqa_jax.core.config import load_config
from mmqa_jax.core.flops import inner_jaxprs
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.tasks.registry import check_config, read_task

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("openstax/contrastive.py", {}),
        ("openstax/contrastive.py:zero_shot", {}),
        ("openstax/rerank.py", {}),
        ("webqa/contrastive.py", {"init": "scratch"}),  # the weights are the user's
    ],
)
def test_configs_as_published_fit_together(name, changes):
    check_config(load_config(f"{ROOT}/configs/{name}", changes))


def product_types(jaxpr):
    """The type of the first factor of every product."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield str(equation.invars[0].aval.dtype)
        for inner in inner_jaxprs(equation.params):
            yield from product_types(inner)


@pytest.mark.parametrize(
    ("name", "in_float32"),
    [
        # The projection of pictures, and the comparisons in both directions.
        ("webqa/contrastive.py:runlocal", 3),
        ("webqa/vlp_select.py:clip_patches_pod", 0),
    ],
)
def test_a_models_dtype_reaches_its_vision_tower(name, in_float32):
    config = load_config(f"{ROOT}/configs/{name}")
    config.model.changes = {**config.model.changes, "dtype": "bfloat16"}
    task = read_task(config)
    objective = task.objective(400)
    graphdef, params = nnx.split(nnx.eval_shape(objective.outline))

    def loss(params, batch):
        return objective.loss(nnx.merge(graphdef, params), batch, jax.random.key(0))[0]

    types = list(product_types(jax.make_jaxpr(loss)(params, task.batch()).jaxpr))
    assert len(types) > 20
    assert types.count("float32") == in_float32


@pytest.fixture(scope="module")
def mined(data, tmp_path_factory):
    """What BM25 finds for the training questions."""
    path = tmp_path_factory.mktemp("mined") / "bm25.jsonl"
    flags = (f"--data={data}", "--split=train", "--method=bm25", "--top_k=4")
    done("search", *flags, f"--out={path}")
    return path


@pytest.mark.parametrize("name", ["openstax/contrastive", "openstax/rerank", "webqa/contrastive"])
def test_runlocal_fits_its_batches(name, data, mined, tmp_path):
    """Its loss is traced: trainings of the same tasks are Atlas's."""
    values = {**TINY, **TINY_OF[name.partition("/")[2]], "data.dir": str(data)}
    values["data.negatives"] = f"('{mined}',)"
    overrides = [f"{key}={value}" for key, value in values.items()]
    config = load_config(f"{ROOT}/configs/{name}.py:runlocal", overrides)
    described = check_config(config)
    corpus = open_corpus(data)
    recipe = described.recipe(corpus, described.make_tokenizer(corpus, tmp_path))
    with contextlib.closing(recipe.batches) as batches:
        batch = next(batches)
    arrays = {name: array for name, array in batch.items() if name not in ("ids", "index")}

    def first_loss(batch, key):
        return recipe.objective.loss(recipe.objective.init(key), batch, key)

    loss, metrics = jax.eval_shape(first_loss, arrays, jax.random.key(0))
    assert (loss.shape, loss.dtype) == ((), "float32")
    assert metrics["accuracy"].shape == ()


def test_a_question_made_from_a_source_does_not_find_it(tmp_path):
    asked = {"question": "The capital of Hav is Medina.", "positives": ["s-Gondal"]}
    rows = [question(0, "test", "Hav", **asked, negatives=[], from_source="s-Hav")]
    rows.append(question(1, "test", "Hav", **asked, negatives=[]))
    raw = write_documents(tmp_path / "raw", rows)
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    out = tmp_path / "found.jsonl"
    flags = (f"--data={tmp_path / 'data'}", "--method=bm25", "--top_k=3", f"--out={out}")
    done("search", *flags)
    own, plain = (row["sources"] for row in rows_of(out))
    assert plain[0] == "s-Hav"
    assert "s-Hav" not in own
    assert len(own) == len(plain) == 3
    assert own[:2] == plain[1:]
