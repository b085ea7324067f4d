"""`mmqa embed`, `index` and `search` over the tiny corpus."""

import json
import os
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
from cli_runs import QUESTIONS, TEST, done, mmqa, question, rows_of, succeeded, write_documents

from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.retrieval.rankings import read_rankings
from tests.forks import server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("flags", [["dense"], ["rrf"], ["fused", "--second_hop"]])
def test_dense_search_ranks_every_question(data, models, index, tmp_path, flags):
    path = tmp_path / "found.jsonl"
    result = done(
        "search", f"--data={data}", f"--method={flags[0]}", *flags[1:], "--top_k=7",
        f"--model={models / 'contrastive'}", f"--index={index}", f"--out={path}",
    )  # fmt: skip
    corpus = open_corpus(data)
    rows = rows_of(path)
    assert [row["question_id"] for row in rows] == [row["id"] for row in TEST]
    for row in rows:
        assert len(set(row["sources"])) == 7
        assert set(row["sources"]) <= set(corpus.row)
        assert row["scores"] == sorted(row["scores"], reverse=True)
    # What it prints is what `mmqa evaluate` finds in the file.
    scores = done("evaluate", "corpus", f"--references={data}", f"--predictions={path}")["scores"]
    assert {k: scores[k] for k in result["recall"]} == pytest.approx(result["recall"])


def test_search_prints_recall_and_where_the_rankings_are(data, tmp_path):
    path = tmp_path / "found.jsonl"
    flags = (f"--data={data}", "--method=bm25", "--top_k=5", f"--out={path}")
    ended = succeeded("search", *flags)
    found = done("search", *flags)
    groups = {"all": found, **found["by_modality"]}
    titles = [f"{name} ({group['questions_scored']})" for name, group in groups.items()]
    assert [cell.strip() for cell in _cells(ended.out, "all (")[1:]] == titles
    for k in (1, 2, 5):
        shown = [float(cell) for cell in _cells(ended.out, f"recall@{k} ")[1:]]
        assert shown == pytest.approx(
            [g["recall"][f"recall@{k}"] for g in groups.values()], abs=5e-4
        )
    assert f"Rankings of 5 questions: {path}" in ended.out
    again = mmqa(
        "evaluate", "corpus", f"--references={data}", f"--predictions={path}", "--markdown"
    )
    assert f"|  | {' | '.join(titles)} |" in again.out


def _cells(shown, start):
    """The cells of the row of a printed table that holds `start`."""
    (line,) = (line for line in shown.splitlines() if start in line)
    return line.strip().replace("┃", "│").split("│")[1:-1]


def test_dense_search_needs_a_model_and_an_index(data, refused, tmp_path):
    flags = ["search", f"--data={data}", f"--out={tmp_path / 'out'}"]
    for method in ("dense", "fused", "rrf"):
        message = rf"--method={method} needs --model and --index"
        refused(*flags, f"--method={method}", message=message)
        refused(*flags, f"--method={method}", "--index=somewhere", message=message)


def test_embeddings_of_another_corpus_are_refused(wrong, index, refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS[:3])
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'other'}")
    other = f"--data={tmp_path / 'other'}"
    shutil.copytree(index, tmp_path / "index")
    flags = (*wrong["embed"], other, f"--out={tmp_path / 'index'}")
    refused(*flags, message=r"corpus_fingerprint .*; name another --out or give --overwrite")
    refused(*wrong["search"], other, "--split=train", message=r"embeddings.*corpus")
    assert done(*flags, "--overwrite")["sources"] == 11


@pytest.mark.parametrize("out", ["file", "file/out", "folder"])
def test_embeddings_that_cannot_be_written(out, wrong, refused, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "embeddings").write_text("")
    flags = (*wrong["embed"], "--model=nowhere")  # seen before the model is
    refused(*flags, f"--out={tmp_path / out}", message=r"(file|embeddings) is no folder.*name ano")


