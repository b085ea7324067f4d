"""configs/webqa as the authors ran it: what training and inference show VLP of which sources.

Against the restatement in baseline_packing.py, through the real reader, reranker and recipe; only
the model and the detector's features are replaced.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import baseline_packing as baseline
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shared_data import GOLDEN

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.packing import Example, Packer, SourceTokens, clean
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.evaluation.webqa import read_output_tsv, read_prediction_json
from mmqa_jax.inference import reader as reader_module
from mmqa_jax.inference import reranker as reranker_module
from mmqa_jax.inference.batches import vlp_inputs
from mmqa_jax.inference.reranker import CachedReranker
from mmqa_jax.tasks.registry import check_config, read_task
from mmqa_jax.tasks.vlp import VLPTask
from tests.refusals import refuses

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs" / "webqa"
TOKENIZER = minilm_tokenizer()
FIELDS = ("input_ids", "token_type_ids", "position_ids")


def read(name, mode="", **changes):
    config = load_config(f"{CONFIGS / name}.py" + (f":{mode}" if mode else ""), changes)
    config.init, config.batches.threads = "scratch", 0
    return config


def encode(text):
    return TOKENIZER.encode(clean(text))


class Regions:
    """A hundred regions a picture, each of which tells the picture's row."""

    slots, dim, position_dim = 100, 1, 1

    def __init__(self, corpus):
        self.corpus = corpus

    def __call__(self, source):
        if self.corpus.sources[source.row].modality != "image":
            return None
        return (np.full((100, 1), source.row, np.float32), np.zeros((100, 1), np.float32))


def small(monkeypatch):
    def packer(task, tokenizer, inference=False):
        packing = task.packing_config(inference=inference)
        return Packer(tokenizer, dataclasses.replace(packing, region_dim=1, position_dim=1))

    def source_reader(task, corpus, tokenizer, on_demand=False):
        return SourceReader(corpus, tokenizer, None, Regions(corpus))

    monkeypatch.setattr(VLPTask, "packer", packer)
    monkeypatch.setattr(VLPTask, "source_reader", source_reader)


def seen_in_decoding(monkeypatch, config, corpus, questions, cited):
    """What VLP is given for each question, by the names of VLPInputs."""
    given = []

    def beam_search(graphdef, state, inputs, **options):
        given.append(jax.device_get(dataclasses.asdict(inputs)))
        count = len(inputs.input_ids)
        return SimpleNamespace(tokens=jnp.zeros((count, 1, 1), int), scores=jnp.zeros((count, 1)))

    small(monkeypatch)
    monkeypatch.setattr(reader_module, "beam_search", beam_search)
    reader = reader_module.Reader(read_task(config), corpus, TOKENIZER, nnx.Module())
    seen = [None] * len(questions)
    for batch in reader.answer_batches(questions, cited):
        for row, (i, _) in enumerate(batch):
            seen[i] = {k: v[row] for k, v in given[-1].items() if v is not None}
    return seen


def columns(packed):
    """(id, segment, position) of the columns that everyone sees, and the regions' pictures."""
    seen = packed["context_mask"]
    shown = packed["region_features"][:, 0][seen[1 : 1 + len(packed["region_features"])]]
    return [packed[field][seen].tolist() for field in FIELDS], shown.tolist()


def wanted_columns(wanted, pictures):
    ids, segments, positions, mask = wanted
    seen = mask[0, : len(ids)].astype(bool)
    values = [array[: len(ids)][seen].tolist() for array in (ids, segments, positions)]
    return values, [float(row) for row in pictures for _ in range(100)]


def rows_of(corpus, names, modality):
    rows = [corpus.row[name] for name in names]
    return [row for row in rows if corpus.sources[row].modality == modality]


def baseline_decoding(corpus, question, cited, *, content=True):
    """What the baseline's decoder shows for predicted sources: columns and pictures."""
    context = "txt" if question.category == "text" else "img"
    pictures, snippets = (rows_of(corpus, cited, m) for m in ("image", "text"))
    read = baseline.read_in_decoding(context, pictures, snippets)
    texts = [encode(corpus.sources[row].text) for row in read]
    count = len(read) if context == "img" else None
    wanted = baseline.decoding(texts, count, encode(question.question), content=content)
    return wanted_columns(wanted, read if context == "img" else ()), int(wanted[2][472])


