"""Prophet, MAVL and RMR on a corpus of sources: MCAN over its pictures, and rows of Atlas."""

from __future__ import annotations

import pytest
from cli_runs import LANDS, ROOT, done, mmqa, rows_of, sentence
from tiny_llm import write_folder

from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.prompting.candidates import load_candidates

pytestmark = pytest.mark.usefixtures("quick_and_quiet")

TINY = {
    "tokenizer": "corpus:200", "batches.lengths": "(20,)", "batches.batch_size": 4,
    "batches.threads": 0, "inference.batch_size": 4, "train.steps": 2, "train.checkpoint_every": 0,
    "model.changes.hidden": 16, "model.changes.layers": 1, "model.changes.mlp": 16,
    "model.vision.width": 16, "model.vision.layers": 1, "model.vision.mlp_width": 16,
}  # fmt: skip
ENGINE = {"slots": 4, "length": 512, "buckets": (8, 64), "prefill_tokens": 64, "block": 64}


def train(data, workdir, **changes) -> list[str]:
    values = {**TINY, "data.dir": data, **changes}
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    return [
        "train",
        f"--config={ROOT}/configs/atlas/mcan.py:runlocal",
        f"--workdir={workdir}",
        *flags,
    ]


@pytest.fixture(scope="module")
def inputs(data, models, tmp_path_factory):
    """A trained MCAN, its candidates, and a tiny language model."""
    folder = tmp_path_factory.mktemp("atlas")
    done(*train(data, folder / "mcan"))
    found = done(
        "candidates", f"--data={data}", "--model", folder / "mcan", f"--out={folder / 'found'}"
    )
    assert found["pictures_without_features"] == 0
    assert 0 <= found["scores"]["accuracy"] <= found["scores"]["recall@10"] <= 1
    write_folder(folder / "llm")
    return folder


def row(inputs, data, name, workdir, **changes) -> list[str]:
    """Flags of a row of Atlas over the tiny corpus."""
    values = {"data.dir": data, **changes}
    if "rmr" in name:
        encoder = inputs.parent / "none" if "encoder" not in changes else values.pop("encoder")
        values |= {f"parts.library.{side}_model": encoder for side in ("text", "image")}
    else:
        values["parts.heuristics.candidates"] = inputs / "found" / "candidates.json"
        values["parts.heuristics.examples"] = inputs / "found" / "answer_aware_examples.json"
    if name != "vqa_model_alone":
        values |= {"parts.llm.model": inputs / "llm", "parts.llm.cache": ""}
        values |= {f"parts.llm.engine.{key}": value for key, value in ENGINE.items()}
        values |= {"options.shots": 1, "options.max_new_tokens": 2}
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    return [
        "run",
        f"--config={ROOT}/configs/atlas/tables.py:{name}",
        f"--workdir={workdir}",
        *flags,
    ]


def test_candidates_are_keywords(inputs, data):
    corpus = open_corpus(data)
    known = {answer for pairs in load_candidates(inputs / "found" / "candidates.json").values()
             for answer, _ in pairs}  # fmt: skip
    keywords = {q.keywords.lower() for q in corpus.questions("train")}
    assert known <= keywords
    assert {capital.lower() for capital in LANDS.values()} & known


def test_the_vqa_model_alone(inputs, data, tmp_path):
    result = done(*row(inputs, data, "vqa_model_alone", tmp_path / "run"))
    assert result["dataset"] == "atlas"
    assert set(result["scores"]) == {"webqa_acc/no_lemma", "exact_match/no_lemma"}
    best = load_candidates(inputs / "found" / "candidates.json")
    for prediction in rows_of(tmp_path / "run" / "predictions.jsonl"):
        assert prediction["answer"] == best[prediction["question_id"]][0][0]


def test_prophets_prompt(inputs, data, tmp_path):
    """The context is what gold sources say, the shots' answers are keywords."""
    done(*row(inputs, data, "smollm2_prophet_one", tmp_path / "run"))
    corpus = open_corpus(data)
    known = {q.id: q for q in corpus.questions()}
    found = load_candidates(inputs / "found" / "candidates.json")
    traces = rows_of(tmp_path / "run" / "trace.jsonl")
    assert len(traces) == len(corpus.questions("test"))
    for trace in traces:
        ((prompt,), ((shot,),)) = trace["prompts"], trace["shots"]
        asked, example = known[trace["question_id"]], known[shot["id"]]
        first, query = prompt.split("===\nContext: ")[1:]
        assert f"Answer: {example.keywords}\n" in first
        text = " ".join(corpus.sources[row].text for row in corpus.positive_rows(asked))
        assert query.startswith(text)
        assert f"Candidates: {found[asked.id][0][0]}(" in query


def test_mavl_retrieves_from_the_rows_own_sources(inputs, data, tmp_path):
    """Without snippets in the context, BM25 finds the one that names the land."""
    done(*row(inputs, data, "smollm2_mavl_pictures", tmp_path / "run", **{
        "options.plans": "all", "options.knowledge_tokens": 2,
    }))  # fmt: skip
    known = {q.id: q for q in open_corpus(data).questions()}
    traces = rows_of(tmp_path / "run" / "trace.jsonl")
    on_text = [t for t in traces if known[t["question_id"]].category == "text"]
    assert on_text
    for trace in on_text:
        land = next(land for land in LANDS if land in trace["question"])
        assert trace["tools"]["2"] == sentence(land)
        assert {agent["score"] for agent in trace["agents"]} <= {0.0, 1.0}
    scores = read_json(tmp_path / "run" / "scores.json")
    assert set(scores["agents"]) == {"junior", "senior", "manager"}


def test_rmrs_examples_are_near_in_text_and_picture(inputs, data, models, tmp_path):
    done(*row(inputs, data, "smollm2_rmr", tmp_path / "run", encoder=models / "contrastive"))
    known = {q.id: q for q in open_corpus(data).questions()}
    for trace in rows_of(tmp_path / "run" / "trace.jsonl"):
        ((prompt,), ((shot,),)) = trace["prompts"], trace["shots"]
        assert -1.001 <= shot["similarity"] <= 1.001
        assert f"Answer: {known[shot['id']].keywords}\n" in prompt
        assert prompt.endswith("Answer:")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pictures.size", "16", r"pictures\.size=16: the vision tower takes 48"),
        ("model.image", "caption", r"config key (model\.\w+|pictures)"),
        ("model.vision.width", "30", r"vision\.heads"),
    ],
)
def test_wrong_training_configs(data, tmp_path, refused, key, value, message):
    refused(*train(data, tmp_path / "run", **{key: value}), message=message)


def test_an_unknown_context(inputs, data, tmp_path):
    flags = row(inputs, data, "vqa_model_alone", tmp_path / "run", **{"data.context": "captions"})
    ended = mmqa(*flags)
    assert ended.code == 2
    assert "data.context" in ended.err
