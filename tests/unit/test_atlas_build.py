"""The Atlas benchmark as built: counts, splits, gold sources, negatives, formats, determinism."""

import base64
import collections
import hashlib
import io
import json
import os
import re
import subprocess
import sys

import pytest
from PIL import Image

from mmqa_jax.data.atlas import build
from mmqa_jax.data.atlas.build import LEAST_COUNTRIES, SNIPPETS, build_atlas
from mmqa_jax.data.atlas.factbook import load_countries
from mmqa_jax.data.atlas.questions import FLAG_QUESTIONS, TOTALS
from tests.refusals import refuses

pytestmark = pytest.mark.slow

CATEGORIES = {"YesNo", "choose", "color", "number", "Others", "text"}


@pytest.fixture(scope="module", autouse=True)
def _drawn_once():
    """Pictures and what is seen in them depend on the countries alone: each set is drawn once here, and
    once more by the other process."""
    draw, drawn = build._pictures, {}

    def pictures(countries, scale):
        key = (*(country.code for country in countries), scale)
        if key not in drawn:
            drawn[key] = draw(countries, scale)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_pictures", pictures)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An eighth of Atlas: 30 of its 240 countries (all of them take 22 s)."""
    out = tmp_path_factory.mktemp("atlas") / "eighth"
    build_atlas(out, limit_countries=30)
    return out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("atlas") / "small"
    build_atlas(out, limit_countries=LEAST_COUNTRIES)
    return out


@pytest.fixture(scope="module")
def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def datums(folder):
    train_val = json.loads((folder / "atlas_train_val.json").read_text())
    test = json.loads((folder / "atlas_test.json").read_text())
    assert {d["split"] for d in train_val.values()} == {"train", "val"}
    assert {d["split"] for d in test.values()} == {"test"}
    return list(train_val.values()) + list(test.values())


def corpus_texts(datums):
    return {f["fact"] for d in datums for k in ("txt_posFacts", "txt_negFacts") for f in d[k]}


def corpus_pictures(datums):
    return {
        f["image_id"]: f for d in datums for k in ("img_posFacts", "img_negFacts") for f in d[k]
    }


def test_reaches_the_sizes_of_the_issue(datums, summary):
    """An eighth of them: no category and no split runs out of questions, snippets or pictures.

    All flags, and the countries of each split, are counted in test_atlas_pictures.py.
    """
    assert sum(TOTALS.values()) >= 10_000
    assert summary["questions"] == {split: round(total / 8) for split, total in TOTALS.items()}
    assert len(datums) == sum(summary["questions"].values())
    assert {d["Qcate"] for d in datums} == CATEGORIES
    assert 8_000 <= SNIPPETS <= 9_500
    assert len(corpus_texts(datums)) == SNIPPETS // 8
    pictures = corpus_pictures(datums)
    flags = [p for p in pictures.values() if re.search("(?i)flag|banner", p["caption"])]
    assert len(flags) >= 60
    assert len(pictures) - len(flags) >= 1_700 // 8
    assert summary["countries"] == {"train": 21, "val": 3, "test": 6}
    assert summary["unlisted_sources"] == 0  # the official files hold the whole corpus


def test_official_shape_of_every_datum(datums):
    for d in datums:
        assert re.fullmatch(r"[0-9a-f]{32}", d["Guid"])
        assert all([d["Q"], *d["A"], d["Keywords_A"]])
        assert len(d["A"]) == 1 if d["split"] == "train" else len(d["A"]) >= 3
        assert len(set(d["A"])) == len(d["A"])
        assert len(d["img_negFacts"]) == len(d["txt_negFacts"]) == 16
        gold = d["txt_posFacts"] if d["Qcate"] == "text" else d["img_posFacts"]
        assert 1 <= len(gold) <= 2
        assert len(d["txt_posFacts"]) + len(d["img_posFacts"]) == len(gold)
    assert len({d["Guid"] for d in datums}) == len({d["Q"] for d in datums}) == len(datums)


