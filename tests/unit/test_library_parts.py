"""The library of a row: whose pictures and ids are whose, and what is refused."""

import numpy as np
import pytest
from cli_runs import ROOT
from ml_collections import ConfigDict
from test_shots import FakeEmbedder

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.runs.parts import KnowledgeSpec, check_prompted, open_knowledge
from mmqa_jax.runs.row import read_row
from mmqa_jax.runs.verbs.judging import run_judging
from mmqa_jax.tasks import embedder as embedder_module
from mmqa_jax.tasks import library as library_module
from mmqa_jax.tasks.library import LibrarySpec, open_library
from mmqa_jax.tasks.registry import check_config
from tests.pictures import plain
from tests.refusals import refuses


def png(shade: int) -> bytes:
    return plain((shade, 2 * shade, 0))


def corpus_of(name: str, first: int, *, split: str = "train") -> Corpus:
    """Questions with the ids 0 to 5; of corpora named alike, some have pictures in one alone."""
    questions = [
        Question(
            str(n), split, f"{name} asks {n} ?", f"{n}.png" if n % 2 == first else None,
            answers=("yes",), positives=(f"{n}",),
        )
        for n in range(6)
    ]  # fmt: skip
    sources = [Source(str(n), "image", f"{name} shows {n}", image=f"{n}.png") for n in range(6)]
    shades = {f"{n}.png": png(20 * first + n + 1) for n in range(6)}
    return Corpus(sources, questions, shades.get, f"hash of {name} {first}", {"name": name})


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Opens the library of another corpus for a row; both are embedded by one fake."""
    fake = FakeEmbedder()

    def open_it(row: Corpus, home: Corpus, **spec):
        monkeypatch.setattr(library_module, "open_corpus", lambda folder: home)
        monkeypatch.setattr(
            embedder_module, "open_embedder", lambda model, corpus: (fake, PictureStore(corpus, 2))
        )
        monkeypatch.setenv("MMQA_CACHE", str(tmp_path))
        given = {"data": "elsewhere", "text_model": "clip", "image_model": "clip", **spec}
        told = {}
        library = open_library(row, LibrarySpec(**given), on_model=told.__setitem__)
        assert told == {"text_model": fake, "image_model": fake}
        return library

    return open_it


def picture(corpus: Corpus, name: str) -> np.ndarray:
    """The vector of a picture."""
    pixels = PictureStore(corpus, 2).pixels(corpus.row[name.removesuffix(".png")])
    return FakeEmbedder().embed_pictures([pixels])[0]


def test_examples_of_more_splits(opened):
    """As Prophet's examples for A-OKVQA's test split, of train and val."""
    home = Corpus(
        [], [Question(split, split, "?", answers=("a",)) for split in ("train", "val", "test")],
        {}.get, "two splits", {"name": "two splits"},
    )  # fmt: skip
    for more, found in (((), ["train"]), (("val",), ["train", "val"])):
        library = opened(home, home, more_splits=more)
        assert [example.id for example in library.examples] == found


def test_ids_of_two_corpora_say_nothing_of_each_other(opened):
    """Every query is compared by its own picture with all examples, that of its id included."""
    home, row = corpus_of("library", 0), corpus_of("row", 1, split="test")
    for query, shots in zip(
        row.questions(), opened(row, home).select(row.questions(), 9, "image"), strict=True
    ):
        found = {shot.question.id: shot.similarity for shot in shots}
        expected = dict.fromkeys(map(str, range(6)), 0.0)
        if query.image:
            own = picture(row, query.image)
            for example in home.questions():
                if example.image:
                    expected[example.id] = float(own @ picture(home, example.image))
        assert found == pytest.approx(expected, abs=1e-6)


def test_sources_are_those_of_the_questions_own_corpus(opened):
    home, row = corpus_of("library", 0), corpus_of("row", 1, split="test")
    library = opened(row, home)
    (shots,) = library.select(row.questions()[:1], 9, "question_and_sources")
    fake, query = FakeEmbedder(), row.questions()[0]
    asked = fake.embed_questions([query.question])[0]
    for shot in shots:
        of_example = fake.embed_questions([shot.question.question])[0]
        sources = picture(row, "0") @ picture(home, shot.question.id)
        assert shot.similarity == pytest.approx(float(asked @ of_example + sources), abs=1e-6)


def test_a_library_without_an_image_model_compares_texts(monkeypatch, tmp_path):
    """Of sources their captions, though they have pictures."""
    home, row = corpus_of("library", 0), corpus_of("row", 1, split="test")
    fake = FakeEmbedder()
    monkeypatch.setattr(library_module, "open_corpus", lambda folder: home)
    monkeypatch.setattr(
        embedder_module, "open_embedder", lambda model, corpus: (fake, PictureStore(corpus, 2))
    )
    monkeypatch.setenv("MMQA_CACHE", str(tmp_path))
    library = open_library(row, LibrarySpec(data="elsewhere", text_model="clip", image_model=""))
    (query, *_) = row.questions()
    asked, shown = fake.embed_questions([query.question, "row shows 0"])
    for similarity, share in (("question", 0.0), ("question_and_sources", 1.0)):
        (shots,) = library.select([query], 9, similarity)
        assert len(shots) == 6
        for shot in shots:
            caption = f"library shows {shot.question.id}"
            other, figure = fake.embed_questions([shot.question.question, caption])
            expected = float(asked @ other + share * (shown @ figure))
            assert shot.similarity == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("again", [True, False])
def test_ids_of_one_benchmark_are_those_of_one_question(opened, again):
    """Another preparation of it, or the row's own corpus: no question is its own shot."""
    row = corpus_of("benchmark", 1)
    home = corpus_of("benchmark", 0) if again else row
    library = opened(row, home, data="elsewhere" if again else "")
    for query, shots in zip(
        row.questions(), library.select(row.questions(), 9, "question"), strict=True
    ):
        assert {shot.question.id for shot in shots} == {*map(str, range(6))} - {query.id}


