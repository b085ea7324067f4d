"""The trained modality classifier: `mmqa train`, `mmqa search` and the row that uses it."""

import pytest
from cli_runs import (
    LANDS,
    TEST,
    done,
    flags_with,
    question,
    quietly,
    rows_of,
    succeeded,
    write_documents,
)
from row_runs import row_flags

from mmqa_jax.tasks.modality import load_question_classifier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TINY = {
    "tokenizer": "corpus:200", "model.changes.hidden": 32, "model.changes.layers": 1,
    "model.changes.heads": 2, "model.changes.mlp": 32, "batches.length": 16,
    "batches.batch_size": 16, "inference.batch_size": 4, "train.steps": 40,
    "train.checkpoint_every": 40,
    "train.optimizer.learning_rate": 3e-3,
}  # fmt: skip


def both_kinds(split: str) -> list[dict]:
    rows = []
    for number, land in enumerate(LANDS):
        rows.append(question(2 * number, split, land))
        rows.append(
            question(
                2 * number + 1, split, land, question=f'"What color has the flag of {land}?"',
                category="color", positives=["p-Arvania"], negatives=["p-Borduria"],
            )
        )  # fmt: skip
    return rows


def flags_of(data, workdir, **changes) -> list[str]:
    values = {**TINY, "data.dir": data, **changes}
    return flags_with("train", "webqa/modality.py:runlocal", workdir, values)


@pytest.fixture(scope="module")
def trained(cli_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modality")
    raw = write_documents(folder / "raw", both_kinds("train") + both_kinds("test"))
    done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
    with quietly(cli_cache):
        result = done(*flags_of(folder / "data", folder / "run"))
    assert result.pop("goodput")["attempts"] == 1
    assert result == {"task": "modality", "steps": 40, "workdir": str(folder / "run")}
    return folder


def test_every_question_is_searched_in_its_modality(trained, tmp_path):
    out = tmp_path / "found.jsonl"
    flags = (f"--data={trained / 'data'}", "--method=bm25", f"--out={out}")
    classified = ("--modality=classified", f"--modality_model={trained / 'run'}")
    ended = succeeded("search", *flags, *classified, "--json")
    assert ended.value["modality_accuracy"] == 1.0
    assert "modality_accuracy: 1.0000" in ended.out
    prefixes = [{name[0] for name in row["sources"]} for row in rows_of(out)]
    assert prefixes == [{"s"}, {"p"}] * len(LANDS)


def test_predictions_do_not_depend_on_batches_or_quotes(trained):
    """Quotes are WebQA's mark of image questions; 5 texts are a batch of 4 and one of 1."""
    classifier = load_question_classifier(trained / "run")
    texts = [row["question"] for row in both_kinds("test")[:5]]
    together = classifier.probabilities(texts)
    assert together.shape == (5, 2)
    for text, row in zip(texts, together, strict=True):
        (alone,) = classifier.probabilities([text.strip('"')])
        assert alone == pytest.approx(row, abs=1e-5)
    assert classifier.predict(texts) == ["text", "image", "text", "image", "text"]
    assert classifier.probabilities([]).shape == (0, 2)


def test_the_row_of_the_classifier(trained, data, models, index, tmp_path):
    """Of a corpus that the classifier has not seen: its accuracy is a score of the row."""
    flags = row_flags("webqa:clip2_classified", tmp_path / "run", data, models, index)
    model = f"--config.parts.retriever.modality_model={trained / 'run'}"
    result = done(*flags, model)
    rankings = rows_of(tmp_path / "run" / "retrieval" / "candidates.jsonl")
    right = [
        {name[0] for name in row["sources"]} == ({"p"} if asked["category"] == "color" else {"s"})
        for row, asked in zip(rankings, TEST, strict=True)
    ]
    assert result["scores"]["modality_accuracy"] == sum(right) / 5
    assert result["n_by_scorer"]["modality_accuracy"] == 5
    assert all(right[:3])  # questions on capitals, as in its training


def test_another_classifier_is_another_retriever(trained, data, models, index, tmp_path, refused):
    """A run resumes with the same classifier only; a missing one is named."""
    flags = row_flags("webqa:clip2_classified", tmp_path / "run", data, models, index)
    message = r"1 of its inputs are missing: nowhere \(no such path"
    refused(*flags, "--config.parts.retriever.modality_model=nowhere", message=message)
    message = "holds a model of task 'answer', modality was expected"
    refused(*flags, f"--config.parts.retriever.modality_model={models / 'answer'}", message=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches.length": 600}, r"batches\.length=600: 3 to 512 tokens were expected"),
        ({"model.pooling": "mean"}, r"model\.pooling is 'mean'"),
        (
            {"model.frozen": True, "train.optimizer.weight_decay": 0.01},
            r"model\.frozen=True: weight decay would change the frozen BERT; set train\.optimizer",
        ),
        ({"data.dir": None}, r"none of the 8 training questions needs image sources"),
    ],
)
def test_wrong_configs(change, message, trained, data, refused, tmp_path):
    if "data.dir" in change:
        change = {"data.dir": data}  # its train questions all need snippets
    places = {"data": trained / "data", "workdir": tmp_path / "run"}
    refused(*flags_of(**places, **change), message=message)


def test_a_classifier_that_nothing_uses(trained, refused, tmp_path):
    flags = (f"--data={trained / 'data'}", "--method=bm25", f"--out={tmp_path / 'out.jsonl'}")
    message = r"--modality_model=runs/x: classifies questions, but --modality=known; set it to"
    refused("search", *flags, "--modality=known", "--modality_model=runs/x", message=message)