PICTURES = [Source(f"3000000{n}", "image", f"caption of view {n}", image="x") for n in range(4)]
FACTS = [Source(f"s{n}", "text", f"fact number {n} of the town") for n in range(4)]
CORPUS = Corpus([*PICTURES, *FACTS])
P, S = [s.id for s in PICTURES], [s.id for s in FACTS]


def question(n, category, positives=()):
    return Question(
        f"q{n}", "train", f'"what of {n} in the year?"', None,
        (f"first {n}", f"another wording {n}", f"third {n}"), "", category,
        tuple(positives),
    )  # fmt: skip


# Decoding


@pytest.mark.parametrize("category", ["color", "YesNo", "text"])
@pytest.mark.parametrize(
    "cited",
    [(), (P[1],), (P[1], P[0]), (P[3], P[0], P[2]), (S[2],), (S[2], P[0]), (P[0], S[0], P[1], S[1])],
)  # fmt: skip
def test_predicted_sources_are_read_as_in_the_baseline(monkeypatch, category, cited):
    asked = question(0, category)
    ranking = Ranking(asked.id, tuple(cited), (1.0,) * len(cited))
    (seen,) = seen_in_decoding(monkeypatch, read("vlp_qa"), CORPUS, [asked], [ranking])
    wanted, first = baseline_decoding(CORPUS, asked, cited)
    assert columns(seen) == wanted
    assert seen["position_ids"][seen["context_mask"]].max() + 1 == first
    assert seen["position_ids"].max() < 512


@pytest.mark.parametrize("category", ["number", "text"])
def test_question_only_is_read_as_in_the_baseline(monkeypatch, category):
    """--no_img_meta --no_img_content --no_txt_fact: positions from 201, [CLS] closed too."""
    asked = question(0, category)
    config = read("vlp_qa", "q_only")
    (seen,) = seen_in_decoding(monkeypatch, config, CORPUS, [asked], [Ranking("q0", (), ())])
    content = category == "text"
    wanted, _ = baseline_decoding(CORPUS, asked, (), content=content)
    assert columns(seen) == wanted
    assert seen["context_mask"][0] == content
    assert wanted[0][2][0] == (0 if content else 201)


def test_captions_alone_are_read_as_in_the_baseline(monkeypatch):
    """--no_img_content with captions: no region is seen, nor [CLS]."""
    config = read("vlp_qa", **{"packing.picture_content": False})
    asked, cited = question(0, "shape"), (P[2], P[1])
    seen = seen_in_decoding(monkeypatch, config, CORPUS, [asked], [Ranking("q0", cited, (1, 1))])
    texts = [encode(PICTURES[n].text) for n in (2, 1)]
    wanted = baseline.decoding(texts, 2, encode(asked.question), content=False)
    assert columns(seen[0]) == wanted_columns(wanted, ())