def test_dense_search_reads_the_beginning_of_a_long_question(models, tmp_path):
    """As CLIP's `tokenize(truncate=True)`: two questions that differ behind it find the same."""
    beginning = "What is the capital of Hav, " * 9
    rows = [
        question(0, "test", "Hav", question=beginning + "please?"),
        question(1, "test", "Florin", question=beginning + "or rather that of Florin?"),
        question(2, "test", "Gondal"),
    ]
    corpus = f"--data={tmp_path / 'data'}"
    raw = write_documents(tmp_path / "raw", rows)
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    model, index = f"--model={models / 'contrastive'}", tmp_path / "index"
    done("embed", corpus, model, f"--out={index}")
    done("index", f"--embeddings={index}", "--kind=exact")
    out = tmp_path / "found.jsonl"
    done("search", corpus, "--method=dense", model, f"--index={index}", f"--out={out}")
    long, longer, other = (row["scores"] for row in rows_of(out))
    assert long == pytest.approx(longer, abs=1e-6)
    assert long != pytest.approx(other, abs=1e-3)


def test_embedding_jobs_are_shared_and_indexes_built_once(data, models, index, tmp_path):
    flags = ("embed", f"--data={data}", f"--model={models / 'contrastive'}")
    folder = f"--out={tmp_path / 'shared'}"
    assert done(*flags, folder, "--shard=1/2")["waiting_for_other_shards"]
    result = done(*flags, folder, "--shard=0/2")
    assert result.items() >= {"sources": 11, "dim": 32, "broken_pictures": 0}.items()
    whole, shared = (
        path / "embeddings" / "embeddings.npy" for path in (index, tmp_path / "shared")
    )
    assert whole.read_bytes() == shared.read_bytes()
    build = ("index", f"--embeddings={tmp_path / 'shared'}", "--kind=exact")
    assert done(*build) == {"rows": 11, "kind": "exact", "built": True}
    assert done(*build) == {"rows": 11, "kind": "exact", "built": False}


@pytest.mark.parametrize("shard", ["2/2", "1", "a/2", "-1/2", "0/0"])
def test_shards_that_do_not_exist(shard, wrong, refused):
    refused(*wrong["embed"], f"--shard={shard}", message=r"--shard=.* I from 0 to N - 1 was expect")


@pytest.mark.parametrize("part", ["embeddings", "index"])
def test_an_index_of_another_model_is_refused(part, wrong, index, refused, tmp_path):
    """Of the same size and corpus: only the fingerprint tells."""
    shutil.copytree(index, tmp_path / "other")
    path = tmp_path / "other" / part / "manifest.json"
    write_json(path, {**read_json(path), "model_fingerprint": "0123"})
    (path.parent / "SHA256SUMS").unlink()
    message = rf"{part}/manifest\.json: model_fingerprint is '0123' but '\w+' was expected"
    refused(*wrong["search"], f"--index={tmp_path / 'other'}", message=message)


@pytest.mark.parametrize("method", ["bm25", "fused"])  # fused asks the dense index too
def test_known_modality_finds_no_other(method, data, models, index, tmp_path):
    path = tmp_path / "found.jsonl"
    flags = (f"--model={models / 'contrastive'}", f"--index={index}", f"--out={path}")
    result = done("search", f"--data={data}", f"--method={method}", "--modality=known", *flags)
    rows = {row["question_id"]: row["sources"] for row in rows_of(path)}
    # The fourth asks for a picture; the last hides its sources, its category tells.
    assert [len(rows[f"test{n}"]) for n in range(5)] == [8, 8, 8, 3, 8]
    assert set(rows["test3"]) == {"p-Arvania", "p-Borduria", "p-Cinnabar"}
    assert all(name.startswith("s-") for name in rows["test0"])
    assert result["modality_unknown"] == 0
    # The picture comes last of three at the worst.
    assert result["by_modality"]["image"]["recall"]["recall@2"] in (0.0, 1.0)
    assert result["by_modality"]["text"]["recall"].keys() >= {"recall@1", "recall@5"}


