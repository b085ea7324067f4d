"""From a config to task, batches and starting weights; presets; one training run's bookkeeping."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.models.bert import network as bert
from mmqa_jax.models.encoders.dual_encoder import DualEncoderConfig, DualEncoderModel
from mmqa_jax.models.two_towers import config as clip
from mmqa_jax.models.vlp import network as vlp
from mmqa_jax.models.vlp.network import VLPInputs, VLPModel
from mmqa_jax.tasks import run
from mmqa_jax.tasks.contrastive_losses import ContrastiveObjective
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.task import make_tokenizer
from mmqa_jax.tasks.vlp import AnswerObjective, RerankObjective
from mmqa_jax.weights.bundled import minilm_path
from tests.refusals import refuses

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs" / "atlas"
TASKS = {"contrastive": ContrastiveObjective, "rerank": RerankObjective, "answer": AnswerObjective}
TREES = ["cedar", "baobab", "olive", "palm", "banyan", "kapok"]


def make_corpus() -> Corpus:
    sources = [
        Source(f"s{i}", "text", f"The {tree} grows slowly.", tree) for i, tree in enumerate(TREES)
    ]
    questions = [
        Question(
            f"q{i}", "train", f"How does the {tree} grow?", answers=("Slowly.",),
            keywords="slowly", category="text", positives=(f"s{i}",),
            negatives=tuple(f"s{k}" for k in range(6) if k != i),
        )
        for i, tree in enumerate(TREES)
    ]  # fmt: skip
    return Corpus(sources, questions, fingerprint="trees")


CORPUS = make_corpus()


def make_config(name: str, mode: str = "", **overrides) -> ConfigDict:
    """The published config with a short batch; keyword `a__b` overrides key `a.b`."""
    changes = {"batches.batch_size": 2, "batches.threads": 0}
    changes |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(f"{CONFIGS / name}.py" + (f":{mode}" if mode else ""), changes)


@pytest.fixture(scope="module")
def restricted(tmp_path_factory):
    """MiniLM's tokenizer with the vocabulary of CORPUS."""
    return make_tokenizer("minilm:corpus", CORPUS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def published():
    """MiniLM's tensors as its package holds them."""
    return load_file(minilm_path() / "model.safetensors")


UNTOUCHED = -7.0


def loaded(recipe) -> dict[str, np.ndarray]:
    """The recipe's model by parameter name, all UNTOUCHED before `load_pretrained`."""
    model = nnx.eval_shape(recipe.objective.outline)
    graphdef, shapes = nnx.split(model)
    start = jax.tree.map(
        lambda leaf: jax.device_put(np.full(leaf.shape, UNTOUCHED, leaf.dtype)), shapes
    )
    model = nnx.merge(graphdef, start)
    recipe.load_pretrained(model)
    return {name: np.asarray(x) for name, x in flatten_named(nnx.state(model, nnx.Param)).items()}


# Tokenizers


def test_the_restricted_tokenizer_is_much_smaller_and_kept_with_the_run(restricted, tmp_path):
    full = minilm_tokenizer()
    assert restricted.vocab_size < full.vocab_size / 8
    for source in CORPUS.sources:
        pieces = [restricted.token(i) for i in restricted.encode(source.text)]
        assert pieces == [full.token(i) for i in full.encode(source.text)]
    first = make_tokenizer("minilm:corpus", CORPUS, tmp_path)
    assert first.fingerprint == restricted.fingerprint
    # A run goes on with the tokenizer that it began with, whatever the name says later.
    assert make_tokenizer("minilm", CORPUS, tmp_path).fingerprint == first.fingerprint


def test_other_tokenizers(restricted, tmp_path):
    assert make_tokenizer("minilm", CORPUS, tmp_path / "a").vocab_size == 30_522
    trained = make_tokenizer("corpus:90", CORPUS, tmp_path / "b")
    assert trained.vocab_size <= 90
    assert trained.unk_id not in trained.encode("how does the baobab grow?")
    restricted.save(tmp_path / "mine.json")
    given = make_tokenizer(str(tmp_path / "mine.json"), CORPUS, tmp_path / "c")
    assert given.fingerprint == restricted.fingerprint
    assert (tmp_path / "c" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corpus:many", r"config key tokenizer=corpus:many: write corpus:N"),
        ("corpus:7", r"vocab_size=7: the texts alone have \d+ different characters"),
        ("nowhere.json", r"nowhere\.json: no such file"),
    ],
)
def test_wrong_tokenizers_are_named_and_none_is_kept(name, message, tmp_path):
    refuses(message, make_tokenizer, name, CORPUS, tmp_path)
    assert not list(tmp_path.iterdir())


