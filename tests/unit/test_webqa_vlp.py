"""VLP's rows on a tiny WebQA release: detectors' features or CLIP's, trained, reranked, answered."""

import base64
import dataclasses
import json
import pickle
import re

import jax
import numpy as np
import pytest
import torch
from cli_runs import ROOT, done, mmqa, narrow_vlp, quietly, rows_of, traced_loss, weights_of
from flax import nnx
from test_regions import detections, write_vinvl, write_x101
from test_webqa_reader import image_fact, png, snippet, write_images
from tiny_checkpoints import CONFIGS as TINY
from tiny_checkpoints import make_source

from mmqa_jax.core.config import load_config
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.batches.packing import RawSource
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.regions import PatchRegions
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.evaluation.webqa import THRESHOLDS
from mmqa_jax.inference.reader import Reader
from mmqa_jax.models.two_towers.network import normalize_pixels
from mmqa_jax.models.vlp.keys import publish_vlp
from mmqa_jax.models.vlp.network import VLPModel
from mmqa_jax.papers import webqa
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.tasks.answer import load_reader
from mmqa_jax.tasks.registry import check_config
from mmqa_jax.tasks.rerank import load_selector
from mmqa_jax.tasks.run import run_training
from mmqa_jax.weights.convert import convert
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.published import write_published
from tests.drawn_weights import drawn
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

PICTURES = range(30_000_000, 30_000_006)
FEATURES_OF = {number: 40_000_000 + number % 100 for number in PICTURES}
NO_FEATURES = NO_FILE, NOT_NUMBERS = 30_000_004, 30_000_005
VISION = dataclasses.asdict(TINY["clip"].vision)  # 16 pixels, patches of 8
# One static shape, few regions: compiling is what costs here.
SMALL = {
    "tokenizer": "corpus:200",
    "model.changes.hidden": 32,
    "model.changes.layers": 1,
    "model.changes.heads": 2,
    "model.changes.mlp": 32,
    "packing.buckets": "((2,64),)",
    "packing.max_question_tokens": 20,
    "packing.max_answer_tokens": 20,
    "packing.max_pair_tokens": 30,
    "batches.batch_size": 8,  # in parts of 4
    "batches.threads": 0,
    "train.steps": 4,
}
SMALL_QA = {
    "inference.packing.buckets": "((2,64),)",
    "inference.packing.max_question_tokens": 20,
    "inference.max_new_tokens": 3,
    "inference.num_beams": 2,
}


