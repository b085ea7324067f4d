"""Prophet, MAVL and RMR on a corpus of sources: MCAN over its pictures, and rows of Atlas."""

import pytest
from cli_runs import LANDS, ROOT, done, flags_with, quietly, rows_of, sentence, traced_loss
from fake_llm import FakeLLM
from test_shots import FakeEmbedder

from mmqa_jax.core.config import load_config
from mmqa_jax.data.corpus import open_corpus, with_gold_sources
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary
from mmqa_jax.prompting.examples.side_files import load_candidates
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.parts import HeuristicsSpec, KnowledgeSpec, open_knowledge
from mmqa_jax.runs.row import find_setting
from mmqa_jax.tasks.library import LibrarySpec, open_library
from mmqa_jax.tasks.registry import check_config
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TABLES = f"{ROOT}/configs/atlas/tables.py"
TINY = {
    "tokenizer": "corpus:200", "batches.lengths": "(20,)", "batches.batch_size": 4,
    "batches.threads": 0, "inference.batch_size": 4, "train.steps": 2, "train.checkpoint_every": 0,
    "model.changes.hidden": 16, "model.changes.layers": 1, "model.changes.mlp": 16,
    "model.vision.width": 16, "model.vision.layers": 1, "model.vision.mlp_width": 16,
    "model.fusion.dropout": 0.0,
}  # fmt: skip


def train(data, workdir, **changes) -> list[str]:
    values = {**TINY, "data.dir": data, **changes}
    return flags_with("train", "atlas/mcan.py:runlocal", workdir, values)


