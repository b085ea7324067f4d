"""BM25 from disk finds what BM25 in memory finds, to the bit; kept, resumed and refused."""

import dataclasses
import json
import mmap
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmqa_jax.cli import main
from mmqa_jax.core.checkpoints.checksums import read_sealed, write_sealed
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.text_analysis import Analyzer
from mmqa_jax.retrieval.bm25 import on_disk as bm25_disk
from mmqa_jax.retrieval.bm25 import shard as bm25_shard
from mmqa_jax.retrieval.bm25.in_memory import BM25, BM25Retriever, Norms
from mmqa_jax.retrieval.bm25.on_disk import DiskBM25, ShardGroup, build_bm25
from mmqa_jax.retrieval.bm25.shard import ShardBuilder, ShardLimits
from mmqa_jax.runs.corpora import prepare
from mmqa_jax.runs.parts import RetrieverSpec, open_bm25
from tests.bench import synthetic_passages
from tests.refusals import refuses

PLAIN = Analyzer(stop_words=False)
SMALL = ShardLimits(rows=700, tiered=8, block=100)


def random_texts(count, seed=0):
    """Words by Zipf's law, texts of 1 to 60 words, stop words, other alphabets, repetitions."""
    rng = np.random.default_rng(seed)
    names = [f"w{n}" for n in range(2_000)] + ["Straße", "ΣΊΣΥΦΟΣ", "the", "河流", "a_b"]
    drawn = (np.exp(rng.random((count, 60)) * np.log(len(names))) - 1).astype(int)
    return [
        " ".join(names[i] for i in row[: rng.integers(1, 60)]).replace("w7 ", "w7, The ")
        for row in drawn
    ]


def build(folder, texts, fingerprint="corpus", **options):
    return build_bm25(folder, lambda start: iter(texts[start:]), len(texts), fingerprint, **options)


def same(found, wanted):
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


QUERIES = [
    *("w0", "w0 w1 w2", "W3 w500 w40", "w1500", "w7 w7 w8", "the w9 of Straße", "sisyphos ΣΊΣΥΦΟΣ"),
    *("absent", "absent w1", "河流 w0", "", "the", "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"),
]


@pytest.fixture(scope="module")
def texts():
    blank = ["", "the of", "w3", "w3", "w3", "w0 " * 300]
    return random_texts(3_000) + blank + random_texts(500, seed=1)[::-1] + ["w3", "w1 w2"] * 9


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bm25")
    assert build(folder, texts, limits=SMALL)
    return folder


@pytest.fixture(scope="module")
def in_memory(texts):
    return BM25(texts)


@pytest.mark.parametrize("top_k", [1, 10, 200, 3_524])
def test_rows_scores_and_ties_are_those_in_memory(folder, texts, in_memory, top_k):
    index = DiskBM25(folder)
    assert len(index) == len(texts) == 3_524
    assert len(list(next(folder.glob("shards-*")).iterdir())) == 6
    more = [" ".join(text.split()[:6]) for text in texts[:60]]
    more += [*texts[60:80], " ".join(texts[80:95])]  # whole sources, and some hundred words
    same(index.search(QUERIES + more, top_k), in_memory.search(QUERIES + more, top_k))


def test_pages_that_were_read_are_not_held(folder):
    index = DiskBM25(folder)
    first = index.search(QUERIES, 50)
    held = [shard._rows.base.base for shard in index._shards]
    assert all(isinstance(pages, mmap.mmap) for pages in held)
    for line in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        if str(folder) in line and "/rows.npy" in line:
            assert "Rss:                   0 kB" in line
    same(index.search(QUERIES, 50), first)  # they are read again


