"""`mmqa run` of multiple choice: MMBench, SEED-Bench and a corpus, with a tiny language model."""

import dataclasses
import functools
import json

import pyarrow
import pyarrow.parquet
import pytest
from cli_runs import done, flags_with, mmqa, of_engine, rows_of, write_rows
from test_mmbench import ROWS as MMBENCH
from test_mmbench import write_tsv
from test_scienceqa import PROBLEMS
from test_seed_bench import NAMES
from test_seed_bench import QUESTIONS as SEED
from tiny_llm import MODEL, llama_config, write_folder, write_onevision, write_qwen_vl

from mmqa_jax.benchmarks.mmbench import score_mmbench
from mmqa_jax.benchmarks.scienceqa import score_scienceqa
from mmqa_jax.benchmarks.seedbench import score_seed_bench
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.scoring import chance, score_choices, score_predictions
from mmqa_jax.runs import parts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# One block: programs for one length of context only.
ENGINE = {"slots": 4, "length": 512, "buckets": (64,), "prefill_tokens": 64}
TEXTS = {
    "s1": ("Stars", "A star shines because hydrogen fuses in its core and gives light."),
    "s2": ("Cells", "Every cell has a membrane around it."),
    "s3": ("Stars", "The sun is a star."),
}


def choice(number: int, split: str, question: str, section: str, *choices: str) -> dict:
    return {
        "id": f"m{number}", "split": split, "kind": "multiple_choice", "question": question,
        "choices": list(choices), "answer_index": 0, "section": section, "answers": [choices[0]],
    }  # fmt: skip


CHOICES = [
    choice(0, "train", "What is the sun?", "Stars", "a star", "a moon"),
    choice(1, "train", "What has a cell?", "Cells", "a membrane", "a moon"),
    choice(2, "test", "Why does a star shine?", "Cells", "it burns hydrogen", "it reflects", "no"),
    choice(3, "test", "What is around a cell?", "Cells", "a membrane", "a wall of stone"),
]
MMMU = [
    {
        "id": f"validation_Art_{n}",
        "question": "What is it?",
        "options": "['a cat', 'a dog']",
        "answer": "A",
        "question_type": "multiple-choice",
    }
    for n in range(2)
]
FIGURE = {"id": "f0", "split": "test", "kind": "figure_retrieval", "question": "See the figure"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    names = ("openstax", "mmbench", "seedbench", "scienceqa", "mmmu")
    raw = {name: folder / "raw" / name for name in names}
    for path in raw.values():
        path.mkdir(parents=True)
    write_rows(raw["openstax"] / "questions.jsonl", [*CHOICES, FIGURE])
    sources = [
        {"id": name, "modality": "text", "title": title, "text": text}
        for name, (title, text) in TEXTS.items()
    ]
    write_rows(raw["openstax"] / "sources.jsonl", sources)
    write_tsv(raw["mmbench"] / "MMBench_DEV_EN.tsv", MMBENCH)
    seed = {"questions": SEED, "question_type": NAMES}
    (raw["seedbench"] / "SEED-Bench.json").write_text(json.dumps(seed))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(MMMU), raw["mmmu"] / "val.parquet")
    (raw["scienceqa"] / "problems.json").write_text(json.dumps(PROBLEMS))
    for name, path in raw.items():
        dataset = "corpus" if name == "openstax" else name
        done("prepare", dataset, f"--raw={path}", f"--out={folder / name}")
    write_folder(folder / "llm", llama_config(MODEL.vocab_size, positions=512))
    return folder


def run(inputs, name: str, row: str, workdir, *more: str, **values):
    values = {
        "data.dir": inputs / name,
        "parts.llm.model": inputs / "llm",
        "parts.library.text_model": "",
        "parts.library.image_model": "",
        "options.similarity": "random",
        **values,
        **of_engine(ENGINE),
    }
    if name != "openstax":
        values["parts.library.data"] = inputs / "scienceqa"
    return mmqa(*flags_with("run", f"{name}/tables.py:{row}", workdir, values), *more, "--json")