def test_imgs_tsv_and_lineidx_hold_every_picture(folder, datums):
    offsets = [int(line) for line in (folder / "imgs.lineidx").read_text().split()]
    pictures = corpus_pictures(datums)
    assert len(offsets) == len(pictures)
    with open(folder / "imgs.tsv", "rb") as file:
        for image_id in list(pictures)[::11]:
            file.seek(offsets[image_id % 10_000_000])
            name, encoded = file.readline().rstrip(b"\n").split(b"\t")
            assert int(name) == image_id
            image = Image.open(io.BytesIO(base64.b64decode(encoded)))
            assert image.format == "PNG"
            assert image.size in ((250, 150), (144, 144))


def test_countries_of_test_and_val_are_unseen_in_training(datums):
    names = {c.name for c in load_countries()}
    seen = collections.defaultdict(set)
    for d in datums:
        for key in ("txt_posFacts", "img_posFacts"):
            seen[d["split"]].update(f["title"] for f in d[key])
        if d["split"] == "train":  # not even as a negative
            for key in ("txt_negFacts", "img_negFacts"):
                seen["train"].update(f["title"] for f in d[key])
    for split in ("val", "test"):
        assert not seen["train"] & seen[split]
    assert not seen["val"] & seen["test"]
    assert len(seen["test"] & names) == 6


def test_pixel_identical_flags_share_a_split(folder, datums, summary):
    picture_of = {}
    for line in (folder / "imgs.tsv").read_bytes().splitlines():
        image_id, encoded = line.split(b"\t")
        image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
        picture_of[int(image_id)] = hashlib.sha256(image.tobytes()).hexdigest()
    splits = collections.defaultdict(set)
    for d in datums:
        for fact in d["img_posFacts"]:
            splits[picture_of[fact["image_id"]]].add(d["split"])
    assert all(len(found) == 1 for found in splits.values())
    assert ["TD", "RO"] in summary["identical_flags"]


def test_negatives_are_never_gold(datums):
    for d in datums:
        gold_texts = {f["fact"] for f in d["txt_posFacts"]}
        texts = [f["fact"] for f in d["txt_negFacts"]]
        assert not gold_texts & set(texts)
        assert len(set(texts)) == 16
        gold_ids = {f["image_id"] for f in d["img_posFacts"]}
        ids = {f["image_id"] for f in d["img_negFacts"]}
        assert not gold_ids & ids
        assert len(ids) == 16


def test_flag_descriptions_are_not_in_the_corpus_and_meanings_no_negatives(datums):
    assert not any("equal horizontal bands" in text for text in corpus_texts(datums))
    meanings = 0
    for d in datums:
        if d["Qcate"] != "text" and d["topic"] == "flag":
            own = {f["title"] for f in d["img_posFacts"]}
            for fact in d["txt_negFacts"]:
                if fact["fact"].startswith("What the flag of"):
                    assert fact["title"] not in own
                    meanings += 1
    assert meanings > 250  # those of other flags are shown


def test_answers_are_in_their_gold_snippets(datums):
    for d in datums:
        if d["Qcate"] == "text":
            assert d["Keywords_A"] in d["txt_posFacts"][-1]["fact"]
            assert any(d["Keywords_A"].lower() in answer.lower() for answer in d["A"])
            if d["hops"] == 2:
                first, second = (f["fact"] for f in d["txt_posFacts"])
                assert d["Keywords_A"] not in first
                assert d["txt_posFacts"][0]["title"] not in d["Q"]
                assert first != second


def test_golden_capitals_and_stripes(datums):
    # Factbook: the capital of Angola is Luanda. Not every question is drawn for the benchmark, the
    # snippet is always there; for drawn ones the answer must be the known one.
    assert any(t.startswith("The capital of Angola is Luanda") for t in corpus_texts(datums))
    known = {"Angola": "Luanda", "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi",
             "Norway": "Oslo", "Peru": "Lima", "Cuba": "Havana", "Iraq": "Baghdad"}  # fmt: skip
    asked = [d for d in datums if d["template"] == "capital" and d["entities"][0] in known]
    assert asked
    for d in asked:
        assert d["Keywords_A"] == known[d["entities"][0]]
        assert d["Keywords_A"] in d["txt_posFacts"][0]["fact"]


def test_yes_and_no_are_balanced_in_every_template(datums):
    counts = collections.defaultdict(collections.Counter)
    for d in datums:
        if d["Qcate"] == "YesNo":
            counts[d["split"], d["template"]][d["Keywords_A"]] += 1
    assert {template for _, template in counts} >= {"any_red", "any_blue", "is_main"}
    for count in counts.values():
        assert count["yes"] == count["no"]