def datum(number: int, split: str, category: str) -> dict:
    guid = f"{split}{number}"
    snippets = [snippet(f"{guid}_{n}", f"Fact {n} of {guid}.") for n in range(4)]
    pictures = [image_fact(p) for p in PICTURES]
    gold = pictures[number % 3 : number % 3 + 2]
    text = category == "text"
    return {
        "Q": f'"What about {guid}?"', "A": [f'"It is {number}, so they say."'], "Guid": guid,
        "Keywords_A": f'"{number}"', "Qcate": category, "split": split,
        "img_posFacts": [] if text else gold,
        "img_negFacts": [p for p in pictures if text or p not in gold],
        "txt_posFacts": snippets[:2] if text else [],
        "txt_negFacts": snippets[2:] if text else snippets,
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def narrow():
    with narrow_vlp():
        yield


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Prepared WebQA files and, beside them, X101's pickles with their map and a VinVL TSV."""
    folder = tmp_path_factory.mktemp("webqa")
    raw = folder / "raw"
    raw.mkdir()
    kinds = ("text", "color", "text", "YesNo", "text", "shape")
    data = [datum(n, split, kind) for split in ("train", "val") for n, kind in enumerate(kinds)]
    (raw / "WebQA_train_val.json").write_text(json.dumps({d["Guid"]: d for d in data}))
    colors = {n: (40 * (n % 10), 90, 255 - 40 * (n % 10)) for n in PICTURES}
    write_images(raw, {n: base64.b64encode(png(c, (24, 16))) for n, c in colors.items()})
    done("prepare", "webqa", f"--raw={raw}", f"--out={folder / 'data'}")
    for number in PICTURES:
        if number not in NO_FEATURES:
            write_x101(folder / "x101", FEATURES_OF[number])
    write_x101(
        folder / "x101", FEATURES_OF[NOT_NUMBERS], fc1_features=torch.full((3, 2048), np.nan)
    )
    (folder / "map.pkl").write_bytes(pickle.dumps(FEATURES_OF, protocol=3))
    write_vinvl(folder / "vinvl.tsv", {n: detections(4, 1595, seed=n) for n in PICTURES})
    return folder


def train(release, folder, name, *more, **changes):
    """`mmqa train` of a row of configs/webqa; stderr."""
    values = {**SMALL, "data.dir": release / "data", **changes}
    if "vinvl" in name:
        values |= {"features.files.3": release / "vinvl.tsv", "features.slots": 3}
    elif "x101" in changes.get("model.frontend", "x101") and "q_only" not in name:
        values |= {"features.root": release / "x101", "features.id_map": release / "map.pkl"}
        values |= {"features.slots": 3}
    flags = [f"--config={ROOT}/configs/webqa/{name}", f"--workdir={folder}"]
    flags += [f"--config.{key}={value}" for key, value in values.items()]
    ended = mmqa("train", *flags, *more)
    assert ended.code == 0, ended.err
    return ended.err


@pytest.fixture(scope="module")
def selector(release, cli_cache, tmp_path_factory):
    """VLP's source selection over X101 features, as it is before its first step."""
    folder = tmp_path_factory.mktemp("select") / "run"
    with quietly(cli_cache):
        train(release, folder, "vlp_select.py:runlocal", "--only_start")
    return folder


@pytest.fixture(scope="module")
def reader(release, cli_cache, tmp_path_factory):
    """VLP + VinVL's answers, as it is before its first step."""
    folder = tmp_path_factory.mktemp("qa") / "run"
    with quietly(cli_cache):
        train(release, folder, "vlp_qa.py:vinvl_runlocal", "--only_start", **SMALL_QA)
    return folder


@pytest.fixture(scope="module")
def reranked(release, selector, cli_cache, tmp_path_factory):
    """Rankings of the dev questions, the result and what was said."""
    path = tmp_path_factory.mktemp("ranked") / "restricted.jsonl"
    with quietly(cli_cache):
        ended = mmqa(
            "rerank", f"--data={release / 'data'}", f"--model={selector}", "--split=val",
            "--cap=webqa", "--select=above", f"--out={path}", "--json",
        )  # fmt: skip
    assert ended.code == 0, ended.err
    return path, ended


# The whole collection


def test_cached_ranks_the_whole_collection_with_mined_negatives(release, cli_cache, tmp_path):
    data = f"--data={release / 'data'}"
    mined = tmp_path / "mined.jsonl"
    with quietly(cli_cache):
        done("search", data, "--split=train", "--method=bm25", f"--out={mined}")
        train(
            release, tmp_path / "run", "vlp_select.py:cached_runlocal", "--only_start",
            **{"data.negatives": f"('{mined}',)", "model.changes.layers": 2},
        )  # fmt: skip
        # Traced alone: such a model's gradient is compared in test_two_sided_vlp.
        assert traced_loss(tmp_path / "run")["inputs"].input_ids.shape == (4, 64 + 2 * 3)
        result = done(
            "rerank", data, f"--model={tmp_path / 'run'}", "--split=val", "--candidates=all",
            "--top_k=1000", f"--out={tmp_path / 'all.jsonl'}",
        )  # fmt: skip
    corpus = open_corpus(release / "data")
    rows = rows_of(tmp_path / "all.jsonl")
    assert [row["question_id"] for row in rows] == [q.id for q in corpus.questions("val")]
    assert all(set(row["sources"]) == set(corpus.row) for row in rows)
    assert result["by_modality"].keys() == {"text", "image"}


# The protocol


def strict_f1(questions, rankings, threshold):
    """Mean source F1 of all sources above the threshold (modeling.py l.1106-1123)."""
    values = []
    for question, ranking in zip(questions, rankings, strict=True):
        cited = {n for n, p in zip(ranking.sources, ranking.scores, strict=True) if p > threshold}
        hits = len(cited & set(question.positives))
        precision, recall = hits / (len(cited) + 1e-5), hits / (len(question.positives) + 1e-5)
        values.append(2 * precision * recall / (precision + recall + 1e-5))
    return float(np.mean(values))


def test_rerank_sweeps_the_strict_threshold_of_the_baseline(release, reranked):
    path, ended = reranked
    questions = open_corpus(release / "data").questions("val")
    rankings = read_rankings(path)
    assert [len(ranking.sources) for ranking in rankings] == [10] * 6  # 6 pictures, 4 snippets
    result = ended.value
    assert [row["threshold"] for row in result["sweep"]] == list(THRESHOLDS)
    for row in result["sweep"]:
        assert row["source_f1"] == pytest.approx(strict_f1(questions, rankings, row["threshold"]))
    best = max(row["source_f1"] for row in result["sweep"])
    assert result["source_f1"] == pytest.approx(best)
    assert result["best_threshold"] in [
        row["threshold"] for row in result["sweep"] if row["source_f1"] == best
    ]
    assert "--select=above" in ended.out  # the table for people
    assert "0.2" in ended.out


def test_pictures_without_features_are_named_at_the_end(reranked):
    """At the end of a training too: test_raw_pictures."""
    said = "pictures without region features, read as their captions alone: "
    assert re.search(said + r"2 \(4000000[45], 4000000[45]\)\.", reranked[1].err)


def test_more_pictures_without_features_than_allowed_end_the_run(release, tmp_path):
    with pytest.raises(AssertionError, match=r"1 picture has no region features, .* 0 allowed"):
        train(release, tmp_path / "run", "vlp_select.py:runlocal", **{"features.max_missing": 0})


def test_the_loss_reads_vinvls_regions(reader):
    """Traced alone: the same task is trained over CLIP below."""
    regions = traced_loss(reader)["inputs"].region_features
    assert regions.shape[0] == 4
    assert np.asarray(regions).any()


def test_predicted_sources_are_all_cited_and_two_pictures_read(release, reader, reranked, tmp_path):
    answers, submission = tmp_path / "predictions.jsonl", tmp_path / "submission.json"
    flags = (f"--data={release / 'data'}", f"--model={reader}", "--split=val")
    done(
        "answer", *flags, f"--sources={reranked[0]}", "--select=above", "--threshold=0.0",
        f"--out={answers}",
    )  # fmt: skip
    predictions = rows_of(answers)
    for prediction, ranking in zip(predictions, read_rankings(reranked[0]), strict=True):
        assert prediction["sources"] == list(ranking.sources)  # every one has P > 0
        assert len(prediction["beams"]) == 2
    # Above 1 there is nothing: then no source is cited, the question alone is read.
    done(
        "answer", *flags, f"--sources={reranked[0]}", "--select=above", "--threshold=1.0",
        f"--out={answers}",
    )  # fmt: skip
    alone = rows_of(answers)
    assert all(row["sources"] == [] for row in alone)
    done("answer", *flags, "--sources=none", f"--out={answers}")
    assert [row["beams"] for row in rows_of(answers)] == [row["beams"] for row in alone]
    done("answer", *flags, "--sources=oracle", f"--out={answers}")
    result = done(
        "evaluate", "webqa", f"--references={release / 'data'}", "--split=val",
        f"--predictions={answers}", f"--submission={submission}",
    )  # fmt: skip
    assert result["scores"]["source_f1/official"] == pytest.approx(1.0, abs=1e-4)
    written = json.loads(submission.read_text())
    assert written["val1"]["sources"] == [30_000_001, 30_000_002]
    assert written["val0"]["sources"] == ["val0_0", "val0_1"]


def test_a_fine_tuned_checkpoint_serves_without_training(release, selector, tmp_path):
    """As WebQA_Baseline saves it, source head and region embeddings included."""

    def weights(folder):
        *_, vlp = load_selector(folder)
        return vlp.config, nnx.state(vlp)

    config, tuned_weights = weights(selector)
    # Not those that the seed gives.
    tuned_weights = jax.tree.map(lambda x: np.asarray(x) + 0.25, tuned_weights)
    write_published(tmp_path / "tuned", publish_vlp(config, tuned_weights))
    tuned = tmp_path / "tuned" / "model.safetensors"
    run = tmp_path / "run"
    for _ in range(2):  # the second has nothing to do
        train(release, run, "vlp_select.py:runlocal", "--only_start", init=tuned)
    jax.tree.map(np.testing.assert_array_equal, weights(run)[1], tuned_weights)
    assert not list(run.glob("checkpoints/[0-9]*"))


def test_what_is_read_of_cited_sources():
    corpus = Corpus(
        [Source(f"p{n}", "image", "caption", image="x") for n in range(3)]
        + [Source(f"s{n}", "text", "fact") for n in range(3)]
    )
    cited = Ranking("q", ("s0", "p2", "p0", "s1", "p1"), (0.9, 0.8, 0.7, 0.6, 0.5))
    reader = Reader.__new__(Reader)  # without a model
    reader.corpus, reader.max_pictures = corpus, 2
    reader._reader = SourceReader(corpus, minilm_tokenizer())

    def read(category):
        rows = reader.readable(Question("q", "val", "?", category=category), cited)
        return [corpus.sources[row].id for row in rows]

    for reader._by_category, category, modality, wanted in (
        (False, "color", None, ["s0", "p2", "p0", "s1"]),
        (False, "color", "text", ["s0", "s1"]),
        (False, "text", "image", ["p2", "p0"]),
        (True, "color", None, ["p2", "p0"]),
        (True, "text", None, ["s0", "s1"]),
        (True, "else", None, ["s0", "p2", "p0", "s1"]),
        (True, "text", "image", []),
    ):
        reader.modality = modality
        assert read(category) == wanted
    assert reader.readable(Question("r", "val", "?"), Ranking("r", (), ())) == []


def test_the_cap_keeps_gold_and_sixteen_of_each_modality():
    sources = [Source(f"p{n:02}", "image", "caption", image="x") for n in range(20)]
    sources += [Source(f"s{n:02}", "text", "fact") for n in range(20)]
    corpus = Corpus(sources)
    names = [source.id for source in sources]
    gold = ("p19", "p18")
    negatives = tuple(name for name in reversed(names) if name not in gold)
    question = Question("q", "val", "what?", positives=gold, negatives=negatives)
    (capped,) = webqa.restricted_candidates([question], corpus, webqa.CAPS["webqa"])
    assert list(capped.sources) == sorted([*names[4:20], *names[24:40]])
    (all_of_them,) = webqa.restricted_candidates([question], corpus, webqa.CAPS["none"])
    assert list(all_of_them.sources) == sorted(names)
    # Hidden gold sources: no cap may drop them.
    hidden = Question("q", "test", "what?", negatives=tuple(names))
    (uncapped,) = webqa.restricted_candidates([hidden], corpus, webqa.CAPS["webqa"])
    assert list(uncapped.sources) == sorted(names)


def test_the_first_stage_is_weighed_in(release, selector, tmp_path, cli_cache):
    """A first stage that ranks the sources the other way round, with and without weight."""
    data, found = f"--data={release / 'data'}", tmp_path / "found.jsonl"
    plain, turned = tmp_path / "plain.jsonl", tmp_path / "turned.jsonl"
    flags = ("rerank", data, f"--model={selector}", "--split=val")
    with quietly(cli_cache):
        done("search", data, "--split=val", "--method=bm25", "--top_k=5", f"--out={found}")
        done(*flags, f"--candidates={found}", f"--out={plain}")
        ranked = rows_of(plain)
        rows = [
            {**row, "sources": names[::-1], "scores": [*range(len(names), 0, -1)]}
            for row in ranked
            for names in [row["sources"]]
        ]
        turned.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for weight, wanted in ((0, ranked), (1e6, rows)):
            out = tmp_path / f"weighed_{weight}.jsonl"
            done(*flags, f"--candidates={turned}", f"--similarity_weight={weight}", f"--out={out}")
            assert [r["sources"] for r in rows_of(out)] == [r["sources"] for r in wanted]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("{file}", "--cap=webqa"), r"--cap=webqa: .* use it with --candidates=restricted"),
        (("restricted", "--similarity_weight=5"), r"no similarity is known .* `mmqa search`"),
        (("{file}", "--similarity_weight=-1"), r"--similarity_weight=-1.0: 0 or more"),
        (("{file}", "--similarity_weight=nan"), r"--similarity_weight=nan: 0 or more"),
        (("{file}", "--similarity_weight=inf"), r"--similarity_weight=inf: 0 or more"),
        (("restricted", "--retriever=runs/c"), r"--retriever and --index need each other"),
        (
            ("all", "--retriever=runs/c", "--index=runs/i"),
            r"--retriever: computes the similarity of a few",
        ),
    ],
)
def test_flags_that_do_not_fit_the_candidates(
    flags, message, release, selector, reranked, refused, tmp_path
):
    candidates, more = flags[0].format(file=reranked[0]), flags[1:]
    refused(
        "rerank", f"--data={release / 'data'}", f"--model={selector}", "--split=val",
        f"--candidates={candidates}", *more, f"--out={tmp_path / 'out'}", message=message,
    )  # fmt: skip


