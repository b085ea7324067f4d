"""BEM beside transformers' BertForSequenceClassification, and in `mmqa evaluate evqa`."""

import csv

import numpy as np
import pytest
import torch
import transformers
from tiny_encoders import save_plain

from mmqa_jax.cli import main
from mmqa_jax.core.errors import UserError
from mmqa_jax.evaluation.bem import open_bem
from tests.refusals import refuses

QUESTION = "which flag has a green cedar?"
ASKED = [
    (QUESTION, "kenya", "nairobi"),
    (QUESTION, "the capital of kenya", "a capital, kenya."),
    ("how often is the filter cleaned", "often", ""),
    (QUESTION, "the flag " * 40, "a cedar " * 30),
    (QUESTION, "kenya", "green cedar flag " * 250),  # cut to the model's positions
]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bem")
    save_plain("bert", folder / "bem", classifier=True, num_labels=2)
    save_plain("bert", folder / "reranker", classifier=True, num_labels=1)
    return folder


def wanted(folder, asked) -> np.ndarray:
    """As the model card of kortukov/answer-equivalence-bem reads its model."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for question, reference, answer in asked:
        inputs = tokenizer(
            text=f"[CLS] {answer} [SEP]", text_pair=f"{reference} [SEP] {question} [SEP]",
            add_special_tokens=False, truncation=True, max_length=560, return_tensors="pt",
            return_token_type_ids=True,
        )  # fmt: skip
        with torch.no_grad():
            found.append(model(**inputs).logits.softmax(-1)[0, 1].item())
    return np.array(found)


def test_probabilities_are_those_of_transformers(published):
    bem = open_bem(str(published / "bem"))
    theirs = wanted(published / "bem", ASKED)
    np.testing.assert_allclose(bem.probabilities(ASKED), theirs, atol=1e-5)
    assert np.ptp(theirs) > 1e-3
    assert bem(ASKED) == (theirs >= 0.5).tolist()
    swapped = [(question, answer, reference) for question, reference, answer in ASKED[:2]]
    assert np.abs(bem.probabilities(swapped) - theirs[:2]).max() > 1e-4


def test_other_models_are_refused(published, tmp_path):
    with pytest.raises(UserError, match="2 labels was expected, different and equivalent"):
        open_bem(str(published / "reranker"))
    refuses(r"--bem=.*holds no model of transformers", open_bem, str(tmp_path))


def test_it_judges_what_does_not_match(published, tmp_path, capsys):
    row = {
        "question": QUESTION, "answer": "kenya", "question_type": "automatic",
        "dataset_name": "landmarks", "dataset_image_ids": "abc", "wikipedia_url": "u",
        "wikipedia_title": "t",
    }  # fmt: skip
    with open(tmp_path / "test.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([row, row])
    said = tmp_path / "said.jsonl"
    said.write_text(
        '{"question_id": "test_0_0", "answer": "Kenya."}\n'
        '{"question_id": "test_1_0", "answer": "nairobi"}\n'
    )
    flags = [f"--references={tmp_path}", f"--predictions={said}", "--json"]
    assert main(["evaluate", "evqa", *flags, f"--bem={published / 'bem'}"]) == 0
    (judged,) = open_bem(str(published / "bem"))([(QUESTION, "kenya", "nairobi")])
    out = capsys.readouterr().out.splitlines()[-1]
    assert f'"evqa/bem": {0.5 + judged / 2}' in out
    assert '"evqa/exact_match": 0.5' in out
    assert main(["evaluate", "infoseek", *flags, f"--bem={published / 'bem'}"]) == 2