def test_masked_scored_and_restricted_as_in_memory(folder, texts, in_memory):
    index = DiskBM25(folder, "corpus", texts.__getitem__)
    allowed = np.random.default_rng(2).random(len(texts)) < 0.3
    same(index.search(QUERIES, 20, allowed), in_memory.search(QUERIES, 20, allowed))
    rows = [3_400, 5, 5, 1_200, 3_001, 0]
    for query in QUERIES:
        np.testing.assert_array_equal(index.scores(query, rows), in_memory.scores(query, rows))
        same(index.search_within(query, rows, 4), in_memory.search_within(query, rows, 4))
    assert index.search_within("w0", [3_000, 3_001], 2)[0].tolist() == []  # no words in them
    refuses("another corpus", index.search_within, "w0", [3_524], 1)
    refuses("top_k=3525", index.search, ["w0"], 3_525)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"k1": 0.9, "b": 0.4}, ShardLimits(postings=5_000, tiered=4, block=100)),
        ({"k1": 2.0, "b": 0.0, "analyzer": PLAIN}, ShardLimits(words=1_000, tiered=300, block=100)),
    ],
)
def test_other_options_and_shards_that_fill_by_postings_or_words(texts, tmp_path, options, limits):
    build(tmp_path, texts, limits=limits, **options)
    same(DiskBM25(tmp_path).search(QUERIES, 50), BM25(texts, **options).search(QUERIES, 50))


def test_ties_over_groups_of_shards_stay_in_the_order_of_rows(tmp_path):
    texts = ["w1 w2", "w1 w3", "w2 w9", "w1 w2"] * 600 + ["w1 w2 w2"]
    build(tmp_path, texts, limits=ShardLimits(rows=200, tiered=8, block=100))
    index, wanted = DiskBM25(tmp_path), BM25(texts)
    assert [group.rows for group in index._groups] == [1_000, 1_000, 401]
    asked = ["w1 w2", "w2", "w9 w1", "w3 absent"]
    allowed = np.arange(len(texts)) % 4 != 0
    for top_k in (1, 2, 100, 500, 1_201):
        same(index.search(asked, top_k), wanted.search(asked, top_k))
        same(index.search(asked, top_k, allowed), wanted.search(asked, top_k, allowed))
    assert index.search(["w2"], 1)[0].item() == 2_400
    for number, query in enumerate(asked):  # a search leaves nothing behind for the next
        found = index.search([query], 50)
        same(found, tuple(part[number : number + 1] for part in wanted.search(asked, 50)))


def test_the_next_tier_bounds_what_is_not_read(folder):
    """Over shards together, and the postings of the first tiers are as many as they say."""
    index = DiskBM25(folder)
    for place, group in enumerate(index._groups):
        shards = index._shards[place * bm25_disk._TOGETHER :][: bm25_disk._TOGETHER]
        for word in ("w0", "w3", "w20", "w300"):
            numbers = [shard.number(word) for shard in shards]
            (tiers,) = group.tiers([numbers])
            rows, counts = group.postings(numbers, tiers, len(tiers.bounds))
            impacts = counts / (counts + group.norms[rows])
            for taken in range(len(tiers.bounds) + 1):
                read, _ = group.postings(numbers, tiers, taken)
                assert len(np.unique(read)) == len(read) == tiers.sizes[:taken].sum()
                unread = impacts[~np.isin(rows, read)]
                assert unread.max(initial=0) <= tiers.behind(taken) * (1 + 1e-6)
            assert (np.diff(tiers.worth) <= 1e-12).all()


def test_what_is_not_read_is_what_cannot_matter(folder, in_memory, monkeypatch):
    read = []
    original = ShardGroup.postings

    def counted(self, numbers, tiers, taken):
        found = original(self, numbers, tiers, taken)
        read.append(len(found[0]))
        return found

    monkeypatch.setattr(ShardGroup, "postings", counted)
    queries = ["w0 w1 w300", "w2 w3 w700"]
    found = DiskBM25(folder).search(queries, 5)
    with_bounds = sum(read)
    read.clear()
    all_tiers = lambda tiers, *_: [len(t.bounds) for t in tiers]  # noqa: E731
    monkeypatch.setattr(bm25_disk, "_choose_tiers", all_tiers)
    same(DiskBM25(folder).search(queries, 5), found)
    assert with_bounds < sum(read) / 2