def test_a_library_without_its_pictures_decoded(opened, monkeypatch):
    """What is embedded is not decoded again, though the library is opened anew."""
    home, row = corpus_of("library", 0), corpus_of("row", 1)
    first = opened(row, home).select(row.questions(), 2, "bimodal")
    monkeypatch.setattr(PictureStore, "_decode", lambda *_: pytest.fail("a picture is decoded"))
    again = opened(row, home).select(row.questions(), 2, "bimodal")
    assert [[s.question.id for s in own] for own in first] == [
        [s.question.id for s in own] for own in again
    ]


def test_pictures_decoded_in_another_way_are_other_contents():
    corpus = corpus_of("row", 1)
    stores = [
        PictureStore(corpus, 2), PictureStore(corpus, 3), PictureStore(corpus, 2, "squash"),
        PictureStore(corpus, 2, alpha="dropped"), PictureStore(corpus, 2, scaled=True),
    ]  # fmt: skip
    digests = {store.encoded("1.png").digest for store in stores}
    assert len(digests) == len(stores)
    assert stores[0].encoded("1.png").digest != stores[0].encoded("2.png").digest
    assert stores[0].encoded("none.png") is stores[0].encoded(None) is None
    assert stores[1].over(corpus_of("other", 0)).encoded("1.png").decode().shape == (3, 3, 3)


def test_an_empty_library_names_the_splits_that_there_are(opened):
    home = corpus_of("library", 0)
    message = (
        r"parts\.library\.split=val: the library of examples is empty; name a split with answers "
        r"\(train\), or set shots to 0"
    )
    refuses(message, opened(home, home, split="val").select, home.questions(), 1, "random")
    with pytest.raises(UserError, match=r"modality text, .*data in parts\.library\.data"):
        opened(home, home, modality="text").select(home.questions(), 1, "random")


@pytest.mark.parametrize("similarity", ["bimodal", "question_and_sources"])
def test_two_spaces_are_not_added(similarity):
    library = {"text_model": "minilm", "image_model": "runs/clip"}
    message = r"text_model=minilm and parts\.library\.image_model=runs/clip are no common space"
    refuses(message, check_prompted, {"similarity": similarity}, LibrarySpec(**library))
    check_prompted({"similarity": similarity, "shots": 0}, LibrarySpec(**library))
    check_prompted({"similarity": "question_and_image"}, LibrarySpec(**library))
    one = {"text_model": "runs/clip/", "image_model": "runs/clip"}
    check_prompted({"similarity": similarity}, LibrarySpec(**one))
    check_prompted(
        {"similarity": similarity}, LibrarySpec(**{"text_model": "minilm", "image_model": ""})
    )