# Recipes and their starting weights


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mode", ["", "runlocal"])
def test_every_atlas_config_makes_its_task_and_batches(name, mode, restricted):
    config = make_config(name, mode)
    recipe = read_task(config).recipe(CORPUS, restricted)
    assert isinstance(recipe.objective, TASKS[name])
    assert (recipe.load_pretrained is None) == (mode == "runlocal")
    first = next(recipe.batches)
    again = read_task(config).recipe(CORPUS, restricted)
    jax.tree.map(np.testing.assert_array_equal, next(again.batches), first)
    if name == "contrastive":
        assert first["query_ids"].shape == (2, config.batches.query_length)
    else:
        assert isinstance(first["inputs"], VLPInputs)
        slots = read_task(config).packer(restricted).config.slots_per_picture
        buckets = {shown * slots + text for shown, text in config.packing.buckets}
        assert first["inputs"].input_ids.shape[1] in buckets


def test_published_atlas_models_have_the_shapes_of_minilm(restricted):
    """What the README calls MiniLM is MiniLM: its widths, and its first layers."""
    for name in TASKS:
        recipe = read_task(make_config(name)).recipe(CORPUS, restricted)
        model = nnx.eval_shape(recipe.objective.outline)
        trunk = (model.text if name == "contrastive" else model.bert).config
        assert (trunk.hidden, trunk.heads, trunk.mlp) == (384, 12, 1536)
        assert trunk.layers == (6 if name == "contrastive" else 3)
        assert trunk.vocab_size == restricted.vocab_size


@pytest.mark.parametrize(("name", "trunk"), [("contrastive", "text"), ("answer", "bert")])
def test_minilms_rows_of_the_restricted_vocabulary_are_loaded(name, trunk, restricted, published):
    config = make_config(name)
    config.model.changes.layers = 1
    parameters = loaded(read_task(config).recipe(CORPUS, restricted))

    table = published["embeddings.word_embeddings.weight"]
    words = parameters[f"{trunk}/embeddings/word/table"]
    assert words.shape == (restricted.vocab_size, 384)
    full = minilm_tokenizer()
    for token_id in range(restricted.vocab_size):
        row = full.token_id(restricted.token(token_id))
        np.testing.assert_array_equal(words[token_id], table[row])
    # One word by hand: the id under which MiniLM's vocab.txt lists it.
    lines = (minilm_path() / "vocab.txt").read_text(encoding="utf-8").split("\n")
    np.testing.assert_array_equal(words[restricted.token_id("cedar")], table[lines.index("cedar")])
    # The one layer is MiniLM's first; torch keeps [out, in].
    np.testing.assert_array_equal(
        parameters[f"{trunk}/layers/query/kernel"][0],
        published["encoder.layer.0.attention.self.query.weight"].T,
    )
    head = parameters.pop("mlm_head/dense/kernel", None)
    if head is not None:  # VLP's words come from the hidden states as they are
        np.testing.assert_array_equal(head, np.eye(384, dtype=np.float32))
    for parameter, values in parameters.items():
        # What MiniLM does not have stays as it was made.
        assert (values == UNTOUCHED).all() != parameter.startswith(f"{trunk}/"), parameter


def test_a_folder_without_weights_and_a_vocabulary_that_does_not_fit(restricted, tmp_path):
    config = make_config("answer", init=str(tmp_path), model__changes__layers=1)
    with pytest.raises(UserError, match=str(tmp_path)):
        loaded(read_task(config).recipe(CORPUS, restricted))
    # MiniLM's whole table into a smaller vocabulary that is not called minilm:corpus.
    config = make_config("answer", tokenizer="mine.json", model__changes__layers=1)
    with pytest.raises(UserError, match=r"word_embeddings.*30522.*384"):
        loaded(read_task(config).recipe(CORPUS, restricted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__split": "val"}, r"config key data\.split=val: .*no such questions"),
        ({"model__trunk": "bert_huge"}, r"config key model\.trunk=bert_huge: unknown.*minilm_l6"),
        ({"model__frontend": "x102"}, r"config key model\.frontend='x102': .*'x101'"),
        ({"packing__buckets": "()"}, r"packing\.buckets is empty"),
    ],
)
def test_wrong_configs_are_named(change, message, restricted):
    with pytest.raises(UserError, match=message):
        read_task(make_config("answer", **change)).recipe(CORPUS, restricted)


def test_augmentation_is_on_where_the_config_says_so(restricted, monkeypatch):
    asked = []

    class Noted:
        def __init__(self, **section):
            asked.append(section)

        def __call__(self, raw, rng):
            return dataclasses.replace(raw, answer="cedar")

    monkeypatch.setattr("mmqa_jax.data.atlas.augment.AtlasAugment", Noted)
    read_task(make_config("contrastive")).recipe(CORPUS, restricted)
    assert asked == []
    config = make_config("answer", augment__entities=0.5, augment__palette=0.0)
    batch = next(read_task(config).recipe(CORPUS, restricted).batches)
    assert asked == [{"entities": 0.5, "palette": 0.0}]
    assert (batch["masked_ids"] == restricted.token_id("cedar")).any()