# The variants


def test_vlp_i_is_asked_picture_questions_alone(release, tmp_path):
    run, answers = tmp_path / "run", tmp_path / "predictions.jsonl"
    train(release, run, "vlp_qa.py:vlp_i_runlocal", "--only_start", **SMALL_QA)
    data = f"--data={release / 'data'}"
    ended = mmqa("answer", data, f"--model={run}", "--split=val", f"--out={answers}")
    assert ended.code == 0, ended.err
    assert "trained on image sources alone: it answers the 3 of 6 questions" in ended.err
    assert [row["question_id"] for row in rows_of(answers)] == ["val1", "val3", "val5"]
    result = done(
        "evaluate", "webqa", f"--references={release / 'data'}", "--split=val", "--only_given",
        f"--predictions={answers}",
    )  # fmt: skip
    assert result["n"] == 3


def test_a_modality_that_no_question_needs(data, tmp_path, refused):
    """The tiny corpus of the other tests asks for snippets alone in training."""
    values = {**SMALL, "data.dir": data, "data.modality": "image"}
    flags = [f"--config={ROOT}/configs/webqa/vlp_qa.py:q_only_runlocal", f"--workdir={tmp_path}/r"]
    flags += [f"--config.{key}={value}" for key, value in values.items()]
    refused(
        "train", *flags, "--config.packing.buckets=((0,64),)",
        message=r"data\.modality=image: none of the 8 questions needs such sources",
    )  # fmt: skip