def test_questions_of_no_category_are_read_with_all_their_sources(monkeypatch):
    asked, cited = question(0, ""), (P[2], S[1])
    for config in (read("vlp_qa"), read("vlp_qa", **{"data.route_by_category": False})):
        (seen,) = seen_in_decoding(monkeypatch, config, CORPUS, [asked], [Ranking("q", cited, (1, 1))])  # fmt: skip
        text = [*encode(PICTURES[2].text), *encode(FACTS[1].text)]
        assert columns(seen)[0][0][101 : 101 + len(text)] == text
        assert columns(seen)[1] == [2.0] * 100


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"{GOLDEN} is absent (set MMQA_SHARED_DATA)")
def test_the_official_predicted_sources_are_read_as_in_the_baseline(monkeypatch):
    """Every twelfth of 4,966 validation questions of VLP X101-FPN; where reading both modalities
    differs."""
    questions = [
        dataclasses.replace(q, answers=())
        for kind in ("img", "txt")
        for q in read_output_tsv(
            GOLDEN / f"{kind}_queries_VLP_x101fpn_combinedTraining_val_beam5_{kind}"
            "_step11_cleaned.tsv"
        ).questions
    ]
    assert len(questions) == 2_511 + 2_455
    questions = questions[::12]
    predicted = {
        p.question_id: p.sources
        for p in read_prediction_json(GOLDEN / "VLP_x101_combinedTraining_val_end2end_predictions.json")
    }  # fmt: skip
    names = sorted({name for sources in predicted.values() for name in sources})
    sources = [Source(n, "image" if n.isdecimal() else "text", f"about {n[-9:]}") for n in names]
    corpus = Corpus(sources)
    cited = [Ranking(q.id, predicted[q.id], (1.0,) * len(predicted[q.id])) for q in questions]
    changes = {"inference.packing.buckets": ((0, 472), (1, 272), (2, 272))}
    routed, mixed = (
        seen_in_decoding(
            monkeypatch, read("vlp_qa", **changes, **more), corpus, questions, cited
        )
        for more in ({}, {"data.route_by_category": False})
    )  # fmt: skip
    differing = {"text": 0, "picture": 0}
    for asked, seen, other in zip(questions, routed, mixed, strict=True):
        if len(encode(asked.question)) <= 70:  # all but two: the others are truncated
            assert columns(seen) == baseline_decoding(corpus, asked, predicted[asked.id])[0]
        kind = "text" if asked.category == "text" else "picture"
        differing[kind] += columns(seen) != columns(other)
    assert differing == {"picture": 30, "text": 5}  # 328 and 30 of all


# Training


def examples_of(monkeypatch, config, questions, epochs=1):
    """(question, packed) of every question, with the masked words put back."""
    small(monkeypatch)
    config.batches.batch_size = config.train.accumulate = 1
    corpus = Corpus(CORPUS.sources, questions)
    recipe = read_task(config).recipe(corpus, TOKENIZER)
    for _ in range(epochs * len(questions)):
        batch = next(recipe.batches)
        packed = {k: v[0] for k, v in dataclasses.asdict(batch["inputs"]).items() if v is not None}
        count = int((batch["masked_weights"][0] > 0).sum())
        places = batch["masked_positions"][0, :count]
        packed["input_ids"][places] = batch["masked_ids"][0, :count]
        yield questions[batch["index"][0]], packed, count


def baseline_training(asked, *, q_only=False):
    context = "txt" if asked.category == "text" else "img"
    pictures, facts = (rows_of(CORPUS, asked.positives, m) for m in ("image", "text"))
    read = [] if q_only else baseline.read_in_decoding(context, pictures, facts)
    return read if context == "img" else (), baseline.training(
        [encode(CORPUS.sources[row].text) for row in read],
        len(read) if context == "img" else None,
        encode(asked.question),
        encode(asked.answers[0]),
        content=not q_only,
    )


TRAINED = [
    question(0, "color", (P[0],)),
    question(1, "YesNo", (P[3], P[1])),
    question(2, "number", (P[2], P[0], P[1])),  # the third one is cut with its caption
    question(3, "Others", (S[0], P[1], S[1])),  # snippets are no context of a picture question
    question(4, "text", (S[1], S[0], S[3])),
    question(5, "text", (P[2], S[2])),
]


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("", {}), ("vinvl", {}), ("q_only", {}), ("q_only", {"packing.buckets": ((0, 512),)})],
)
def test_training_shows_what_the_baseline_shows(monkeypatch, mode, changes):
    config, shown = read("vlp_qa", mode, **changes), set()
    for asked, packed, count in examples_of(monkeypatch, config, TRAINED, epochs=3):
        shown.add(asked.id)
        pictures, wanted = baseline_training(asked, q_only=mode == "q_only")
        ids, segments, positions, mask = wanted
        assert columns(packed) == wanted_columns(wanted, () if mode == "q_only" else pictures)
        assert packed["position_ids"].max() < 512  # of padding too
        answer = (np.diag(mask) > mask[0]).nonzero()[0]  # seen by themselves, not by [CLS]
        ours = packed["answer_mask"]
        for field, values in zip(FIELDS, (ids, segments, positions), strict=True):
            assert packed[field][ours].tolist() == values[answer].tolist(), asked.id
        # Half of the answer and its [SEP], for picture questions three at least.
        assert len(answer) == 3
        half = round(len(answer) / 2)
        assert count == (half if asked.category == "text" else max(3, half))
    assert shown == {asked.id for asked in TRAINED}