def test_up_to_date_is_left_and_another_corpus_replaced(texts, tmp_path):
    assert build(tmp_path, texts[:900], limits=SMALL)
    assert not build(tmp_path, texts[:900], limits=SMALL)
    refuses("corpus_fingerprint is 'corpus' but 'other' was expected", DiskBM25, tmp_path, "other")
    assert build(tmp_path, texts[:900], "other", limits=SMALL)
    assert len(DiskBM25(tmp_path, "other")) == 900
    assert len(list(tmp_path.glob("shards-*"))) == 1


def test_an_index_of_other_words_is_refused_and_made_anew(texts, tmp_path):
    build(tmp_path, texts[:50], analyzer=PLAIN)
    assert DiskBM25(tmp_path).search(["the"], 1)[0].item() >= 0  # words as the index states them
    with pytest.raises(UserError, match="'stop_words': False"):
        DiskBM25(tmp_path, analyzer=Analyzer())
    path = tmp_path / "manifest.json"
    job = read_sealed(path, "")
    old = {key: value for key, value in job.items() if key != "analyzer"}
    write_sealed(path, {**old, "stop_words": False})  # as the program before wrote it
    refuses("its words are those of another version", DiskBM25, tmp_path)
    assert build(tmp_path, texts[:50])
    assert DiskBM25(tmp_path, analyzer=Analyzer()).search(["the"], 1)[0].item() == -1


def test_nothing_to_find_is_refused(tmp_path):
    refuses("the corpus is empty", build, tmp_path, [])
    refuses("none of the 2 sources contains a word", build, tmp_path, ["the", "!"])
    with pytest.raises(UserError, match="ended after 1 of 2 sources"):
        build_bm25(tmp_path, lambda start: ["word"], 2, "other")
    refuses("not found, a BM25 index was expected there", DiskBM25, tmp_path)


def test_a_damaged_file_is_refused_and_built_again(folder, texts, tmp_path):
    copy = tmp_path / "index"
    shutil.copytree(folder, copy)
    file = sorted(copy.glob("shards-*/00003/rows.npy"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refuses(r"00003: rows.npy is damaged", DiskBM25, copy)
    assert build(copy, texts, limits=SMALL)
    DiskBM25(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "rows": 5}))
    refuses(r"manifest.json: is damaged", DiskBM25, copy)


@pytest.mark.parametrize("taken", ["00001", "00005"], ids=["as long", "shorter"])
def test_another_shard_in_the_place_of_one_is_refused(folder, tmp_path, taken):
    """As after an incomplete copy: each is whole, but its sources are those of other rows."""
    shutil.copytree(folder, tmp_path / "index")
    (shards,) = (tmp_path / "index").glob("shards-*")
    shutil.rmtree(shards / "00000")
    shutil.copytree(shards / taken, shards / "00000")
    refuses(r"index: its shards are not those that.*; delete the fol", DiskBM25, tmp_path / "index")


def test_a_word_that_fills_a_source_is_refused(monkeypatch):
    monkeypatch.setattr(bm25_shard, "_COUNT_BITS", 5)
    builder = ShardBuilder(Analyzer(), SMALL)
    builder.add(["w1 " * 31])
    refuses("the word 'w1' 32 times, more than 31; split it", builder.add, ["w2", "w1 " * 32])


@pytest.mark.parametrize("other", [5.0, 20.0, 80.0])
def test_bounds_hold_at_another_mean_length(other):
    """Impacts are written at the mean length of their shard, and bound those at that of all."""
    here, there = Norms(1.5, 0.75, 20.0), Norms(1.5, 0.75, other)
    lengths, counts = np.meshgrid(np.arange(1, 200), np.arange(1, 9))
    written, now = (counts / (counts + norms.of(lengths)) for norms in (there, here))
    bounds = here.bounds(written, there)
    assert (bounds >= now - 1e-12).all()
    if other == here.mean_length:
        np.testing.assert_allclose(bounds, now, rtol=1e-12)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from mmqa_jax.data.text_analysis import Analyzer