@pytest.fixture(scope="module")
def found(cli_cache, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")
    with quietly(cli_cache):
        done(*train(data, folder / "mcan"), "--only_start")
        model = f"--model={folder / 'mcan'}"
        result = done("candidates", f"--data={data}", model, f"--out={folder / 'found'}")
    assert result["pictures_without_features"] == 0
    assert 0 <= result["scores"]["accuracy"] <= result["scores"]["recall@10"] <= 1
    return folder / "found"


def run_row(name, data, found, llm, library=None, **options):
    """A row of Atlas over the tiny corpus, with another language model; its predictions."""
    config = load_config(f"{TABLES}:{name}", {f"options.{k}": v for k, v in options.items()})
    corpus = with_gold_sources(open_corpus(data), config.data.context)
    parts = {"llm": llm, "library": library(corpus) if library else None}
    if library is None:
        parts["library"] = open_library(corpus, LibrarySpec(**config.parts.library))
        files = (found / "candidates.json", found / "answer_aware_examples.json")
        parts["heuristics"] = HeuristicsSpec(*map(str, files)).open(OpenedParts(corpus))
    if "knowledge" in config.parts:
        parts["knowledge"] = open_knowledge(corpus, KnowledgeSpec(**config.parts.knowledge))
    setting = find_setting(config.system, config.setting)
    return setting.run(corpus.questions("test"), corpus, parts, config.options)


def test_the_loss_reads_what_the_corpus_gives(found):
    """Traced alone: that it trains tower and text is tested in test_patch_mcan."""
    batch = traced_loss(found.parent / "mcan")
    assert batch["image"]["shown"].shape == (4, 2)
    assert batch["targets"].sum(axis=1).tolist() == [1.0] * 4  # a question has one keyword


def test_candidates_are_keywords(found, data):
    known = {a for pairs in load_candidates(found / "candidates.json").values() for a, _ in pairs}
    assert known == {q.keywords.lower() for q in open_corpus(data).questions("train")}


def test_the_vqa_model_alone(found, data, tmp_path):
    files = {"candidates": "candidates.json", "examples": "answer_aware_examples.json"}
    flags = [f"--config.parts.heuristics.{key}={found / name}" for key, name in files.items()]
    flags += [f"--config.data.dir={data}", f"--workdir={tmp_path / 'run'}"]
    result = done("run", f"--config={TABLES}:vqa_model_alone", *flags)
    assert result["dataset"] == "atlas"
    assert set(result["scores"]) == {"webqa_acc/no_lemma", "exact_match/no_lemma"}
    best = load_candidates(found / "candidates.json")
    for prediction in rows_of(tmp_path / "run" / "predictions.jsonl"):
        assert prediction["answer"] == best[prediction["question_id"]][0][0]


def test_prophets_prompt(found, data):
    """The context is what gold sources say, the shots' answers are keywords."""
    llm = FakeLLM(lambda prompt: (" Pelot", -0.5))
    predictions = run_row("smollm2_prophet_one", data, found, llm, shots=1)
    corpus = open_corpus(data)
    known = {q.id: q for q in corpus.questions()}
    candidates = load_candidates(found / "candidates.json")
    assert len(predictions) == len(corpus.questions("test"))
    for prediction in predictions:
        ((prompt,), ((shot,),)) = prediction.trace["prompts"], prediction.trace["shots"]
        asked, example = known[prediction.question_id], known[shot["id"]]
        first, query = prompt.split("===\nContext: ")[1:]
        assert f"Answer: {example.keywords}\n" in first
        text = " ".join(corpus.sources[row].text for row in corpus.positive_rows(asked))
        assert query.startswith(text)
        assert f"Candidates: {candidates[asked.id][0][0]}(" in query
        assert prediction.answer == "pelot"


def test_mavl_retrieves_from_the_rows_own_sources(found, data):
    """Without snippets in the context, BM25 finds the one that names the land."""
    llm = FakeLLM(lambda prompt: (" Vermil", -0.5))
    options = {"plans": "all", "shots": 1}
    predictions = run_row("smollm2_mavl_pictures", data, found, llm, **options)
    known = {q.id: q for q in open_corpus(data).questions()}
    scores = set()
    for prediction in predictions:
        asked = known[prediction.question_id]
        if asked.category == "text":
            land = next(land for land in LANDS if land in asked.question)
            assert prediction.trace["tools"]["2"] == sentence(land)
            right = float(asked.keywords == "Vermil")
            assert {agent["score"] for agent in prediction.trace["agents"]} == {right}
            scores.add(right)
        assert all("Context: \n" in p for p in prediction.trace["prompts"][-1:])
    assert scores == {0.0, 1.0}


def test_rmrs_examples_are_near_in_text_and_picture(found, data, tmp_path):
    fake = FakeEmbedder()

    def library(corpus):
        store = PictureStore(corpus, size=4)
        embedders = Embedders(fake, fake, lambda question: store.encoded(question.image))
        return ExampleLibrary(corpus.questions("train"), embedders, cache=tmp_path)

    llm = FakeLLM(lambda prompt: (" The answer.\n\nQuestion: more", -0.5))
    predictions = run_row("smollm2_rmr", data, found, llm, library, shots=1)
    known = {q.id: q for q in open_corpus(data).questions()}
    flags = [p for p in predictions if known[p.question_id].category == "color"]
    assert "Context: Flag of Arvania.\nAnswer:" in flags[0].trace["prompts"][0]
    for prediction in predictions:
        ((prompt,), ((shot,),)) = prediction.trace["prompts"], prediction.trace["shots"]
        assert f"Answer: {known[shot['id']].keywords}\n" in prompt
        assert prompt.endswith("Answer:")
        assert prediction.answer == "the answer"
    # The picture counts: without it the similarity of the flag's question is another.
    (alone,) = ExampleLibrary(
        open_corpus(data).questions("train"), Embedders(fake), cache=tmp_path
    ).select([known[flags[0].question_id]], 1, "bimodal")
    assert abs(alone[0].similarity - flags[0].trace["shots"][0][0]["similarity"]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pictures.size": 16}, r"pictures\.size=16: the vision tower takes 48"),
        ({"model.vision.heads": 3}, r"vision\.heads"),
    ],
)
def test_wrong_training_configs(data, tmp_path, refused, changes, message):
    refused(*train(data, tmp_path / "run", **changes), message=message)


def test_captions_take_neither_pictures_nor_augmentation():
    config = load_config(f"{ROOT}/configs/okvqa/mcan.py:small")
    config.pictures = {"size": 48, "resize": "sample"}
    refuses(r"config key pictures: model\.image=caption does not read", check_config, config)
    del config.pictures
    config.augment = {
        "factory": "mmqa_jax.data.atlas.augment:AtlasAugment", "palette": 0.5,
    }  # fmt: skip
    refuses(r"config key augment: .* model\.image=caption", check_config, config)


def test_an_unknown_context(data, tmp_path, refused):
    values = {"data.context": "captions", "data.dir": data}
    run = flags_with("run", "atlas/tables.py:vqa_model_alone", tmp_path / "r", values)
    refused(*run, message=r"data\.context")


@pytest.mark.parametrize("mode", ["small", "runlocal"])
def test_aokvqas_configs_can_be_trained(mode):
    check_config(load_config(f"{ROOT}/configs/aokvqa/mcan.py:{mode}"))