def test_classified_modality(data, tmp_path, refused):
    """Two train questions on flags teach it; the test question on a flag is told apart."""
    flags = [
        question(n, "train", land, question=f"What color has the flag of {land}?", category="color",
                 positives=[f"p-{land}"], negatives=[])
        for n, land in enumerate(("Borduria", "Cinnabar"), start=20)
    ]  # fmt: skip
    raw = write_documents(tmp_path / "raw", [*QUESTIONS, *flags])
    corpus = f"--data={tmp_path / 'data'}"
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    path = tmp_path / "found.jsonl"
    search = ("search", corpus, "--method=bm25", "--modality=classified", f"--out={path}")
    assert done(*search)["modality_accuracy"] == 1.0
    rows = {row["question_id"]: row["sources"] for row in rows_of(path)}
    assert rows["test3"][0] == "p-Arvania"
    assert len(rows["test3"]) == 3
    # Without questions of both kinds there is nothing to learn.
    one_kind = ("search", f"--data={data}", *search[2:])
    refused(*one_kind, message="none of the 8 training questions needs image sources")


def test_restricted_and_compatible_bm25(data, tmp_path):
    path = tmp_path / "found.jsonl"
    search = ("search", f"--data={data}", f"--out={path}", "--method=bm25")
    given = {row["id"]: {*row["positives"], *row["negatives"]} for row in TEST}
    f1 = []
    for flags in ((), ("--webqa_compat",)):
        result = done(*search, "--candidates=restricted", *flags)
        assert {row["question_id"]: set(row["sources"]) for row in rows_of(path)} == given
        f1.append(result["source_f1_top_2"])
    assert f1[0] > f1[1]
    # `Hav?` is no word of the snippets: the baseline splits at spaces alone.
    compatible, plain = done(*search, "--webqa_compat"), done(*search)
    assert plain["recall"]["recall@1"] == 1.0
    assert compatible["recall"]["recall@1"] < 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--method=dense", "--webqa_compat"), r"--webqa_compat: .*--method=bm25"),
        (("--method=bm25", "--webqa_compat", "--second_hop"), r"--webqa_compat: .*plain"),
        (("--method=fused", "--candidates=restricted"), r"--candidates=restricted: works with"),
        (("--method=rrf", "--candidates=restricted"), r"--candidates=restricted: works with"),
        (("--method=fused", "--fusion_weight=1.5"), r"--fusion_weight=1\.5: .*from 0 .* to 1"),
        (("--method=fused", "--fusion_weight=nan"), r"--fusion_weight=nan: .*from 0 .* to 1"),
        (("--method=rrf", "--fusion_weight=0.5"), r"--fusion_weight: .*only with --method=fused"),
        (("--method=dense", "--tune", "--split=train"), r"--tune: .*--method=fused"),
        (("--method=fused", "--tune"), r"--tune: .*test split.*--split=val"),
        (
            ("--method=fused", "--tune", "--split=train", "--fusion_weight=0.5"),
            r"--tune and --fusion_weight: .*give one",
        ),
        (
            ("--method=fused", "--tune", "--split=val"),  # whose gold sources are hidden
            r"--tune: none of the 3 questions has gold sources",
        ),
        (
            ("--method=bm25", "--candidates=restricted", "--modality=known"),
            r"--candidates=restricted: .*without --modality",
        ),
        (("--matches=matches.html",), r"--matches: needs a retriever of pages"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, wrong, refused):
    refused(*wrong["search"], *flags, message=message)