@pytest.mark.parametrize("similarity", ["image", "question_and_image"])
def test_pictures_need_an_encoder(similarity):
    message = (
        rf"options\.similarity={similarity}: needs an .*; set parts\.library\.image_model to a CLIP"
    )
    refuses(message, check_prompted, {"similarity": similarity}, LibrarySpec(text_model="minilm"))


def test_two_spaces_of_training_and_judging(tmp_path):
    models = {"text_model": "minilm", "image_model": "runs/clip"}
    config = load_config(f"{ROOT}/configs/scienceqa/rmr_retriever.py:judge")
    config.parts.library.update(models)
    refuses(r"config key judge\.similarity=bimodal: adds", run_judging, config, tmp_path / "judged")
    config = load_config(f"{ROOT}/configs/scienceqa/rmr_finetune.py")
    config.library.update(models)
    refuses(r"similarity=bimodal: .* those of library\.text_model", check_config, config)


@pytest.mark.parametrize("folds", [0, -2])
def test_folds_below_one_are_refused(folds, tmp_path):
    message = rf"folds={folds}: at least 1 was expected"
    refuses(message, read_typed, LibrarySpec, ConfigDict({"folds": folds}), "parts.library")
    config = load_config(f"{ROOT}/configs/okvqa/tables.py:smollm2_random")
    config.parts.library.folds = folds
    refuses(rf"parts\.library\.{message}", read_row, config)
    config = load_config(f"{ROOT}/configs/scienceqa/rmr_retriever.py:judge")
    config.parts.library.folds = folds
    refuses(rf"parts\.library\.{message}", run_judging, config, tmp_path / "judged")


def test_kinds_of_index(monkeypatch):
    library = {"index_kind": "scann", "vectors": "coco_clip_new"}
    with pytest.raises(UserError, match=r"vectors compares questions and pictures, and exactly"):
        check_prompted({"similarity": "question"}, LibrarySpec(**library))
    config = load_config(f"{ROOT}/configs/okvqa/tables.py:smollm2_random")
    config.parts.library.index_kind = "milvus"
    refuses(r"index_kind='milvus': one of exact, scann was expected", read_row, config)
    monkeypatch.setattr("mmqa_jax.retrieval.indexes.index.scann_available", lambda: False)
    with pytest.raises(UserError, match=r"parts\.library\.index_kind=scann: ScaNN cannot be"):
        check_prompted({"similarity": "question"}, LibrarySpec(**{"index_kind": "scann"}))
    check_prompted({"similarity": "random"}, LibrarySpec(**{"index_kind": "scann"}))


def test_the_library_of_a_row_is_found_by_the_retrieval_rooms_index(opened):
    pytest.importorskip("scann")
    home = corpus_of("library", 0)
    exact, indexed = (
        opened(home, home, index_kind=kind).select(home.questions(), 3, "bimodal")
        for kind in ("exact", "scann")
    )
    assert [[s.question.id for s in own] for own in indexed] == [
        [s.question.id for s in own] for own in exact
    ]


@pytest.mark.parametrize(
    ("sources", "modality", "message"),
    [
        ([], "text", r"parts\.knowledge\.data=data/x: .*no text sources .*knowledge\.modality"),
        ([], "", r"parts\.knowledge\.data=data/x: this corpus has no sources; name a corpus"),
        ([Source("1", "image", "a picture")], "text", r"has no text sources"),
    ],
)
def test_knowledge_without_sources(monkeypatch, sources, modality, message):
    monkeypatch.setattr("mmqa_jax.data.corpus.open_sources", lambda folder: Corpus(sources))
    with pytest.raises(UserError, match=message) as caught:
        open_knowledge(Corpus([]), KnowledgeSpec(data="data/x", modality=modality))
    assert "--modality" not in str(caught.value)


def test_a_row_without_sources_of_its_own():
    refuses(r"parts\.knowledge\.data is empty: the", open_knowledge, Corpus([]), KnowledgeSpec())
