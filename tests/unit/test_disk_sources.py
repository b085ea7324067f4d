"""Sources on disk beside the same sources in memory: rows, ids, texts, damage, duplicates."""

import csv
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data import disk_sources
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus, open_corpus, open_sources
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.modality import one_modality
from mmqa_jax.runs import ask_folder
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.corpora import prepare
from mmqa_jax.runs.parts import KnowledgeSpec, open_knowledge
from tests.bench import synthetic_passages
from tests.refusals import refuses

ROWS = 1_300  # five batches and a rest


@pytest.fixture(scope="module")
def tsv(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("dpr"), ROWS)


def write(folder: Path, count: int) -> Path:
    path = folder / "psgs_w100.tsv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_passages, "_VOCABULARY", 20_000)
        patch.setattr(synthetic_passages, "_BLOCK", 1_000)
        synthetic_passages.write_passages(path, count)
    return path


@pytest.fixture(scope="module")
def prepared(tsv, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "dpr"
    prepare("dpr", tsv.parent, out)
    return out


@pytest.fixture(scope="module")
def memory(tsv) -> Corpus:
    """The passages as DPR's authors read their file."""
    with open(tsv, newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    return Corpus([Source(name, "text", text, title) for name, text, title in rows])


def same(one: Source, other: Source) -> bool:
    return (one.id, one.modality, one.text, one.title, one.image) == (
        *(other.id, other.modality, other.text, other.title, other.image),
    )


def test_the_corpus_is_that_in_memory(prepared, memory):
    disk = open_corpus(prepared)
    assert len(disk) == len(memory) == ROWS
    assert disk.on_disk
    assert not memory.on_disk
    assert all(same(a, b) for a, b in zip(disk.sources, memory.sources, strict=True))
    assert list(disk.row) == list(memory.row)
    for row in (0, 255, 256, 700, ROWS - 1, -1):
        assert same(disk.sources[row], memory.sources[row])
    assert [s.id for s in disk.sources[250:260]] == [s.id for s in memory.sources[250:260]]
    assert [s.id for s in disk.sources.from_row(300)] == list(memory.ids)[300:]
    assert {name: disk.row[name] for name in memory.row} == memory.row
    assert "no such id" not in disk.row
    assert None not in disk.row
    with pytest.raises(KeyError):
        disk.row["0"]
    with pytest.raises(IndexError):
        disk.sources[ROWS]
    assert disk.ids[700] == memory.ids[700] == memory.sources[700].id
    assert list(disk.modality_rows("text")) == memory.modality_rows("text")
    assert not len(disk.modality_rows("image"))
    assert one_modality(disk, "text") is disk
    assert disk.sources[3].extra["url"].startswith("https://en.wikipedia.org/wiki/")


def test_a_search_finds_the_same(prepared, memory):
    questions = [Question(str(n), "test", memory.sources[n].text[:80]) for n in (5, 900)]
    found = [
        BM25Retriever(corpus).search(questions, 3) for corpus in (open_corpus(prepared), memory)
    ]
    assert found[0] == found[1]
    assert found[0][0].sources[0] == memory.sources[5].id


def test_another_process_opens_the_files_itself(prepared):
    corpus = open_sources(prepared)
    first = corpus.sources[0]
    sources, row = pickle.loads(pickle.dumps((corpus.sources, corpus.row)))
    assert sources[0] == first
    assert row[first.id] == 0


def test_the_fingerprint_is_of_the_content_alone(tsv, prepared, tmp_path):
    manifest = open_sources(prepared).manifest
    again = prepare("dpr", tsv, tmp_path / "again")
    assert again["fingerprint"] == manifest["fingerprint"]
    changed = tmp_path / "psgs_w100.tsv"
    text = tsv.read_text()
    changed.write_text(text[:5000] + text[5000:].replace("e", "a", 1))
    assert prepare("dpr", changed, tmp_path / "c")["fingerprint"] != manifest["fingerprint"]


@pytest.mark.parametrize("same_hash", [False, True], ids=["hashes", "one_hash"])
def test_an_id_that_is_there_twice_is_named(tsv, tmp_path, monkeypatch, same_hash):
    if same_hash:
        monkeypatch.setattr(disk_sources, "_hash", lambda name: 7)
    lines = tsv.read_text().split("\n")
    path = tmp_path / "psgs_w100.tsv"
    path.write_text("\n".join([*lines[:301], lines[17]]) + "\n")
    with pytest.raises(UserError, match=r"source id '17' appears twice, as source 17 and 301"):
        prepare("dpr", path, tmp_path / "out")
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_ids_of_one_hash_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_sources, "_hash", lambda name: len(name))
    prepare("dpr", write(tmp_path, 120), tmp_path / "out")
    corpus = open_sources(tmp_path / "out")
    assert {name: corpus.row[name] for name in ("7", "9", "42", "120")} == {
        **{"7": 6, "9": 8, "42": 41, "120": 119}
    }
    assert "0" not in corpus.row


def test_the_index_is_sorted_in_parts(tsv, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_sources, "_SORTED_AT_ONCE", 200)
    prepare("dpr", tsv, tmp_path / "out")
    whole, parts = (
        np.load(open_sources(folder).sources.folder / "id_hashes.npy")
        for folder in (prepared, tmp_path / "out")
    )
    np.testing.assert_array_equal(whole, parts)
    assert (np.diff(whole.astype(object)) > 0).all()


def damaged(prepared: Path, tmp_path: Path, file: str, place: float) -> Path:
    """A copy of a corpus in which a byte of a file is another."""
    out = tmp_path / "damaged"
    shutil.copytree(prepared, out)
    path = next(out.glob("records-*")) / file
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 0x10
    path.write_bytes(data)
    return out


def test_damage_in_a_text_is_found_when_it_is_read(prepared, tmp_path):
    corpus = open_sources(damaged(prepared, tmp_path, "00000.arrow", 0.5))
    assert corpus.sources[0].id == "1"  # another batch
    refuses(r"00000\.arrow: is damaged .*prepare.*--overwrite", list, corpus.sources)


def test_the_checksum_of_a_batch_is_of_all_its_texts():
    def digest(*texts: str) -> bytes:
        return disk_sources.batch_digest([pyarrow.array(texts)])

    batches = [("a", "bc"), ("a", "bd"), ("ab", "c"), ("a", "bc", ""), ("", "")]
    assert len({digest(*texts) for texts in batches}) == len(batches)
    assert digest("a", "bc") == digest("a", "bc")


@pytest.mark.parametrize("file", ["batches.npy", "image_rows.npy"])
def test_damage_beside_the_texts_is_found_at_once(prepared, tmp_path, file):
    with pytest.raises(UserError, match=f"{file} is damaged"):
        open_sources(damaged(prepared, tmp_path, file, 0.9))


def test_damage_in_the_index_is_found_by_who_looks_up(prepared, tmp_path):
    corpus = open_sources(damaged(prepared, tmp_path, "id_rows.npy", 0.9))
    assert corpus.sources[0].id == "1"
    with pytest.raises(UserError, match=r"id_rows\.npy is damaged"):
        corpus.row["1"]


@pytest.mark.parametrize("left", [0, 400, 0.5])
def test_a_cut_file_is_named(prepared, tmp_path, left):
    out = tmp_path / "cut"
    shutil.copytree(prepared, out)
    path = next(out.glob("records-*")) / "00000.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left) if left < 1 else left])
    with pytest.raises(UserError, match=r"00000\.arrow: is damaged"):
        open_sources(out).sources[0]


def test_shards_follow_each_other(tsv, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_sources, "SHARD_ROWS", 512)
    manifest = prepare("dpr", tsv, tmp_path / "out")
    corpus = open_sources(tmp_path / "out")
    assert [path.name for path in sorted(corpus.sources.folder.glob("*.arrow"))] == [
        *("00000.arrow", "00001.arrow", "00002.arrow")
    ]
    assert [source.id for source in corpus.sources] == [str(n + 1) for n in range(ROWS)]
    assert [corpus.sources[row].id for row in (511, 512, -1)] == ["512", "513", str(ROWS)]
    monkeypatch.undo()
    assert manifest["fingerprint"] == open_sources(prepared).fingerprint


def test_a_damaged_manifest_is_refused(prepared, tmp_path):
    out = tmp_path / "other"
    shutil.copytree(prepared, out)
    manifest = (out / "corpus.json").read_text()
    (out / "corpus.json").write_text(manifest.replace(f'"sources": {ROWS}', '"sources": 700'))
    refuses("does not hold the 700 sources", open_sources, out)
    next(out.glob("records-*/SHA256SUMS")).unlink()
    refuses("has no SHA256SUMS", open_sources, out)


def test_readers_and_questions_take_them_without_a_copy(prepared, memory):
    disk = open_corpus(prepared)
    asked = AskedCorpus(disk)
    assert asked.sources is disk.sources
    assert asked.on_disk
    with asked.asked("Who?", b"picture") as question:
        assert asked.question_picture(question) == b"picture"
    assert disk.with_questions([question]).sources is disk.sources
    words = [SourceReader(corpus, Letters(), on_demand=True) for corpus in (disk, memory)]
    rows = np.array([[3, 900], [-1, 5]])
    assert (words[0].text_length(rows) == words[1].text_length(rows)).all()
    assert words[0].raw(900).text == memory.sources[900].text
    assert not words[0].is_image.any()


def test_a_knowledge_base_on_disk_is_not_embedded_for_a_row(prepared, memory):
    spec = KnowledgeSpec(retriever="dense", text_model="minilm", data=str(prepared))
    said = r"config key parts\.knowledge\.index: 1,300 sources are too many .*; name the folder of"
    refuses(said, open_knowledge, memory, spec)


def test_too_many_sources_are_not_embedded_before_a_question(prepared, monkeypatch):
    monkeypatch.setattr(ask_folder, "_MOST_SOURCES", ROWS - 1)
    with pytest.raises(UserError, match="1,300 sources are too many"):
        ask_folder.open_encoded(open_corpus(prepared), "minilm")


class Letters:
    """A tokenizer whose tokens are a text's letters."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]