def test_the_answer_loss_has_the_configs_micro_batches(restricted):
    config = make_config("answer")
    assert read_task(config).recipe(CORPUS, restricted).objective.questions_per_mean is None
    config.questions_per_mean = 2
    assert read_task(config).recipe(CORPUS, restricted).objective.questions_per_mean == 2


# Presets


def test_published_sizes_by_name():
    section = {"trunk": "bert_base_cased", "frontend": "x101"}
    config = read_typed(VLPModel, section, "model").config(28_996)
    published = vlp.vlp_base_x101()
    assert config == dataclasses.replace(
        published, bert=dataclasses.replace(published.bert, eps=config.bert.eps)
    )
    assert (
        read_typed(VLPModel, {**section, "frontend": "vinvl"}).config(28_996).region_positions
        == 1601
    )
    section = {"clip": "vit_b_16", "fusion": "image", "picture_gate": 1.0}
    both = read_typed(DualEncoderModel, section).config(7)
    assert both == DualEncoderConfig(
        clip.vit_b_16().text, clip.vit_b_16().vision, fusion="image", picture_gate=1.0
    )


def test_changes_and_vocabulary_reach_the_model():
    section = {"trunk": "minilm_l6", "changes": {"layers": 2, "dropout": 0.5}, "frontend": "patches",
               "patch": 8, "visual_hidden": (16, 32)}  # fmt: skip
    config = read_typed(VLPModel, section, "model").config(77)
    assert config.bert == dataclasses.replace(
        bert.minilm_l6(), layers=2, dropout=0.5, vocab_size=77, types=6
    )
    assert (config.region_features, config.visual_hidden) == (8 * 8 * 3, (16, 32))
    section = {"clip": "", "trunk": "minilm_l6", "vision": {"layers": 3}, "fusion": "mean",
               "picture_gate": 0.1}  # fmt: skip
    dual = read_typed(DualEncoderModel, section, "model").config(77)
    assert (dual.text.vocab_size, dual.text.types, dual.vision.layers) == (77, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": "vit_b_17"}, r"config key model\.clip=vit_b_17: unknown; use one of vit_b_32"),
        ({"changes": {"layer": 2}}, r"config key model\.changes\.layer: .*'layers'"),
        ({"vision": {"depth": 2}}, r"config key model\.vision\.depth: unknown"),
        (
            {"vision": {"embed_dim": 384}, "changes": {"hidden": 48}},
            r"vision\.embed_dim is 384, .*48",
        ),
        ({"fusion": "max"}, r"fusion is 'max', expected one of mean, image, sum"),
    ],
)
def test_wrong_presets_are_named(change, message):
    section = {"clip": "", "trunk": "minilm_l6", "fusion": "mean", "picture_gate": 0.1}
    with pytest.raises(UserError, match=message):
        read_typed(DualEncoderModel, {**section, **change}, "model").config(77)


# A training run


@pytest.fixture
def trained(monkeypatch):
    """`train` replaced by one that notes its arguments and leaves a finished run's model.json."""
    calls = []

    def train(config, *, workdir, metadata, **arguments):
        calls.append({"config": config, "metadata": metadata, **arguments})
        write_json(Path(workdir) / "model.json", {**metadata, "step": config["steps"]})

    monkeypatch.setattr(run, "train", train)
    return calls


def test_a_run_is_trained_once_and_says_what_it_is(trained, tmp_path):
    config = make_config("rerank", "runlocal", seed=4, train__steps=3)
    config.tokenizer = "corpus:90"
    result = run.run_training(config, tmp_path, CORPUS)
    assert result == {"task": "rerank", "steps": 3, "workdir": str(tmp_path)}
    (call,) = trained
    assert call["metadata"] == {"task": "rerank", "corpus": "trees"}
    assert (call["seed"], call["config"]["steps"]) == (4, 3)
    assert isinstance(call["objective"], RerankObjective)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["seed"] == 4
    assert run.is_trained(tmp_path, 3)
    assert not run.is_trained(tmp_path, 4)
    assert run.run_training(config, tmp_path, CORPUS) == result
    assert len(trained) == 1
    config.seed = 5
    refuses(r"seed \(4 there, 5 now\).*new --workdir", run.run_training, config, tmp_path, CORPUS)
    assert len(trained) == 1


def test_a_run_needs_data(trained, tmp_path):
    config = make_config("rerank", "runlocal")
    refuses(r"config key data\.dir is empty", run.run_training, config, tmp_path / "run")
    config.data.dir = str(tmp_path / "nothing")
    refuses(r"nothing: no such folder, a prepared", run.run_training, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert trained == []
