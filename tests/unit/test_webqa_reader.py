"""Official WebQA files in, the same facts out: reader, imgs.tsv, prepare, submission."""

import base64
import json

import pytest
from PIL import Image

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.formats import webqa
from mmqa_jax.data.pictures.decode import PictureError, decode
from mmqa_jax.data.schema import SPLITS, WEBQA_CATEGORIES, Material, Prediction, Source
from mmqa_jax.runs.corpora import prepare_release
from tests.pictures import encoded
from tests.pictures import plain as png
from tests.refusals import refuses

COLORS = {30000000: (255, 0, 0), 30000001: (0, 255, 0), 30000002: (0, 0, 255)}


def image_fact(number):
    return {
        "image_id": number,
        "caption": f"Caption {number}",
        "title": f"Title {number}",
        "url": "u",
        "imgUrl": "i",
    }


def snippet(name, fact):
    return {"snippet_id": name, "fact": fact, "title": f"Page of {fact}", "url": "u"}


def train_val():
    return {
        "g1": {
            "Q": '"Is it red?"',
            "A": ['"Yes, it is red."'],
            "Keywords_A": '"Yes"',
            "Qcate": "YesNo",
            "split": "train",
            "topic": "colors",
            "Guid": "g1",
            "img_posFacts": [image_fact(30000000)],
            "img_negFacts": [image_fact(30000001)],
            "txt_posFacts": [],
            "txt_negFacts": [snippet("g1_0", "Grass is green."), snippet("g1_1", "Ice is cold.")],
        },
        "g2": {  # a text query: no img_posFacts, no Keywords_A; it repeats a snippet of g1
            "Q": "What is grass?",
            "A": ["Grass is green.", "It is green."],
            "Qcate": "text",
            "split": "val",
            "Guid": "g2",
            "hops": 2,
            "img_negFacts": [image_fact(30000002), image_fact(30000000)],
            "txt_posFacts": [snippet("g2_0", "Grass is green."), snippet("g2_1", "Snow is white.")],
            "txt_negFacts": [snippet("g2_2", "Snow is white."), snippet("g2_3", "Ice is cold.")],
        },
    }


def hidden_test():
    return {
        "g3": {
            "Q": "What is hidden?",
            "Qcate": "text",
            "split": "test",
            "Guid": "g3",
            "img_Facts": [image_fact(30000001)],
            "txt_Facts": [snippet("g3_0", "Snow is white."), snippet("g3_1", "Coal is black.")],
        },
        "g4": {"Q": "No sources?", "Qcate": "text", "split": "test", "Guid": "g4"},
    }


def write_images(folder, pictures):
    """imgs.tsv and imgs.lineidx of {image_id: base64 bytes}, a row each."""
    offsets, lines = [], b""
    for number, content in pictures.items():
        offsets.append(len(lines))
        lines += str(number).encode() + b"\t" + content + b"\n"
    (folder / "imgs.tsv").write_bytes(lines)
    (folder / "imgs.lineidx").write_text("".join(f"{offset}\n" for offset in offsets))


@pytest.fixture
def release(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "WebQA_train_val.json").write_text(json.dumps(train_val()))
    (folder / "WebQA_test.json").write_text(json.dumps(hidden_test()))
    write_images(folder, {n: base64.b64encode(png(color)) for n, color in COLORS.items()})
    return folder