def test_two_hop_questions_are_a_quarter_of_the_text_questions(datums):
    text = [d for d in datums if d["Qcate"] == "text"]
    share = sum(d["hops"] == 2 for d in text) / len(text)
    assert 0.25 <= share <= 0.30
    assert 0.42 <= len(text) / len(datums) <= 0.48


def words(text):
    return collections.Counter(re.findall(r"[^\W_]+", text.lower()))


def accuracy(answer, reference, category):
    """WebQA's accuracy with plain words: F1, or recall where no domain of words is known."""
    said, wanted = words(answer), words(reference)
    common = (said & wanted).total()
    recall, precision = common / max(wanted.total(), 1), common / max(said.total(), 1)
    if category not in ("color", "number", "YesNo"):
        return recall
    return 2 * precision * recall / (precision + recall) if common else 0.0


def test_constant_answers_score_little_where_it_counts(datums):
    """The best constant answer of each category, chosen on train, scored on test."""
    score, exact = {}, {}
    for category in CATEGORIES:
        train, test = (
            [d["Keywords_A"] for d in datums if d["Qcate"] == category and d["split"] == split]
            for split in ("train", "test")
        )
        candidates = [answer for answer, _ in collections.Counter(train).most_common(60)]
        sample = train[:: max(len(train) // 200, 1)]
        totals = [sum(accuracy(a, b, category) for b in sample) for a in candidates]
        best = candidates[totals.index(max(totals))]
        score[category] = sum(accuracy(best, b, category) for b in test) / len(test)
        exact[category] = sum(set(words(best)) == set(words(b)) for b in test) / len(test)
    assert score["YesNo"] == 0.5
    assert exact["color"] < 0.3  # the F1 of a constant is far higher
    assert score["color"] > 2 * exact["color"]
    assert score["text"] < 0.1


def test_snippets_are_clean_and_of_good_length(datums):
    texts = corpus_texts(datums)
    words = sorted(len(text.split()) for text in texts)
    assert 25 <= words[len(words) // 2] <= 40
    assert words[-1] <= 70
    for text in texts:
        assert not re.search(r"<\w+>|&\w+;|\(est\.?\)|\s{2}|\xa0", text), text


def test_attribution_names_licenses_and_versions(folder):
    text = (folder / "ATTRIBUTION.txt").read_text()
    assert "CC BY-SA 4.0" in text
    assert "public domain" in text
    assert "17.0.0" in text


def test_same_seed_same_bytes_in_another_process(small, tmp_path):
    code = (
        "import sys; from mmqa_jax.data.atlas.build import build_atlas;"
        f"build_atlas(sys.argv[1], limit_countries={LEAST_COUNTRIES})"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "b")],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    names = sorted(p.name for p in small.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in names:
        assert (small / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    # Another replaces it.
    build_atlas(tmp_path / "b", seed=1, limit_countries=LEAST_COUNTRIES)
    assert (tmp_path / "b/atlas_test.json").read_bytes() != (small / "atlas_test.json").read_bytes()


def test_a_change_to_one_kind_of_question_leaves_the_others(small, tmp_path, monkeypatch):
    def questions(folder):
        datums = json.loads((folder / "atlas_train_val.json").read_text()).values()
        return {(d["Q"], *d["A"]) for d in datums if d["Qcate"] not in ("number", "color")}

    monkeypatch.delitem(FLAG_QUESTIONS, "number")  # color takes the share
    build_atlas(tmp_path / "changed", limit_countries=LEAST_COUNTRIES)
    assert questions(tmp_path / "changed") == questions(small)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    refuses("not an Atlas benchmark", build_atlas, tmp_path, limit_countries=8)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_in_the_way_and_too_few_countries_are_refused(tmp_path):
    (tmp_path / "atlas").write_text("")
    refuses("is a file", build_atlas, tmp_path / "atlas", limit_countries=8)
    refuses("limit_countries=3", build_atlas, tmp_path / "new", limit_countries=3)


def test_a_failed_build_leaves_nothing(tmp_path):
    def stop(stage, done, total):
        assert any(tmp_path.iterdir())  # its folder has begun, beside the one to be made
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_atlas(tmp_path / "atlas", progress=stop, limit_countries=8)
    assert list(tmp_path.iterdir()) == []
