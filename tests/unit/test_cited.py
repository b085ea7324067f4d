"""`mmqa prepare cited`: conversations whose prompts are the reader's and whose answers cite gold sources."""

import json

import pytest
from cli_runs import done, flags_with, png, rows_of
from fake_llm import FakeLLM
from tiny_llm import write_llava, write_onevision

from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Ranking
from mmqa_jax.prompting.citations import read_citations
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.retrieval.rankings import write_rankings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]
TEXTS = {"a": "Lima is the capital.", "b": "Nairobi is a city.", "c": "Oslo is cold.", "d": "Rome."}


def question(name: str, **more) -> dict:
    asked = {"id": name, "split": "train", "question": f"What of {name}?", "answers": ["It is so."]}
    return {**asked, "positives": ["a"], "negatives": ["b", "c", "flag"], **more}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A prepared corpus of four texts and a picture."""
    folder = tmp_path_factory.mktemp("cited")
    (folder / "flag.png").write_bytes(png((200, 30, 40)))
    sources = [{"id": name, "modality": "text", "text": text} for name, text in TEXTS.items()]
    sources.append({"id": "flag", "modality": "image", "text": "A red flag", "image": "flag.png"})
    questions = [
        question("both", positives=["a", "flag"], negatives=["b"]),
        question("many"),
        question("unknown", answers=[]),
        question("lost", positives=[]),
    ]
    for name, rows in (("sources", sources), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done("prepare", "corpus", f"--raw={folder}", f"--out={folder / 'corpus'}")
    return folder / "corpus"


def conversations(raw, out, *flags):
    done("prepare", "cited", f"--raw={raw}", f"--out={out}", *flags)
    corpus = open_corpus(out)
    return corpus, {row.id: row.extra["messages"] for row in corpus.questions()}


def test_the_prompt_is_the_readers_and_the_answer_cites_gold_sources(raw, tmp_path):
    corpus, rows = conversations(raw, tmp_path / "out")
    assert corpus.manifest["origin"]["left_out"] == {"no answer": 1, "no gold source": 1}
    assert list(rows) == ["both", "many"]
    asked, said = (message["content"] for message in rows["both"])
    shown = sorted(("a", "flag", "b"), key=lambda name: asked.index(text_of(name)))
    llm = FakeLLM(lambda prompt: ("", 0.0))
    question = next(q for q in open_corpus(raw).questions() if q.id == "both")
    ranking = Ranking("both", tuple(shown), (0.0,) * 3)
    options = LLMReaderOptions(pictures="captions")
    LLMReader(open_corpus(raw), llm, options).answer([question], [ranking])
    assert asked == llm.seen[0].messages[0].text
    citations = read_citations(said, 3)
    assert citations.text == "It is so."
    assert {shown[number - 1] for number in citations.numbers} == {"a", "flag"}


def text_of(name: str) -> str:
    return TEXTS.get(name, "A red flag")


def test_what_was_found_comes_in_its_order(raw, tmp_path):
    """A gold source that was not found takes the last place; a question without a ranking is left out."""
    found = tmp_path / "found.jsonl"
    write_rankings(found, [Ranking("many", ("d", "c", "b"), (3.0, 2.0, 1.0))])
    corpus, rows = conversations(raw, tmp_path / "out", f"--rankings={found}", "--top_k=3")
    assert corpus.manifest["origin"]["left_out"]["no ranking"] == 1
    asked, said = (message["content"] for message in rows["many"])
    places = [asked.index(f"[{n}] {text_of(name)}") for n, name in enumerate("dca", 1)]
    assert places == sorted(places)
    assert said == "It is so [3]."


def test_pictures_are_parts_of_the_message(raw, tmp_path):
    corpus, rows = conversations(raw, tmp_path / "out", "--pictures=pixels")
    parts = rows["both"][0]["content"]
    (picture,) = [part["image"] for part in parts if part["type"] == "image"]
    assert corpus.read_picture(picture) == open_corpus(raw).read_picture("flag.png")
    before = parts[parts.index({"type": "image", "image": picture}) - 1]["text"]
    assert before.rstrip().endswith("A red flag")


@pytest.mark.parametrize("write", [write_llava, write_onevision])
def test_llavas_learn_to_cite_sources_that_they_see(write, raw, tmp_path):
    """From the corpus to a run whose weights `mmqa prompt` opens; letters are tokens here."""
    done("prepare", "cited", f"--raw={raw}", f"--out={tmp_path / 'cited'}", "--pictures=pixels")
    values = {
        "data.dir": tmp_path / "cited", "init": write(tmp_path / "model", 2048),
        "model.tower": "trained", "pictures.most": 1,
        "batches.length": 1600, "batches.targets": 64, "batches.batch_size": 2,
        "batches.threads": 0, "inference.batch_size": 2, "validate.split": "train",
        "validate.metric": "log_likelihood", "train.steps": 6, "train.checkpoint_every": 3,
        "train.log_every": 1, "train.evaluate_every": 3, "train.optimizer.learning_rate": 0.02,
        "train.optimizer.warmup": 0.0,
    }  # fmt: skip
    done(*flags_with("train", "aokvqa/vlm_finetune.py:llava", tmp_path / "run", values))
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.1
    first, last = [row["eval/log_likelihood"] for row in rows if "eval/log_likelihood" in row]
    assert first < last < 0
    (tmp_path / "flag.png").write_bytes(png((200, 30, 40)))
    message = [{"type": "image", "image": "flag.png"}, {"type": "text", "text": "Which"}]
    asked = {"id": "0", "messages": [{"role": "user", "content": message}]}
    asked |= {"max_new_tokens": 4, "logprobs": True}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(asked))
    flags = (f"--prompts={tmp_path / 'prompts.jsonl'}", f"--out={tmp_path / 'answers.jsonl'}")
    sizes = {"slots": 1, "length": 128, "buckets": "(64,)", "prefill_tokens": 64}
    engine = [f"--config.engine.{key}={value}" for key, value in sizes.items()]
    done("prompt", *flags, f"--model={tmp_path / 'run'}", *engine)
    (answer,) = rows_of(tmp_path / "answers.jsonl")
    assert 0 < len(answer["logprobs"]) <= 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("corpus", "--top_k=3"), r"--rankings, --top_k, --pictures: .* `cited`"),
        (("cited", "--top_k=0"), r"--top_k=0: expected at least 1"),
        (("cited", "--rankings=nowhere.jsonl"), r"nowhere\.jsonl"),
    ],
)
def test_wrong_flags(flags, message, raw, refused, tmp_path):
    refused("prepare", *flags, f"--raw={raw}", f"--out={tmp_path / 'out'}", message=message)