def test_prepare_and_open_give_back_the_official_facts(release, tmp_path):
    (release / "ATTRIBUTION.txt").write_text("CC0, somebody")
    manifest = prepare_release(release, tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")

    texts = {s.id: s.text for s in corpus.sources if s.modality == "text"}
    assert texts == {
        "g1_0": "Grass is green.",
        "g1_1": "Ice is cold.",
        "g2_1": "Snow is white.",
        "g3_1": "Coal is black.",
    }
    assert [s.id for s in map(corpus.sources.__getitem__, corpus.modality_rows("image"))] == [
        "30000000", "30000001", "30000002",
    ]  # fmt: skip
    red = corpus.sources[corpus.row["30000000"]]
    assert (red.text, red.title) == ("Caption 30000000", "Title 30000000")
    assert red.extra == {"url": "u", "imgUrl": "i"}
    for number, color in COLORS.items():
        data = corpus.picture(corpus.row[str(number)])
        assert data == png(color)
        assert decode(data).getpixel((0, 0)) == color
    assert corpus.picture(corpus.row["g1_0"]) is None

    (g1,), (g2,), (g3, g4) = map(corpus.questions, ("train", "val", "test"))
    assert corpus.questions() == [g1, g2, g3, g4]
    assert (g1.question, g1.answers, g1.keywords) == (
        '"Is it red?"',
        ('"Yes, it is red."',),
        '"Yes"',
    )
    assert (g1.category, g1.extra) == ("YesNo", {"topic": "colors"})
    assert (g1.positives, g1.negatives) == (("30000000",), ("30000001", "g1_0", "g1_1"))
    # Snippets go to the first id of their fact; a positive that is also a negative stays positive.
    assert g2.positives == ("g1_0", "g2_1")
    assert g2.negatives == ("30000002", "30000000", "g1_1")
    assert g2.extra["hops"] == 2
    assert g2.extra[webqa.OWN_SNIPPET_IDS] == {"g1_0": "g2_0", "g1_1": "g2_3"}
    # The hidden test file: merged candidates, no answers.
    assert (g3.positives, g3.negatives) == ((), ("30000001", "g2_1", "g3_1"))
    assert (g3.answers, g3.keywords) == ((), "")
    assert corpus.candidates(g2) == [
        corpus.row[name] for name in ("g1_0", "g2_1", "30000002", "30000000", "g1_1")
    ]
    assert corpus.candidates(g4) == corpus.positive_rows(g4) == []

    assert manifest == corpus.manifest
    assert corpus.materials == (Material("CC0, somebody"),)
    assert manifest["counts"] == {
        "sources": 7, "questions": 4, "pictures": 3, "broken_pictures": 0,
        "questions_without_sources": 1,
    }  # fmt: skip
    assert manifest["modalities"] == {"image": 3, "text": 4}
    assert manifest["splits"] == {"train": 1, "val": 1, "test": 2}
    assert manifest["origin"]["repeated_snippets"] == 4


def test_extra_file_gives_sources_and_no_questions(release, tmp_path):
    extra = {
        "pool": {"img_negFacts": [image_fact(30000002)], "txt_negFacts": [snippet("x", "New.")]}
    }
    (release / "WebQA_corpus.json").write_text(json.dumps(extra))
    prepare_release(release, tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    assert len(corpus.questions()) == 4
    assert corpus.sources[corpus.row["x"]].text == "New."
    assert len(corpus) == 8


def test_a_snippet_id_used_for_two_facts_loses_neither(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(change("txt_posFacts", [snippet("g1_0", "Another fact.")], "g2")))
    release = webqa.read_release([path])
    texts = {source.id: source.text for source in release.sources}
    assert (texts["g1_0"], texts["g1_0#2"]) == ("Grass is green.", "Another fact.")
    assert release.questions[1].positives == ("g1_0#2",)
    assert release.questions[1].extra[webqa.OWN_SNIPPET_IDS]["g1_0#2"] == "g1_0"
    assert release.reused_snippet_ids == 1


def test_submission_names_snippets_as_the_question_lists_them(release, tmp_path):
    prepare_release(release, tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    predictions = [
        Prediction("g2", "Green.", ("g1_0", "30000002", "g3_1")),
        Prediction("g4", "Nothing.", ()),
    ]
    path = tmp_path / "submission.json"
    webqa.write_submission(predictions, corpus, path)
    assert json.loads(path.read_text()) == {
        "g2": {"sources": ["g2_0", 30000002, "g3_1"], "answer": "Green."},
        "g4": {"sources": [], "answer": "Nothing."},
    }
    assert webqa.parse_submission(read_json(path), path, corpus) == predictions
    with pytest.raises(UserError, match=r"g1.*'nowhere'.*not in the corpus"):
        webqa.write_submission([Prediction("g1", "", ("nowhere",))], corpus, path)


@pytest.mark.parametrize("name", ["p-Cinnabar", "007", "\N{SUPERSCRIPT TWO}", "9" * 5000, "-1"])
def test_submission_of_a_corpus_whose_pictures_have_no_numbers(name, tmp_path):
    corpus = Corpus([Source(name, "image", "a"), Source("30000001", "image", "b")])
    predictions = [Prediction("q", "red", (name, "30000001"))]
    path = tmp_path / "submission.json"
    webqa.write_submission(predictions, corpus, path)
    assert read_json(path) == {"q": {"sources": [name, 30000001], "answer": "red"}}
    assert webqa.parse_submission(read_json(path), path, corpus) == predictions


def test_rows_of_any_leading_digit_and_each_picture_alone(release):
    images = webqa.ImagesTsv(release / "imgs.tsv")
    assert len(images) == 3
    assert [images.read(row) for row in (2, 0)] == [png(COLORS[30000002]), png(COLORS[30000000])]
    assert images.read_named("images/10000001") == png(COLORS[30000001])  # row = id % 10,000,000


def test_broken_pictures_are_counted_named_and_limited(release, tmp_path):
    pictures = {n: base64.b64encode(png(color)) for n, color in COLORS.items()}
    pictures[30000001] = b"@@@not base64@@@"
    pictures[30000002] = base64.b64encode(b"these bytes are no picture")
    write_images(release, pictures)
    manifest = prepare_release(release, tmp_path / "out")
    assert set(manifest["broken_pictures"]) == {"images/30000001", "images/30000002"}
    assert "imgs.tsv, row 1: broken base64" in manifest["broken_pictures"]["images/30000001"]
    assert "unknown format" in manifest["broken_pictures"]["images/30000002"]
    corpus = open_corpus(tmp_path / "out")
    assert corpus.materials == webqa.MATERIALS  # without a notice
    lost = corpus.sources[corpus.row["30000001"]]
    assert (lost.image, lost.modality, lost.text) == (None, "image", "Caption 30000001")
    assert corpus.picture(corpus.row["30000001"]) is None
    assert corpus.picture(corpus.row["30000000"]) == png(COLORS[30000000])

    with pytest.raises(RunError, match=r"2 pictures.*images/30000001, images/30000002"):
        prepare_release(release, tmp_path / "strict", max_broken_pictures=1)
    assert not list((tmp_path / "strict").iterdir())


def test_truncated_png_is_read_as_far_as_it_goes():
    whole = Image.effect_noise((64, 64), 80).convert("RGB")
    data = encoded(whole)
    half = decode(data[: len(data) // 2])
    assert half.getpixel((3, 3)) == whole.getpixel((3, 3))


def test_lineidx_of_other_files(release):
    tsv, lineidx = release / "imgs.tsv", release / "imgs.lineidx"
    offsets = lineidx.read_text().split()
    lineidx.write_text(f"{offsets[0]}\n{int(offsets[1]) + 3}\n{offsets[2]}\n")
    with pytest.raises(UserError, match=r"imgs.tsv, row 1: .*not that row's line") as error:
        webqa.ImagesTsv(tsv).read(1)
    assert not isinstance(error.value, PictureError)  # not one broken picture: wrong files
    # Its end is wrong.
    refuses(r"imgs.tsv, row 0: .*not that row's line", webqa.ImagesTsv(tsv).read, 0)
    assert webqa.ImagesTsv(tsv).read(2) == png(COLORS[30000002])
    lineidx.write_text("\ufeff" + "".join(f"{offset}\r\n" for offset in offsets))
    assert webqa.ImagesTsv(tsv).read(0) == png(COLORS[30000000])
    lineidx.write_text("0\n1000\nabc\n")
    refuses(r"imgs.lineidx, line 3: not a byte offset", webqa.ImagesTsv, tsv)
    lineidx.write_text("0\n1000\n500\n")
    refuses(r"imgs.lineidx, line 3: offset not above", webqa.ImagesTsv, tsv)
    lineidx.write_text(f"{offsets[0]}\n{offsets[1]}\n")
    refuses(r"imgs.tsv, row 2: .*has 2 rows", webqa.ImagesTsv(tsv).read, 2)


def test_a_line_without_a_picture(release):
    pictures = {n: base64.b64encode(png(color)) for n, color in COLORS.items()}
    write_images(release, {**pictures, 30000001: b""})
    with pytest.raises(PictureError, match=r"imgs\.tsv, row 1: holds no picture; fetch it again"):
        webqa.ImagesTsv(release / "imgs.tsv").read(1)


def test_cut_tsv(release):
    tsv = release / "imgs.tsv"
    offsets = list(map(int, (release / "imgs.lineidx").read_text().split()))
    tsv.write_bytes(tsv.read_bytes()[: offsets[1] + 30])
    images = webqa.ImagesTsv(tsv)
    assert images.read(0) == png(COLORS[30000000])
    refuses("row 1: the file ends within it", images.read, 1, error=PictureError)
    refuses("row 2: the file ends at byte", images.read, 2)


def test_a_cut_or_foreign_tsv_shows_before_anything_is_written(release, tmp_path):
    names = [f"images/{number}" for number in COLORS]
    images = webqa.ImagesTsv(release / "imgs.tsv")
    images.check_ends(names)
    images.check_ends([])
    refuses(r"row 5: .*has 3 rows", images.check_ends, [*names, "images/30000005"])
    tsv = release / "imgs.tsv"
    whole = tsv.read_bytes()
    offsets = list(map(int, (release / "imgs.lineidx").read_text().split()))
    tsv.write_bytes(whole[: offsets[1] + 30])
    refuses(r"row 2: the file ends at byte \d+, before", prepare_release, release, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tsv.write_bytes(whole[: offsets[2] + 30])  # one cut picture is a broken picture
    webqa.ImagesTsv(tsv).check_ends(names)


def test_a_signature_tells_files_apart(release):
    tsv, lineidx = release / "imgs.tsv", release / "imgs.lineidx"
    first = webqa.ImagesTsv(tsv).signature
    assert webqa.ImagesTsv(tsv).signature == first
    lineidx.write_text(lineidx.read_text() + "99999\n")
    second = webqa.ImagesTsv(tsv).signature
    tsv.write_bytes(tsv.read_bytes())  # written again
    assert len({first, second, webqa.ImagesTsv(tsv).signature}) == 3


def test_counts_are_compared_with_the_published_ones(release):
    assert sum(webqa.PUBLISHED_COUNTS[f"{s} questions"] for s in SPLITS) == 49_272
    categories = [webqa.PUBLISHED_COUNTS[f"{c} questions"] for c in WEBQA_CATEGORIES]
    assert sum(categories) == 49_272
    made = webqa.read_release([release / "WebQA_train_val.json", release / "WebQA_test.json"])
    found = {name: row["found"] for name, row in webqa.compared_counts(made).items()}
    assert found == {
        "train questions": 1, "val questions": 1, "val image questions": 0,
        "val text questions": 1, "test questions": 2, "test image questions": 0,
        "test text questions": 2, "YesNo questions": 1, "choose questions": 0,
        "color questions": 0, "shape questions": 0, "number questions": 0, "Others questions": 0,
        "text questions": 3, "pictures": 3, "snippets": 4,
    }  # fmt: skip
    for name, row in webqa.compared_counts(made).items():
        assert row["published"] == webqa.PUBLISHED_COUNTS[name]


def test_missing_raw_files(release, tmp_path):
    (release / "imgs.lineidx").unlink()
    refuses(r"imgs.lineidx: no such file", prepare_release, release, tmp_path / "out")
    (release / "WebQA_train_val.json").unlink()
    refuses(r"train_val.json: no such file", prepare_release, release, tmp_path / "out")
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_bad_json_is_named_with_its_line(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{\n "g1": {"Q": "a",\n "A": oops}\n}')
    refuses(r"bad.json, line 3", webqa.read_release, [path])


def change(key, value, datum="g1"):
    data = train_val()
    data[datum][key] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], r"one object of Guid -> question data was expected"),
        ({"g1": 3}, r"Guid g1: an object was expected"),
        (change("Q", None), r"Guid g1: Q is None; text was expected"),
        (change("Q", 4), r"Guid g1: Q is 4; text was expected"),
        (change("Qcate", "colour"), r"Guid g1: Qcate is 'colour'; one of YesNo"),
        (change("split", "dev"), r"Guid g1: split is 'dev'"),
        (change("Guid", "other"), r"Guid g1: its Guid field is 'other'"),
        (change("A", [1]), r"Guid g1: A is \[1\]; a list of texts"),
        (change("txt_negFacts", {}), r"Guid g1: txt_negFacts is {}; a list of objects"),
        (change("txt_negFacts", [{"fact": "x"}]), r"txt_negFacts\[0\]: snippet_id is None; text"),
        (change("img_posFacts", [{"caption": "x"}]), r"img_posFacts\[0\]: image_id is None"),
        ({"g": {"Q": "Alone?", "split": "test"}}, r"list no facts, so the corpus is empty"),
        ({}, r"list no facts, so the corpus is empty"),
    ],
)
def test_wrong_data_is_named(tmp_path, data, message):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(data))
    refuses(r"data\.json.*" + message, webqa.read_release, [path])


def test_repeated_guid(release, tmp_path):
    path = release / "WebQA_train_val.json"
    refuses(r"Guid g1: the same Guid is in .*train_val\.json", webqa.read_release, [path, path])
    twice = tmp_path / "twice.json"
    twice.write_text('{"g": {"Q": "a"}, "g": {"Q": "b"}}')
    refuses(r"twice\.json: key 'g' appears twice", webqa.read_release, [twice])


@pytest.mark.parametrize(
    "data", [[], {"g": []}, {"g": {"answer": "x"}}, {"g": {"sources": [1.5], "answer": "x"}}]
)
def test_wrong_submission(tmp_path, data):
    path = tmp_path / "submission.json"
    path.write_text(json.dumps(data))
    refuses(r"submission\.json", webqa.parse_submission, read_json(path), path)
