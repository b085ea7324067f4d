"""The verbs with a T5: prompts, conversion, training, and what it does not take."""

import json

import numpy as np
import pytest
import torch
import transformers
from cli_runs import ROOT, done, rows_of, write_rows
from science import prepare_science
from tiny_llm import flag
from tiny_t5 import write_folder

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.record import read_metadata

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

PROMPTS = ("Which red is the sun of blue?", "Which sea is one?", "stone")
LONGEST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("t5") / "model")


def answers(model, rows, tmp_path, *flags) -> list[dict]:
    prompts, out = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    done(
        "prompt", f"--prompts={prompts}", f"--out={out}", f"--model={model}", "--no_cache",
        f"--config.decoding.max_new_tokens={LONGEST}", "--config.engine.length=128", *flags,
    )  # fmt: skip
    return rows_of(out)


def test_prompts_are_answered_as_by_transformers(folder, tmp_path):
    """Greedy, by beams, by choices, and the draws of a seed; the converted folder alike."""
    rows = [{"id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    rows += [{"id": f"beams{n}", "prompt": prompt, "beams": 3, "n": 2, "length_penalty": 1.0}
             for n, prompt in enumerate(PROMPTS)]  # fmt: skip
    rows += [
        {"id": "choices", "prompt": PROMPTS[0], "choices": ["red", "blue sea"]},
        {"id": "draws", "prompt": PROMPTS[1], "temperature": 20.0, "n": 3, "logprobs": True},
    ]
    done("convert", "--model=t5", f"--source={folder}", f"--out={tmp_path / 'converted'}")
    found = {row["id"]: row for row in answers(folder, rows, tmp_path)}
    converted = answers(tmp_path / "converted", rows[:3], tmp_path)
    assert [row["text"] for row in converted] == [found[n]["text"] for n in range(3)]

    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder)
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    own = open_text_tokenizer(folder)

    def texts(**options) -> list[str]:
        made = theirs.generate(**batch, do_sample=False, max_new_tokens=LONGEST, **options)
        return [own.decode([i for i in ids if i > 1]) for ids in made.tolist()]

    assert [found[n]["text"] for n in range(3)] == texts()
    beams = [one["text"] for n in range(3) for one in found[f"beams{n}"]["candidates"]]
    assert beams == texts(num_beams=3, num_return_sequences=2, length_penalty=1.0)
    for score, choice in zip(found["choices"]["scores"], rows[6]["choices"], strict=True):
        labels = torch.tensor([own.encode_plain(choice)])
        with torch.no_grad():
            loss = theirs(**tokenizer(PROMPTS[0], return_tensors="pt"), labels=labels).loss
        np.testing.assert_allclose(score["mean"], -loss.item(), atol=1e-4)
    drawn = found["draws"]["candidates"]
    assert len({one["text"] for one in drawn}) > 1
    assert all(len(one["logprobs"]) <= LONGEST for one in drawn)


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        (
            {"messages": [{"role": r, "content": "Why?"} for r in ("system", "user")]},
            [],
            "has messages of system, user, but a T5 has no chat template",
        ),
        ({"prompt": " "}, [], "its prompt is empty"),
        ({"prompt": "stone", "choices": ["red", ""]}, [], r"line 1: .*continuation '' has no"),
        ({"prompt": "stone", "images": ["red.png"]}, [], r"line 1: .*a T5 reads text alone; use"),
        ({"prompt": "stone " * 40}, ["--config.engine.length=20"], "engine.length = 20"),
        (
            {"prompt": "stone", "max_new_tokens": 99},
            ["--config.engine.length=20"],
            "up to 99 tokens, expected at most engine.length = 20",
        ),
        ({"prompt": "stone"}, ["--config.engine.weights=int8"], "engine.weights=int8: a T5 is"),
        ({"prompt": "stone", "beams": 2, "temperature": 1.0}, [], "beams"),
    ],
)
def test_what_a_t5_does_not_take_is_refused(refused, folder, tmp_path, row, flags, message):
    prompts = write_rows(tmp_path / "prompts.jsonl", [row])
    (tmp_path / "red.png").write_bytes(flag().data)
    refused(
        "prompt", f"--prompts={prompts}", f"--out={tmp_path / 'answers.jsonl'}",
        f"--model={folder}", "--no_cache", *flags, message=message,
    )  # fmt: skip
    assert not (tmp_path / "answers.jsonl").exists()


def test_sources_are_read_and_cut_to_its_length(folder):
    """LLMReader: the model's text in answer to sources; a long one is cut to what is read."""
    backend = open_backend(folder, engine={"length": 1024})
    corpus = Corpus([Source("a", "text", text="The sea is green. " * 99)])
    reader = LLMReader(corpus, backend, LLMReaderOptions(max_new_tokens=LONGEST, uncited="all"))
    asked = Question("q", "test", "What is green?")
    (prediction,) = reader.answer([asked], [Ranking("q", ("a",), (1.0,))])
    assert prediction.read == ("a",)
    assert prediction.trace["cut_to_words"] < 4 * 99
    (prompt,) = prediction.trace["prompts"]
    (answer,) = backend.answer([Completion(0, prompt, Decoding(max_new_tokens=LONGEST))])
    assert prediction.trace["outputs"][0]["text"] in answer.text


def test_a_t5_is_trained_and_used(folder, tmp_path):
    """From a published one and from scratch; the run answers prompts and is exported."""
    data = prepare_science(tmp_path)
    config = f"--config={ROOT}/configs/scienceqa/t5_finetune.py"
    values = {
        "init": folder, "data.dir": data, "batches.batch_size": 4, "batches.lengths": "(64, 128)",
        "batches.targets": 16, "batches.threads": 0, "train.steps": 12, "train.log_every": 4,
        "train.evaluate_every": 12, "train.checkpoint_every": 12, "validate.questions": 2,
        "inference.batch_size": 4, "train.optimizer.learning_rate": 0.01,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    result = done("train", config, f"--workdir={tmp_path / 'run'}", *flags)
    assert result["best"]["metric"] == "accuracy"
    losses = [row["loss"] for row in rows_of(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    record = read_metadata(tmp_path / "run")
    assert (record["model"], record["task"]) == ("t5", "seq2seq")
    own, base = open_text_tokenizer(tmp_path / "run"), open_text_tokenizer(folder)
    assert own.fingerprint == base.fingerprint
    done(
        "convert", "--model=t5", f"--source={tmp_path / 'run'}", f"--out={tmp_path / 'hf'}",
        "--export=hf",
    )  # fmt: skip
    rows = [{"id": 0, "prompt": PROMPTS[0]}]
    of_run, exported = (
        answers(tmp_path / name, rows, tmp_path)[0]["text"] for name in ("run", "hf")
    )
    assert of_run == exported
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "t5"