@pytest.mark.parametrize("flags", [["--second_hop"], ["--modality=known"]])
def test_the_weight_of_the_fusion_is_chosen_on_a_split(flags, data, models, index, tmp_path):
    search = (
        "search", f"--data={data}", "--method=fused", "--split=train", "--top_k=4", *flags,
        f"--model={models / 'contrastive'}", f"--index={index}",
    )  # fmt: skip
    ended = succeeded(*search, "--tune", f"--out={tmp_path / 'tuned.jsonl'}", "--json")
    tuned = ended.value
    sweep = {row["fusion_weight"]: row for row in tuned["sweep"]}
    assert (min(sweep), max(sweep), len(sweep)) == (0.0, 1.0, 21)
    best = sweep[tuned["fusion_weight"]]
    assert best["ndcg"] == max(row["ndcg"] for row in sweep.values())
    assert f"{tuned['fusion_weight']:g} *" in ended.out
    # It finds what a search at that weight finds, and each end is one of the two retrievers.
    again = done(
        *search, f"--fusion_weight={tuned['fusion_weight']}", f"--out={tmp_path / 'again.jsonl'}"
    )
    assert rows_of(tmp_path / "tuned.jsonl") == rows_of(tmp_path / "again.jsonl")
    assert again["recall"]["recall@2"] == tuned["recall"]["recall@2"] == best["recall@2"]
    for method, weight in (("bm25", 0.0), ("dense", 1.0)):
        alone = done(*search, f"--method={method}", f"--out={tmp_path / 'alone.jsonl'}")
        assert alone["recall"]["recall@2"] == sweep[weight]["recall@2"]