def test_wordings_and_routing_are_options(monkeypatch):
    changes = {"batches.wording": "random", "data.route_by_category": False}
    wordings, contexts = set(), set()
    for asked, packed, _ in examples_of(monkeypatch, read("vlp_qa", **changes), TRAINED, 12):
        if asked.id == "q3":
            wordings.add(TOKENIZER.decode(packed["input_ids"][packed["answer_mask"]].tolist()))
            contexts.add("fact" in TOKENIZER.decode(columns(packed)[0][0]))
    assert len(wordings) == 3
    assert contexts == {True}


# Truncation


LONG_QUESTION = " ".join(str(n % 10) for n in range(90))


def kept_text(packed, segment, drop=1):
    seen = packed["context_mask"] & (packed["token_type_ids"] == segment)
    return packed["input_ids"][seen].tolist()[drop : -drop or None]


def long_questions(count):
    return [Question(f"long{n}", "val", LONG_QUESTION, category="text") for n in range(count)]


def test_decoding_draws_coins_by_question(monkeypatch):
    """l.49 with always_truncate_tail off: 450 source tokens to 400, 90 of the question to 70."""
    questions = long_questions(40)
    numbered = Corpus([Source("s", "text", " ".join(str(n % 10) for n in range(450)))])
    cited = [Ranking(q.id, ("s",), (1.0,)) for q in questions]
    source, asked = encode(numbered.sources[0].text), encode(LONG_QUESTION)
    assert (len(source), len(asked)) == (450, 90)
    config = read("vlp_qa")
    seen = seen_in_decoding(monkeypatch, config, numbered, questions, cited)
    for packed in seen:
        text, tail = kept_text(packed, 4), kept_text(packed, 5, drop=0)
        assert (len(text), len(tail)) == (400, 70)
        assert any(source[start:][:400] == text for start in range(51))
        assert any(asked[start:][:70] == tail for start in range(21))
    # As the baseline's coins: starts of 20 fair coins, told apart modulo ten.
    rng = np.random.default_rng(0)
    starts = [baseline.truncated_by_coins(range(90), 70, rng)[0] for _ in range(4000)]
    ours = [asked.index(kept_text(packed, 5, drop=0)[0]) for packed in seen]
    theirs = np.bincount(np.array(starts) % 10, minlength=10) / 4000
    found = np.bincount(ours, minlength=10) / len(ours)
    assert np.abs(found - theirs).max() < 0.2
    assert len(set(ours)) > 4

    # The same in other batches, another order, and without some of the questions.
    config.inference.batch_size = 3
    order = [31, 4, 17, 8, 30]
    again = seen_in_decoding(
        monkeypatch, config, numbered, [questions[i] for i in order], [cited[i] for i in order]
    )
    for i, packed in zip(order, again, strict=True):
        assert columns(packed) == columns(seen[i])

    config.inference.always_truncate_tail = True
    for packed in seen_in_decoding(monkeypatch, config, numbered, questions[:5], cited[:5]):
        assert kept_text(packed, 4) == source[:400]
        assert kept_text(packed, 5, drop=0) == asked[:70]


class Blank(nnx.Module):
    def source_logits(self, inputs):
        return jnp.zeros((len(inputs.input_ids), 2))


def seen_in_selection(monkeypatch, config, corpus, questions, candidates):
    """What VLP is given for each pair of question and candidate."""
    given = []

    def capture(batch, placement):
        given.append({k: v for k, v in batch.items() if k != "weights"})
        return vlp_inputs(batch, placement)

    small(monkeypatch)
    monkeypatch.setattr(reranker_module, "vlp_inputs", capture)
    reranker = reranker_module.Reranker(read_task(config), corpus, TOKENIZER, Blank())
    seen = {}
    for batch in reranker.score_batches(questions, candidates):
        for row, i in enumerate(batch.indices):
            seen[int(i)] = {k: v[row] for k, v in given[-1].items()}
    return seen


