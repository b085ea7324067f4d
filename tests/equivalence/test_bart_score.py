"""BARTScore and WebQA's fluency against the published code on a tiny random BART of transformers."""

import json
import string
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from compare import randomize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mmqa_jax.cli import main
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation import fluency
from mmqa_jax.evaluation.webqa import COLUMNS, read_output_tsv
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

POSITIONS = 40
BUCKETS = (8, 16, 24)
TEXTS = [
    "Yes",
    "",
    "No the Lima River flows west",
    "Both flow east  and   neither flows to the west",
    "São Tomé's flag — 🚩 has 2 stars",
    "Is it? It's the southernmost range of Peninsular Ranges System",
    " ".join(["San Pedro is a small town in a mountain range"] * 9),  # longer than the positions
    "Isomerization energy is lowered to increase reaction rates from isomerases",
    "east",
]


class Published(NamedTuple):
    """The tiny checkpoint, and the published code over it."""

    folder: str
    model: transformers.BartForConditionalGeneration
    tokenizer: transformers.BartTokenizer

    def score(self, srcs, tgts, batch_size=4):
        """neulab/BARTScore bart_score.py, BARTScorer.score."""
        scores = []
        options = {"max_length": POSITIONS, "truncation": True, "padding": True}
        for i in range(0, len(srcs), batch_size):
            with torch.no_grad():
                src = self.tokenizer(srcs[i : i + batch_size], return_tensors="pt", **options)
                tgt = self.tokenizer(tgts[i : i + batch_size], return_tensors="pt", **options)
                labels = tgt["input_ids"]
                logits = self.model(
                    input_ids=src["input_ids"], attention_mask=src["attention_mask"], labels=labels
                ).logits
                loss = torch.nn.functional.nll_loss(
                    logits.view(-1, logits.shape[-1]).log_softmax(dim=1),
                    labels.view(-1),
                    reduction="none",
                    ignore_index=self.model.config.pad_token_id,
                ).view(len(labels), -1)
                scores += (-loss.sum(dim=1) / tgt["attention_mask"].sum(dim=1)).tolist()
        return scores


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet),
    )
    bpe.model.save(str(folder))  # vocab.json and merges.txt
    config = transformers.BartConfig(
        vocab_size=bpe.get_vocab_size(),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=POSITIONS,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = randomize(transformers.BartForConditionalGeneration(config), 0, 0.1)
    model.save_pretrained(folder)
    tokenizer = transformers.BartTokenizer.from_pretrained(folder)
    return Published(folder, model, tokenizer)


@pytest.fixture(scope="module")
def ours(published):
    return fluency.BartScorer(
        load_published("bart", published.folder),
        fluency.load_bart_tokenizer(published.folder),
        buckets=BUCKETS,
        batch_tokens=48,
    )


def test_every_pair_scores_as_the_published_code_does(published, ours):
    pairs = [(source, target) for source in TEXTS for target in TEXTS]
    sources, targets = map(list, zip(*pairs, strict=True))
    steps = []
    found = ours.score(sources, targets, lambda done, total: steps.append((done, total)))
    wanted = np.array(published.score(sources, targets))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert np.ptp(wanted) > 0.5  # they differ, so that the order matters
    assert steps[-1] == (len(pairs), len(pairs))
    # One program a bucket, and none for other texts in other numbers.
    assert ours.buckets == (*BUCKETS, POSITIONS)
    assert ours._means._cache_size() == len(ours.buckets)
    ours.score(sources[5:70], targets[5:70])
    ours.score(["a new text"], ["that was not there"])
    assert ours._means._cache_size() == len(ours.buckets)
    refuses("2 sources and 1 targets", ours.score, ["a", "b"], ["a"], error=ValueError)


def test_fluency_as_the_official_script_computes_it(published, ours):
    table = str.maketrans(dict.fromkeys(string.punctuation))

    def bart(c, a):  # WebQA_Baseline vlp/eval_1022.py, compute_bartscore_ParaBank
        plain = [[" ".join(x.translate(table).split()) for x in texts] for texts in (a, c)]
        return np.exp(published.score(*plain))

    cases = [  # answer, references
        ("Yes , both flow east .", ("No, the Lima River flows west.", "No.", "They don't.")),
        ("?!", ("Isomerization energy is lowered.",)),
        ("No the Lima River flows west", ("No, the Lima River flows west.",)),
    ]
    questions = [Question(str(n), "val", "?", answers=a) for n, (_, a) in enumerate(cases)]
    predictions = [Prediction(str(n), c) for n, (c, _) in enumerate(cases)]
    scores = fluency.score_fluency(questions, predictions, ours)
    wanted = [
        min(1, np.max(bart([c] * len(a), list(a)) / np.array(bart(list(a), list(a)))))
        for c, a in cases
    ]
    np.testing.assert_allclose(scores.per_question["webqa_fl/official"], wanted, atol=1e-4)
    assert wanted[2] == pytest.approx(1)  # it differs from its reference in punctuation alone


def test_parabank_weights_take_the_place_of_the_folders_own(published, tmp_path):
    for name in ("config.json", "vocab.json", "merges.txt", "model.safetensors"):
        (tmp_path / name).write_bytes((published.folder / name).read_bytes())
    pair = [TEXTS[2]], [TEXTS[3]]
    own, path, weights = fluency.load_bart_scorer(tmp_path, buckets=(16,))
    assert (path, weights) == (tmp_path, "bart-large-cnn")
    assert own.score(*pair) == pytest.approx(published.score(*pair), abs=1e-4)
    other = randomize(
        transformers.BartForConditionalGeneration.from_pretrained(published.folder), 1, 0.1
    )
    torch.save(other.state_dict(), tmp_path / "bart.pth")
    finetuned, path, weights = fluency.load_bart_scorer(tmp_path, buckets=(16,))
    assert (path, weights) == (tmp_path / "bart.pth", "official")
    wanted = published._replace(model=other).score(*pair)
    assert finetuned.score(*pair) == pytest.approx(wanted, abs=1e-4)
    assert abs(wanted[0] - published.score(*pair)[0]) > 1e-2


def test_a_bart_pth_of_another_model_is_one_sentence(published, tmp_path, capsys):
    folder = tmp_path / "bart"
    folder.mkdir()
    for name in ("config.json", "vocab.json", "merges.txt", "model.safetensors"):
        (folder / name).write_bytes((published.folder / name).read_bytes())
    path = tmp_path / "out.tsv"
    path.write_text("\t".join(COLUMNS) + '\ng\ttext\t?\t["x"]\tx\t[0]\t["x"]\n')
    weights = published.model.state_dict()
    wrong = {
        "shapes": {**weights, "model.shared.weight": weights["model.shared.weight"][:, :8]},
        "keys": {"bert.embeddings.word_embeddings.weight": torch.zeros(4, 4)},
        "kind": [1, 2],
    }
    for content in wrong.values():
        torch.save(content, folder / "bart.pth")
        flags = [f"--predictions={path}", f"--bart={folder}", "--lemmatizer=none", "--json"]
        assert main(["evaluate", "webqa", *flags]) == 2
        said = capsys.readouterr()
        assert not said.out
        (sentence,) = said.err.strip().splitlines()
        assert f"{folder / 'bart.pth'}: is not BARTScore's ParaBank2 weights" in sentence
        assert sentence.endswith("or remove it to score with the folder's own weights.")
        assert len(sentence) < 600


def test_fluency_from_the_command_line(published, ours, tmp_path, capsys):
    answers = ["Yes , both flow east .", "Isomerases ."]
    references = ["No, the Lima River flows west.", "Isomerization energy is lowered."]
    lines = ["\t".join(COLUMNS)]
    for n, (said, wanted) in enumerate(zip(answers, references, strict=True)):
        values = (f"g{n}", "text", "?", json.dumps([wanted]), "east", "[0]", json.dumps([said]))
        lines.append("\t".join(values))
    path = tmp_path / "out.tsv"
    path.write_text("\n".join(lines) + "\n")
    flags = [f"--predictions={path}", f"--bart={published.folder}", "--lemmatizer=none", "--json"]
    assert main(["evaluate", "webqa", *flags]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    wanted = fluency.score_fluency(*read_output_tsv(path), ours)
    own = wanted.per_question["webqa_fl/official"]
    assert result["scores"] == pytest.approx(
        {
            "webqa_acc/no_lemma": 0.5,
            "exact_match/no_lemma": 0.5,
            # Not the official weights, so not the official names.
            "webqa_fl/bart-large-cnn": own.mean(),
            "webqa_fl/paper_eq1_bart-large-cnn": wanted.scores["webqa_fl/paper_eq1"],
            "webqa_fl_acc/bart-large-cnn_no_lemma": own[0] / 2,
        },
        abs=1e-5,
    )
    assert result["bart"] == str(published.folder)
    assert "holds no bart.pth, so fluency is scored with the folder's own weights" in said.err
    assert "named webqa_fl/bart-large-cnn" in said.err
    # The same weights as bart.pth carry the official names.
    with_parabank = tmp_path / "with_parabank"
    with_parabank.mkdir()
    for name in ("config.json", "vocab.json", "merges.txt"):
        (with_parabank / name).write_bytes((published.folder / name).read_bytes())
    torch.save(published.model.state_dict(), with_parabank / "bart.pth")
    flags[1] = f"--bart={with_parabank}"
    assert main(["evaluate", "webqa", *flags]) == 0
    official = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert official["scores"] == pytest.approx(
        {
            "webqa_acc/no_lemma": 0.5,
            "exact_match/no_lemma": 0.5,
            "webqa_fl/official": own.mean(),
            "webqa_fl/paper_eq1": wanted.scores["webqa_fl/paper_eq1"],
            "webqa_fl_acc/no_lemma": own[0] / 2,
        },
        abs=1e-5,
    )


def test_both_files_of_a_tokenizer_say_the_same(published, tmp_path):
    split = fluency.load_bart_tokenizer(published.folder)
    split.save(str(tmp_path / "tokenizer.json"))
    whole = fluency.load_bart_tokenizer(tmp_path)
    for text in TEXTS:
        wanted = published.tokenizer(text)["input_ids"]
        assert split.encode(text).ids == wanted
        assert whole.encode(text).ids == wanted


def test_folders_without_a_usable_bart_are_refused(published, tmp_path):
    with pytest.raises(UserError, match=r"--bart=.*nowhere: no such folder; give .*bart-large-cnn"):
        fluency.load_bart_scorer(tmp_path / "nowhere")
    refuses(r"holds neither tokenizer\.json nor vocab\.json", fluency.load_bart_scorer, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    refuses(r"tokenizer\.json: not a tokenizer .*as it was", fluency.load_bart_scorer, tmp_path)
    bare = Tokenizer(models.BPE())
    bare.save(str(tmp_path / "tokenizer.json"))
    refuses(r"does not wrap texts in <s> and </s>; use BART's", fluency.load_bart_scorer, tmp_path)
    tokenizer = fluency.load_bart_tokenizer(published.folder)
    tokenizer.add_tokens(["one", "too", "many"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    refuses(r"config\.json: no such file", fluency.load_bart_scorer, tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((published.folder / name).read_bytes())
    words = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    message = rf"tokenizer has {words + 3} tokens, its model {words}; give the tokenizer and"
    refuses(message, fluency.load_bart_scorer, tmp_path)