def test_multiple_choice_of_a_corpus(inputs, tmp_path):
    """Only questions with choices; the score is the traces', and what `mmqa evaluate` finds."""
    ended = run(inputs, "openstax", "smollm2_text2", tmp_path / "run")
    assert ended.code == 0, ended.err
    scores, traces = ended.value, rows_of(tmp_path / "run" / "trace.jsonl")
    assert [trace["question_id"] for trace in traces] == ["m2", "m3"]
    right = [float(trace["choice"] == 0) for trace in traces]
    assert scores["scores"] == {"choice_accuracy/recorded_choice": sum(right) / 2}
    assert set(scores["intervals"]) == set(scores["scores"])
    assert scores["notes"] == ["a random choice is right in 0.417 of the cases"]
    knowledge = [[passage["id"] for passage in trace["knowledge"][0]] for trace in traces]
    assert knowledge == [["s3", "s1"], ["s2"]]
    assert f"Context: {TEXTS['s2'][1]}\nAnswer:" in traces[1]["prompts"][0]
    evaluated = done(
        "evaluate", "corpus", f"--references={inputs / 'openstax'}", "--only_given",
        f"--predictions={tmp_path / 'run' / 'predictions.jsonl'}",
    )  # fmt: skip
    assert evaluated["scores"] == scores["scores"]


def test_the_control_rows(inputs, tmp_path):
    """A question's own section alone, and passages from anywhere."""
    own = run(inputs, "openstax", "smollm2_section1", tmp_path / "section")
    assert own.code == 0, own.err
    traces = rows_of(tmp_path / "section" / "trace.jsonl")
    assert [[p["id"] for p in t["knowledge"][0]] for t in traces] == [[], ["s2"]]
    assert own.value["prompts"]["questions_without_passages"] == 1
    drawn = run(inputs, "openstax", "smollm2_random2", tmp_path / "random")
    traces = rows_of(tmp_path / "random" / "trace.jsonl")
    assert all(len(trace["knowledge"][0]) == 2 for trace in traces)
    assert drawn.value["prompts"]["questions_without_passages"] == 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("parts.knowledge.retriever", "tfidf", "parts.knowledge.retriever='tfidf'"),
        ("parts.knowledge.top_k", 0, "parts.knowledge.top_k=0: at least 1"),
        ("parts.knowledge.modality", "image", "own corpus has no image sources"),
        ("parts.knowledge.data", "nowhere", "1 of its inputs are missing: nowhere"),
        ("data.where.kind", "essay", "none of the 3 questions of .* has kind='essay'"),
        ("data.where.kind", "figure_retrieval", "1 of 1 questions have no choices"),
    ],
)
def test_wrong_values(inputs, tmp_path, key, value, message):
    ended = run(inputs, "openstax", "smollm2_text1", tmp_path / "run", **{key: value})
    assert ended.code == 2
    assert len(ended.err.strip().splitlines()) == 1
    with pytest.raises(UserError, match=message):
        raise UserError(ended.err)
    assert not (tmp_path / "run" / "scores.json").exists()


def test_mmbench(inputs, tmp_path):
    """Every pass is asked; likelihood counts as chosen, letters by VLMEvalKit's rule."""
    ended = run(inputs, "mmbench", "smollm2_k3", tmp_path / "likelihood")
    assert ended.code == 0, ended.err
    traces = rows_of(tmp_path / "likelihood" / "trace.jsonl")
    assert len(traces) == len(MMBENCH)
    hits = {trace["question_id"]: trace["scores"] for trace in traces}
    names = {f"mmbench/{kind}{year}" for kind in ("circular", "vanilla") for year in ("", "_2026")}
    assert set(ended.value["scores"]) == names
    answers = {row["index"]: "ABCD".index(row["answer"]) for row in MMBENCH}
    for trace in traces:
        name = trace["question_id"]
        if int(name) < 1_000_000:
            assert hits[name]["mmbench/vanilla"] == float(trace["choice"] == answers[name])
    assert ended.value["unparsed"] == dict.fromkeys(names, 0)

    letters = {"options.chat": False, "options.pictures": False, "options.max_new_tokens": 4}
    ended = run(inputs, "mmbench", "llava_rmr", tmp_path / "letters", **letters)
    assert ended.code == 0, ended.err
    assert all(trace["choice"] is None for trace in rows_of(tmp_path / "letters" / "trace.jsonl"))


def test_mmbench_by_a_model_that_sees(inputs, tmp_path):
    """The row of a successor of RMR's Qwen-VL, with the questions' pictures."""
    model = write_qwen_vl(tmp_path / "model")
    values = {"parts.llm.model": model, "options.max_new_tokens": 4, "options.shots": 1}
    ended = run(inputs, "mmbench", "rmr_qwen25_vl", tmp_path / "run", **values)
    assert ended.code == 0, ended.err
    assert "mmbench/circular" in ended.value["scores"]
    assert (ended.value["prompts"]["failed"], ended.value["prompts"]["too_long"]) == (0, 0)
    traces = rows_of(tmp_path / "run" / "trace.jsonl")
    assert len(traces) == len(MMBENCH)