def done_apart(*verbs):
    """As `done` of each, in a process of its own: Milvus Lite leaves a server's threads behind."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from cli_runs import done\n"
        "print('\\n' + json.dumps([done(*verb) for verb in json.loads(sys.argv[1])]))"
    )
    process = server().start(["-c", code, json.dumps(verbs)], os.environ)
    said, _ = process.communicate(300)
    assert process.returncode == 0, said
    (found,) = (line for line in said.splitlines() if line.startswith("["))
    return json.loads(found)


@pytest.mark.parametrize("where", ["mesh", "mesh_approx", "milvus"])
def test_other_indexes_find_the_same(where, data, models, index, tmp_path):
    copy, model = tmp_path / "index", f"--model={models / 'contrastive'}"
    shutil.copytree(index, copy)

    def search(searched, name):
        flags = ("--method=dense", model, f"--index={searched}", "--modality=known")
        return ("search", f"--data={data}", *flags, f"--out={tmp_path / name}")

    done(*search(index, "exact.jsonl"))
    if where != "milvus":
        built = done("index", f"--embeddings={copy}", f"--kind={where}")
        done(*search(copy, "other.jsonl"))
    else:
        place = f"milvus://{tmp_path}/one.db/sources"
        build = ("index", f"--embeddings={copy}", f"--index={place}")
        built, again, _ = done_apart(build, build, search(place, "other.jsonl"))
        assert not again["built"]
    assert built.pop("recall@11", 1.0) == 1.0
    assert built == {"rows": 11, "kind": where, "built": True}
    found = (rows_of(tmp_path / name) for name in ("exact.jsonl", "other.jsonl"))
    for one, other in zip(*found, strict=True):
        assert one["sources"] == other["sources"]
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)


def test_milvus_has_no_kinds(index, refused):
    flags = (f"--embeddings={index}", "--kind=exact", "--index=milvus://localhost:19530/a")
    refused("index", *flags, message="--index and --kind=exact: Milvus has its own kind")
    refused("index", *flags[::2][:1], "--index=milvus://nowhere", message="HOST:PORT/COLLECTION")
    message = r"--shard_rows: is of ScaNN; give --kind=scann with it, or leave it out"
    for others in (flags[:2], flags[::2]):
        refused("index", *others, "--shard_rows=5", message=message)


def test_rankings_as_a_run_of_trec(data, models, tmp_path):
    """Every verb that reads or writes rankings takes .trec; qrels stand in for the corpus."""
    corpus, run, qrels = f"--data={data}", tmp_path / "found.trec", tmp_path / "test.qrels"
    plain = tmp_path / "found.jsonl"
    search = ("search", corpus, "--method=bm25", "--top_k=5")
    found = done(*search, f"--out={run}", f"--qrels={qrels}")
    assert done(*search, f"--out={plain}") == found
    ids = [row["id"] for row in TEST]
    assert read_rankings(run, ids) == read_rankings(plain, ids)
    gold = [f"{row['id']} 0 {name} 1" for row in TEST for name in row["positives"]]
    assert qrels.read_text().splitlines() == gold

    references = f"--references={data}"
    by_corpus = done("evaluate", "corpus", references, f"--predictions={run}")
    assert by_corpus == done("evaluate", "corpus", references, f"--predictions={plain}")
    by_qrels = done("evaluate", "corpus", f"--references={qrels}", f"--predictions={run}")
    assert by_qrels["scores"] == by_corpus["scores"]
    assert by_qrels.items() >= {"n": 4, "missing": 0, "unjudged": 1}.items()

    reranked = tmp_path / "reranked.trec"
    model = f"--model={models / 'rerank'}"
    done("rerank", corpus, model, f"--candidates={run}", f"--out={reranked}")
    again = tmp_path / "reranked.jsonl"
    done("rerank", corpus, model, f"--candidates={plain}", f"--out={again}")
    assert read_rankings(reranked, ids) == read_rankings(again, ids)
    out = f"--out={tmp_path / 'predictions.jsonl'}"
    reader = ("answer", corpus, f"--model={models / 'answer'}", "--threshold=0")
    assert done(*reader, f"--sources={reranked}", out)["questions"] == 5


def test_runs_and_qrels_that_are_refused(data, refused, tmp_path):
    out = f"--out={tmp_path / 'x.trec'}"
    run, qrels, spaced = tmp_path / "r.trec", tmp_path / "t.qrels", tmp_path / "spaced"
    rows = [question(0, "test", "Hav", positives=[], negatives=[]) | {"id": "test 0"}]
    raw = write_documents(tmp_path / "raw", rows)
    done("prepare", "corpus", f"--raw={raw}", f"--out={spaced}")
    run.write_text("test0 Q0 s-Hav 1 0.5 x\ntest0 Q0 s-Nowhere 2 0.5 x\n")
    qrels.write_text("test0 0 s-Hav 0\n")
    evaluate = ("evaluate", "corpus", f"--predictions={run}")
    refused("search", f"--data={spaced}", "--method=bm25", out, message="'test 0' .* has a space")
    hidden = ("--method=bm25", f"--out={tmp_path / 'x.jsonl'}", f"--qrels={tmp_path / 'x.qrels'}")
    refused("search", f"--data={spaced}", *hidden, message="none of the 1 questions has gold")
    refused(*evaluate, f"--references={data}", message=r"r\.trec, line 1: source 's-Nowhere' is")
    refused(*evaluate, f"--references={qrels}", message=r"t\.qrels: judges no source relevant")
    qrels.write_text("other 0 s-Hav 1\n")
    refused(*evaluate, f"--references={qrels}", message="ranks none of the 1 questions")
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"question_id": "test0", "answer": "x"}))
    flags = (f"--references={qrels}", f"--predictions={answers}")
    refused("evaluate", "corpus", *flags, message="answers.jsonl holds no rankings")


def test_questions_that_a_run_or_qrels_lack_are_said(tmp_path, quiet):
    run, qrels = tmp_path / "r.trec", tmp_path / "t.qrels"
    run.write_text("q1 Q0 a 1 2 x\nq1 Q0 b 2 1 x\nq3 Q0 a 1 1 x\n")
    qrels.write_text("q1 0 b 2\nq2 0 a 1\nq3 0 a 0\n")
    flags = ("evaluate", "corpus", f"--references={qrels}", f"--predictions={run}")
    ended = mmqa(*flags, "--json")
    assert ended.value["scores"].items() >= {"mrr": 0.25, "recall@2": 0.5, "recall@1": 0}.items()
    assert "1 of 2 questions have no ranking and count 0" in ended.err
    assert "1 questions have no relevant source" in ended.err
    assert done(*flags, "--only_given")["scores"]["mrr"] == 0.5


def test_an_index_for_faiss(data, index, refused, tmp_path):
    out = tmp_path / "faiss"
    result = done("index", f"--embeddings={index}", "--export=faiss", f"--out={out}")
    assert result == {"rows": 11, "dim": 32, "kind": "faiss", "out": str(out)}
    sources = open_corpus(data).sources
    assert (out / "docid").read_text().splitlines() == [source.id for source in sources]
    assert (out / "ATTRIBUTION.txt").read_text() == "Flags of lands, by nobody, CC0\n"
    vectors = np.load(index / "embeddings" / "embeddings.npy")
    searched = faiss.read_index(str(out / "index"))
    assert searched.search(vectors, 1)[1][:, 0].tolist() == list(range(11))
    # The corpus has been moved, and another one stands in its place.
    moved = tmp_path / "index"
    shutil.copytree(index, moved)
    write_json(moved / "embed.json", {"data": str(tmp_path / "gone"), "model": "m"})
    flags = ("index", f"--embeddings={moved}", "--export=faiss", f"--out={out}")
    assert done(*flags, f"--data={data}") == result
    refused(*flags, message=r"--data: the corpus of .* \(.*gone\) is not there.*name its folder")
    raw = write_documents(tmp_path / "raw", QUESTIONS[:3])
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'other'}")
    refused(*flags, f"--data={tmp_path / 'other'}", message="is not the corpus that was embedded")
    refused(*flags[:3], message="--export=faiss: needs --out")
    refused(*flags, "--kind=exact", message="--kind=exact and --export: .* leave --kind=exact out")
    refused(*flags[:2], f"--out={out}", message="--out: is of an export; give --export=faiss")
    refused(*flags[:3], f"--out={moved}", f"--data={data}", message=r"index: is a folder")


def test_bm25_from_disk_finds_what_it_finds_in_memory(data, models, index, refused, tmp_path):
    corpus, out = f"--data={data}", tmp_path / "index"
    shutil.copytree(index, out)
    built = done("index", "--kind=bm25", corpus, f"--out={out}")
    assert built == {"rows": 11, "kind": "bm25", "built": True}
    assert not done("index", "--kind=bm25", corpus, f"--out={out}")["built"]
    dense = (f"--model={models / 'contrastive'}", f"--index={index}")
    for name, flags, with_disk in (
        ("bm25", ("--method=bm25",), f"--index={out}"),
        ("hop", ("--method=bm25", "--second_hop"), f"--index={out}"),
        ("own", ("--method=bm25", "--candidates=restricted"), f"--index={out}"),
        ("fused", ("--method=fused", *dense), f"--index={out}"),
    ):
        found = []
        for place in ("", with_disk):
            path = tmp_path / f"{name}{len(found)}.jsonl"
            done("search", corpus, *flags, *filter(None, [place]), f"--out={path}")
            found.append(rows_of(path))
        assert found[0] == found[1]
    search = ("search", corpus, "--method=bm25", f"--out={tmp_path / 'no.jsonl'}")
    refused(*search, f"--index={tmp_path / 'gone'}", message="gone: .*; run `mmqa index`")
    raw = write_documents(tmp_path / "raw", QUESTIONS[:3])
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'other'}")
    other = ("search", f"--data={tmp_path / 'other'}", "--method=bm25", f"--index={out}")
    other = (*other, "--split=train")
    refused(*other, f"--out={tmp_path / 'no.jsonl'}", message="another model, corpus or setting")
    needs = ("index", "--kind=bm25", f"--out={out}")
    refused(*needs, message="--kind=bm25: needs --data; give the corpus")
    refused(*needs, f"--embeddings={index}", message="--embeddings and --kind=bm25: BM25 is built")
    refused("index", message="--embeddings: is missing, the folder written by `mmqa embed`")