# CLIP in front


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny CLIP as `mmqa convert` writes it, and the model."""
    folder = tmp_path_factory.mktemp("clip")
    convert("clip", make_source("clip", folder / "hf").path, folder / "clip")
    return folder / "clip", load_converted(folder / "clip")


def clip_config(release, clip, **changes):
    values = {**SMALL, **SMALL_QA, "data.dir": str(release / "data"), **changes}
    values |= {"pictures.size": 16, "features.root": str(clip[0])}
    config = load_config(f"{ROOT}/configs/webqa/vlp_qa.py:clip_patches_runlocal", values)
    config.model.vision = VISION
    config.mesh.data = 1
    return config


def test_clips_patch_features_are_those_of_the_tower(clip):
    section = {"trunk": "minilm_l6", "changes": {"hidden": 32, "layers": 1, "heads": 2, "mlp": 32},
               "frontend": "clip", "clip": "vit_b_16", "vision": VISION}  # fmt: skip
    config = read_typed(VLPModel, section, "model").config(40)
    content, tower = drawn(lambda: config.make_region_content(nnx.Rngs())), clip[1].vision
    nnx.update(content.tower, nnx.state(tower))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
    regions = PatchRegions(16, 8)
    patches = np.stack([regions(RawSource("", pixels=picture))[0] for picture in pixels])

    @nnx.jit
    def seen(content, tower, patches, pixels):
        features = []
        for layer in (-2, 0):
            content.layer = layer
            wanted = tower.patch_features(normalize_pixels(pixels), layer)
            features.append((content.features(patches), wanted))
        return features

    # Two rows of two pictures, side by side in their slots.
    for found, wanted in seen(content, tower, patches.reshape(2, 8, -1), pixels):
        np.testing.assert_allclose(found.reshape(4, 4, -1), wanted, rtol=1e-4, atol=1e-4)


def test_a_reader_over_clip_is_trained_with_the_tower_frozen(release, clip, tmp_path):
    run_training(clip_config(release, clip), tmp_path / "run")
    corpus = open_corpus(release / "data")
    reader = load_reader(tmp_path / "run", corpus)
    graph = nnx.merge(reader._graphdef, reader._state)
    ours = flatten_named(nnx.state(graph.region_content.tower))
    for name, values in flatten_named(nnx.state(clip[1].vision)).items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
    # The linears behind it are trained, by an update every two steps.
    last, first = weights_of(tmp_path / "run"), weights_of(tmp_path / "run/checkpoints/2", "params")
    linears = [name for name in last if name.startswith("region_content/linears/")]
    assert len(linears) == 2
    for name in linears:
        assert not np.array_equal(last[name], first[name]), name
    # What it reads changes with the picture, and the folder of CLIP is not needed any more.
    question = corpus.questions("val")[1]
    scores = []
    for name in ("30000000", "30000005"):
        (prediction,) = reader.answer([question], [Ranking(question.id, (name,), (1.0,))])
        scores.append(prediction.beams[0][1])
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features.root": "nowhere"}, r"nowhere: no such file or folder"),
        ({"pictures.size": 24}, r"pictures\.size=24: model\.clip=vit_b_16 takes 16; set pictures"),
        ({"model.tags": True}, r"model\.tags: .* model\.frontend=clip have neither colors nor"),
    ],
)
def test_wrong_clips_are_named(release, clip, change, message):
    config = clip_config(release, clip)
    for key, value in change.items():
        section, name = key.split(".")
        config[section][name] = value
    refuses(message, check_config, config)


def test_a_clip_of_other_sizes_or_another_model_is_named(release, clip, tmp_path):
    config = clip_config(release, clip)
    config.model.vision = {**VISION, "image_size": 24, "layers": 2}
    config.pictures.size = 24
    differing = r"vision\.image_size 16 \(config: 24\), vision\.layers 3 \(config: 2\)"
    message = rf"features\.root=.*: this CLIP has {differing}; set"
    refuses(message, check_config, config)
    record = json.loads((clip[0] / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**record, "format": "other"}))
    config.features.root = str(tmp_path)
    refuses(r"model\.json: format is 'other', expected", check_config, config)