def test_captions_by_a_model_that_sees(inputs, tmp_path, monkeypatch):
    # Of the rows above, whose programs are there.
    spec = functools.partial(parts.LLMSpec, engine=ENGINE)
    monkeypatch.setattr(parts, "LLMSpec", spec)
    model, out = write_onevision(tmp_path / "model"), tmp_path / "captions.json"
    flags = (f"--data={inputs / 'mmbench'}", f"--model={model}", f"--out={out}")
    made = done("caption", *flags, "--max_new_tokens=4")
    assert (made["captions"], made["failed"]) == (len(json.loads(out.read_text())), 0)
    assert made["captions"] > 0


@pytest.mark.parametrize(
    ("name", "scorer"),
    [
        ("scienceqa", "scienceqa/letter_or_wrong"),
        ("seedbench", "seed_bench/letter"),
        ("mmmu", "mmmu/official"),
    ],
)
def test_llavas_own_rows(inputs, tmp_path, name, scorer):
    """Without a library; here on questions without pictures, which the tiny model cannot see."""
    values = {"data.dir": inputs / name, "parts.llm.model": inputs / "llm"}
    values |= {**of_engine(ENGINE), "options.max_new_tokens": 4}
    config = f"{name}/tables.py:llava15_7b"
    assert scorer in done(*flags_with("run", config, tmp_path / "run", values))["scores"]
    for trace in rows_of(tmp_path / "run" / "trace.jsonl"):
        assert trace["prompts"][0].endswith("from the given choices directly.")


def test_seed_bench_without_videos(inputs, tmp_path):
    ended = run(inputs, "seedbench", "smollm2_k3", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert (ended.value["questions"], set(ended.value["scores"])) == (3, {"seed_bench/likelihood"})
    assert (ended.value["prompts"]["failed"], ended.value["prompts"]["too_long"]) == (0, 0)
    letters = {"options.chat": False, "options.pictures": False, "options.max_new_tokens": 4}
    ended = run(inputs, "seedbench", "llava_rmr_letter", tmp_path / "letters", **letters)
    assert set(ended.value["scores"]) == {"seed_bench/letter"}


def test_a_choice_with_its_own_text_counts_as_chosen(inputs):
    """As one without a text: no rule reads `A dog` as the letter A."""
    texts = ("A dog", "The answer is A.", "B")
    question = Question("7", "val", "?", choices=texts, answer_index=0, extra={"pass": 0})
    for index, text in enumerate(texts):
        value = float(index == 0)
        expected = {"mmbench/vanilla": value, "mmbench/vanilla_2026": value}
        for answer in ("", text, f"{'ABC'[index]}. {text}"):
            chosen = [Prediction("7", answer, choice=index)]
            assert score_mmbench([question], chosen).scored[0].scores == expected
    seed = Question(
        "1", "test", "?", choices=texts, answer_index=0, category="c",
        extra={"question_type_id": 1, "data_type": "image"},
    )  # fmt: skip
    failed = dataclasses.replace(seed, id="2")  # by the model: neither choice nor text
    given = [Prediction("1", "A. A dog", choice=0), Prediction("2")]
    (scores,) = score_seed_bench([seed, failed], given).scored
    assert scores.scores == {"seed_bench/likelihood": 0.5}
    problems = open_corpus(inputs / "scienceqa").questions("test")
    given = [Prediction(q.id, q.choices[0], choice=0) for q in problems]
    values = score_scienceqa(problems, given).scored[0].scores
    assert len(set(values.values())) == 1


def test_choice_accuracy_by_hand():
    questions = [
        Question(f"q{n}", "test", "?", choices=("a", "b", "c", "d")[: n + 2], answer_index=n % 2)
        for n in range(3)
    ]
    hidden = Question("q3", "test", "?", choices=("a", "b"))
    given = [Prediction("q0", choice=0), Prediction("q1", choice=0), Prediction("q3", choice=1)]
    scores = score_choices([*questions, hidden], given)
    assert scores.scores == {"choice_accuracy/recorded_choice": pytest.approx(1 / 3)}
    assert (scores.n, scores.missing, scores.unscored, scores.by_category) == (3, 1, 1, {})
    assert chance([*questions, hidden]) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    with pytest.raises(UserError, match="a known choice"):
        score_choices([hidden], [Prediction("q3", choice=0)])
    evaluation = score_predictions("corpus", questions, given[:2])
    assert [*evaluation.summary()["scores"]] == ["choice_accuracy/recorded_choice"]