from mmqa_jax.retrieval.bm25.on_disk import build_bm25
from mmqa_jax.retrieval.bm25.shard import ShardLimits
folder, (texts, limits) = Path(sys.argv[1]), map(json.loads, sys.stdin)
def die(done, rows):
    if done > 1_250:
        os.kill(os.getpid(), signal.SIGKILL)
build_bm25(folder, lambda start: iter(texts[start:]), len(texts), "corpus",
           limits=ShardLimits(**limits), on_progress=die, analyzer=Analyzer(stop_words=False))
"""


@pytest.mark.slow
def test_killed_it_goes_on_behind_the_last_whole_shard(tmp_path):
    texts, begun, limits = random_texts(1_600), [], dataclasses.replace(SMALL, rows=400)
    told = f"{json.dumps(texts)}\n{json.dumps(dataclasses.asdict(limits))}"
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, input=told, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "manifest.json").exists()

    def texts_from(start):
        begun.append(start)
        return iter(texts[start:])

    # Without stop words, whose list is bm25s's: the import takes longer than such an index.
    assert build_bm25(tmp_path, texts_from, 1_600, "corpus", limits=limits, analyzer=PLAIN)
    assert begun[0] in (800, 1_200)
    wanted = BM25(texts, analyzer=PLAIN).search(QUERIES, 30)
    same(DiskBM25(tmp_path).search(QUERIES, 30), wanted)


@pytest.mark.slow
def test_bm25_from_disk_over_sources_on_disk(tmp_path, monkeypatch):
    passages, asked, articles = tmp_path / "psgs_w100.tsv", tmp_path / "asked", tmp_path / "wiki"
    monkeypatch.setattr(synthetic_passages, "_VOCABULARY", 20_000)
    monkeypatch.setattr(synthetic_passages, "_BLOCK", 1_000)
    synthetic_passages.write_passages(passages, 1_000)
    assert main(["prepare", "dpr", f"--raw={passages}", f"--out={articles}"]) == 0
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "sources.jsonl").write_text('{"id": "own", "modality": "text", "text": "own"}\n')
    texts = [open_corpus(articles).sources[row].text for row in (5, 900)]
    asks = [" ".join(text.split()[:8]) for text in texts]
    rows = [{"id": f"q{n}", "split": "test", "question": text} for n, text in enumerate(asks)]
    (raw / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare("corpus", raw, asked)
    index = tmp_path / "index"
    assert main(["index", "--kind=bm25", f"--data={articles}", f"--out={index}"]) == 0
    search = ["search", f"--data={asked}", f"--sources={articles}", "--method=bm25", "--top_k=50"]
    found = []
    for flags in ([], [f"--index={index}"]):
        out = tmp_path / f"{len(found)}.jsonl"
        assert main([*search, *flags, f"--out={out}"]) == 0
        found.append(out.read_text())
    assert found[0] == found[1]
    assert [json.loads(line)["sources"][0] for line in found[0].splitlines()] == ["6", "901"]
    corpus = open_corpus(articles)
    retriever = BM25Retriever(corpus, open_bm25(corpus, RetrieverSpec("bm25", index=str(index))))
    given = [Ranking("q", ("9", "6"), (0, 0))]
    (own,) = retriever.search_within([Question("q", "", asks[0])], given)
    assert own.sources[0] == "6"
    monkeypatch.setattr("mmqa_jax.runs.parts._MOST_IN_MEMORY", 999)
    with pytest.raises(UserError, match="1,000 sources are too many for an index in memory; run"):
        open_bm25(corpus, RetrieverSpec("bm25"))