def test_selection_draws_coins_by_question_and_source(monkeypatch):
    corpus = Corpus(
        [Source(f"s{n}", "text", " ".join(str(k % 10) for k in range(450))) for n in range(12)]
    )
    questions = [dataclasses.replace(q, question="what?") for q in long_questions(2)]
    names = tuple(f"s{n}" for n in range(12))
    candidates = [Ranking(q.id, names, (0.0,) * 12) for q in questions]
    config = read("vlp_select")
    config.inference.batch_size = 8
    seen = seen_in_selection(monkeypatch, config, corpus, questions, candidates)
    text = encode(corpus.sources[0].text)
    starts = {}
    for i, packed in seen.items():
        kept = kept_text(packed, 4)
        starts[divmod(i, 12)] = text.index(kept[0])
        assert any(text[start:][:400] == kept for start in range(51))
    assert len(starts) == 24
    for n in range(2):  # every source has coins of its own, for every question others
        assert len({starts[n, k] for k in range(12)}) > 3
    assert [starts[0, k] for k in range(12)] != [starts[1, k] for k in range(12)]
    config.inference.batch_size = 5
    few = [dataclasses.replace(candidates[1], sources=(names[7], names[2]), scores=(0.0, 0.0))]
    again = seen_in_selection(monkeypatch, config, corpus, questions[1:], few)
    for place, k in enumerate((7, 2)):
        assert columns(again[place]) == columns(seen[12 + k])
    config.inference.always_truncate_tail = True
    for packed in seen_in_selection(monkeypatch, config, corpus, questions, candidates).values():
        assert kept_text(packed, 4) == text[:400]


def test_sources_that_are_encoded_once_draw_coins_too():
    """CachedReranker: by the source's id, since a source is read without its question."""
    packing = read_task(read("vlp_select", "cached")).packing_config()
    reranker = CachedReranker.__new__(CachedReranker)  # without a model
    reranker._packer = Packer(TOKENIZER, packing)
    example = Example((SourceTokens(range(2000, 2450)),), [])
    bucket = packing.bucket_index(0, 450, 2)
    reranker._always_truncate_tail = False
    starts = [
        [int(reranker._pack(example, bucket, f"s{n}")["input_ids"][1]) for n in range(20)]
        for _ in range(2)
    ]
    assert starts[0] == starts[1]
    assert len(set(starts[0])) > 5
    reranker._always_truncate_tail = True
    assert reranker._pack(example, bucket, "s0")["input_ids"][1] == 2000


# Settings


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vlp_qa", {"packing.picture_positions": 199}, r"picture_positions=199: .* 200 region slots"),
        ("vlp_qa", {"packing.picture_positions": 300}, r"longest sequence has 612 positions"),
        ("vlp_qa", {"batches.wording": "fist"}, r"batches\.wording='fist'.*'first'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(name, change, message):
    with pytest.raises(UserError, match=message):
        check_config(read(name, **change))


def test_only_webqas_configs_read_as_the_authors_did():
    """Atlas reads sources of both modalities and lays its pictures on white."""
    clip = read("vlp_qa", "clip_patches")
    assert read_task(clip).pictures.open(CORPUS).alpha == "dropped"
    assert read_task(read("contrastive")).pictures.open(CORPUS).alpha == "dropped"
    for name in ("answer", "rerank", "contrastive"):
        config = load_config(CONFIGS.parent / "atlas" / f"{name}.py")
        assert read_task(config).pictures.open(CORPUS).alpha == "white"
        keys = {"route_by_category", "always_truncate_tail", "wording"}
        assert not keys & {*config.data, *config.inference, *config.batches}


def test_selection_is_not_routed():
    config = read("vlp_select")
    config.data.route_by_category = True
    refuses(r"data\.route_by_category: unknown", check_config, config)
