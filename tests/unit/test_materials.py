"""Credits: what a corpus is made of, from `mmqa prepare` to every page that shows it."""

import dataclasses
import json
from pathlib import Path

import pytest
from cli_runs import ROOT, done, mmqa, write_rows
from starlette.testclient import TestClient

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import open_benchmark, read_corpus
from mmqa_jax.core.config import load_config
from mmqa_jax.data.corpus import Corpus, corpus_of_lists, open_corpus
from mmqa_jax.data.formats.official import BenchmarkFiles
from mmqa_jax.data.records.corpus_records import materials_beside, write_notice
from mmqa_jax.data.schema import Material, Question, Source, united
from mmqa_jax.runs import corpora
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.row import Row, read_row
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.run import _of_workdir
from mmqa_jax.serve.systems import Parts, Threads
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")

# Words of the credits of each benchmark: its paper, and the license that its release states.
CREDITS = {
    "vqav2": ("Goyal et al., CVPR 2017", "CC BY 4.0", "Flickr's terms of use"),
    "okvqa": ("Marino et al., CVPR 2019", "CC BY 4.0", "Flickr's terms of use", "MIT"),
    "aokvqa": ("Schwenk et al., ECCV 2022", "Apache-2.0", "Flickr's terms of use", "MIT"),
    "scienceqa": ("Lu et al., NeurIPS 2022", "CC BY-NC-SA 4.0"),
    "mmbench": ("Liu et al., ECCV 2024", "Apache-2.0"),
    "seedbench": ("Li et al., CVPR 2024", "Apache-2.0", "CC3M"),
    "multimodalqa": ("Talmor et al., ICLR 2021", "Wikipedia", "CC BY-SA"),
    "infoseek": ("Chen et al., EMNLP 2023", "OVEN"),
    "evqa": ("Mensink et al., ICCV 2023", "iNaturalist 2021", "Google Landmarks v2"),
    "mbeir": ("Wei et al., ECCV 2024", "under their own licenses"),
    "vidore": ("Faysse et al. 2024",),
    "bright": ("Su et al., ICLR 2025", "CC BY 4.0"),
    "mmlongbench": ("Ma et al., NeurIPS 2024", "CC BY-NC 4.0"),
    "citevqa": ("Ma et al., 2026", "MIT, its documents for research and no commerce"),
    "dynvqa": ("Li et al., ICLR 2025", "under their own licenses"),
    "mmsearch": ("Jiang et al., ICLR 2025", "under their own licenses"),
    "fvqa": ("Wu et al., 2025", "InfoSeek"),
    "livevqa": ("Fu et al., 2025", "MIT"),
    "mmeb": ("Jiang et al., ICLR 2025", "Apache-2.0"),
    "mmmu": ("Yue et al., CVPR 2024", "Apache-2.0"),
    "mragbench": ("Hu et al., ICLR 2025", "CC BY 4.0"),
    "mathvista": ("Lu et al., ICLR 2024", "CC BY-SA 4.0"),
}


def lines(materials) -> list[str]:
    return list(map(str, materials))


def prepared(folder: Path, notice: str, name: str = "s") -> Path:
    """A corpus of two questions and three sources, with this notice."""
    raw, out = folder / "raw", folder / "data"
    raw.mkdir(parents=True)
    write_rows(
        raw / "sources.jsonl",
        [{"id": f"{name}{n}", "modality": "text", "text": text}
         for n, text in enumerate(("Grass is green.", "Ice is cold.", "Snow is white."))],
    )  # fmt: skip
    question = {
        "id": "q",
        "question": "What is green?",
        "answers": ["grass"],
        "positives": [f"{name}0"],
    }
    write_rows(raw / "questions.jsonl", [question, {**question, "id": "q2"}])
    if notice:
        (raw / "ATTRIBUTION.txt").write_text(notice)
    done("prepare", "corpus", f"--raw={raw}", f"--out={out}")
    return out


def credits_of(page: Path) -> list[str]:
    """The paragraphs at the page's end, but for the last one."""
    footer = page.read_text().split("<footer>")[1].split("</footer>")[0]
    return [part.split("</p>")[0] for part in footer.split("<p>")[1:-1]]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_keeps_its_credits(name, tmp_path, monkeypatch, capsys):
    questions = [Question("q", "test", "?")]
    stub = BenchmarkFiles(questions, {}, {}, [], sources=[Source("s", "text", "x")])
    benchmark = dataclasses.replace(open_benchmark(name), read=lambda folder: stub)
    monkeypatch.setattr(f"mmqa_jax.benchmarks.{name}.BENCHMARK", benchmark)
    (tmp_path / "raw").mkdir()
    printed = mmqa("prepare", name, f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'out'}").out
    materials = open_corpus(tmp_path / "out").materials
    assert materials
    for line in lines(materials):
        assert printed.count(line) == 1
    assert all(words in " ".join(lines(materials)) for words in CREDITS[name])
    assert read_corpus(name, tmp_path / "out").materials == materials
    assert read_corpus(name, tmp_path / "raw").materials == materials


def test_the_pools_of_a_benchmark_are_credited_once(tmp_path):
    (name,) = {name for name in NAMES if open_benchmark(name).ranks} - {"vidore", "bright", "mmeb"}
    for pool, notice in (("a", "A, CC0"), ("b", "B"), ("c", "A, CC0")):
        manifest = prepared(tmp_path / pool, notice, pool) / "corpus.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "name": name}))
        manifest.parent.rename(tmp_path / f"pool-{pool}")
    assert lines(read_corpus(name, tmp_path).materials) == ["A, CC0", "B"]


def test_a_stream_of_wikipedia_is_credited(tmp_path):
    (tmp_path / "psgs_w100.tsv").write_text('id\ttext\ttitle\n1\t"Grass is green."\tGrass\n')
    manifest = corpora.prepare("dpr", tmp_path, tmp_path / "out")
    assert lines(open_corpus(tmp_path / "out").materials) == [
        "Wikipedia (its authors; each source names its article), CC BY-SA."
    ]
    assert "attribution" not in manifest


def test_a_notice_names_a_material_a_paragraph(tmp_path):
    data = prepared(tmp_path, "Texts: somebody,\n  CC BY 4.0.\n\n \nPictures: nobody's.\n")
    assert lines(open_corpus(data).materials) == [
        "Texts: somebody, CC BY 4.0.", "Pictures: nobody's."
    ]  # fmt: skip
    assert open_corpus(prepared(tmp_path / "other", "")).materials == ()
    assert corpus_of_lists(["one's own text"]).materials == ()


def test_a_notice_outside_an_interchange_folder_is_not_read(tmp_path, refused):
    prepared(tmp_path, "")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "raw" / "ATTRIBUTION.txt").symlink_to(tmp_path / "secret")
    flags = ("prepare", "corpus", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'out'}")
    refused(*flags, message="ATTRIBUTION.txt is a symbolic link that leads out of the folder")


def test_credits_are_written_and_read_back(tmp_path):
    materials = open_benchmark("okvqa").materials
    write_notice(tmp_path, materials)
    back = materials_beside(tmp_path)
    assert lines(back) == lines(materials)
    assert united(materials, back) == materials  # each line once
    write_notice(tmp_path / "none", ())
    assert not (tmp_path / "none").exists()


def test_an_older_manifest_has_one_text(tmp_path):
    data = prepared(tmp_path, "New")
    manifest = json.loads((data / "corpus.json").read_text())
    del manifest["materials"]
    (data / "corpus.json").write_text(
        json.dumps({**manifest, "attribution": "Made of\nold words.\n\nPictures: OpenMoji.\n"})
    )
    assert lines(open_corpus(data).materials) == ["Made of old words.", "Pictures: OpenMoji."]


@pytest.mark.parametrize(
    "change",
    [{"materials": 5}, {"materials": ["x"]}, {"materials": [{"names": "x"}]},
     {"materials": [{"name": 5}]}],
)  # fmt: skip
def test_materials_that_are_none(change, tmp_path):
    data = prepared(tmp_path, "New")
    manifest = json.loads((data / "corpus.json").read_text())
    (data / "corpus.json").write_text(json.dumps({**manifest, **change}))
    refuses(r"corpus\.json: not a manifest of format 1", open_corpus, data)


def test_questions_over_other_sources(tmp_path):
    asked, known = prepared(tmp_path / "a", "A, CC0\n\nBoth"), prepared(tmp_path / "b", "Both\n\nB")
    corpus = open_corpus(asked, known)
    assert lines(corpus.materials) == ["A, CC0", "Both", "B"]
    assert corpus.of_rows([0, 1]).materials == corpus.materials
    assert AskedCorpus(corpus).materials == corpus.materials
    assert open_corpus(known).with_questions([]).materials == open_corpus(known).materials


def test_knowledge_examples_and_finished_runs_are_credited(tmp_path):
    folders = {
        name: prepared(tmp_path / name, f"{name}, CC0") for name in ("own", "known", "shots")
    }
    run = tmp_path / "run"
    run.mkdir()
    material = {"name": "of the run", "authors": "Somebody", "license": "MIT"}
    (run / "scores.json").write_text(json.dumps({"materials": [material]}))
    parts = {"knowledge.data": folders["known"], "library.data": folders["shots"]}
    changes = {f"parts.{key}": str(value) for key, value in parts.items()}
    changes["data.dir"] = str(folders["own"])
    file = f"{ROOT}/configs/okvqa/tables.py"
    row = read_row(load_config(f"{file}:smollm2_similar_factbook", changes))
    found = lines(row.materials(open_corpus(folders["own"])))
    assert found == ["own, CC0", "known, CC0", "shots, CC0"]
    changes = {"data.dir": str(folders["own"]), "parts.finished.run": str(run)}
    row = read_row(load_config(f"{file}:smollm2_mavl_one_plan", changes))
    found = lines(row.materials(open_corpus(folders["own"])))
    assert found == ["own, CC0", "of the run (Somebody), MIT."]
    row = read_row(load_config(f"{file}:kat_base", {"data.dir": str(folders["own"])}))
    (own, kat) = lines(row.materials(open_corpus(folders["own"])))
    assert (own, "Wikidata" in kat, "Gui et al., NAACL 2022" in kat) == ("own, CC0", True, True)


def test_every_page_of_a_row_credits_questions_and_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked, known = prepared(tmp_path / "a", "A, CC0"), prepared(tmp_path / "b", "B <b>")
    file = f"{ROOT}/configs/webqa/tables.py:bm25_full"
    flags = ("run", f"--config={file}", "--split=test", "--config.scoring.lemmatizer=none")
    data = (f"--config.data.dir={asked}", f"--config.data.sources={known}")
    dataset = ("--config.dataset=corpus",)
    expected = ["A, CC0", "B &lt;b&gt;"]
    for name, shards in (("one", (0,)), ("two", (0, 1))):
        for shard in shards:
            share = ("--chunk=1", f"--shard={shard}/{len(shards)}")
            done(*flags, *data, *dataset, f"--workdir=rows/{name}", *share)
        assert credits_of(tmp_path / "rows" / name / "report.html") == expected
    done("compare", "rows/one", "rows/two", "--report=both.html", "--metric=source_f1/official")
    assert credits_of(tmp_path / "both.html") == expected
    done("report", "--workdir=rows")
    assert credits_of(tmp_path / "rows" / "report.html") == expected
    scores = json.loads(Path("rows/one/scores.json").read_text())
    del scores["materials"]  # as in an older run
    Path("rows/one/scores.json").write_text(json.dumps(scores))
    done("report", "--workdir=rows/one")
    assert credits_of(tmp_path / "rows" / "one" / "report.html") == expected
    Path("rows/two/report.html").unlink()
    done("merge", "rows/two/parts")
    assert credits_of(tmp_path / "rows" / "two" / "report.html") == expected
    of_parts = (Material("A"), Material("of its parts"))
    monkeypatch.setattr(Row, "materials", lambda row, corpus: of_parts)
    corpus, _, _ = _of_workdir(tmp_path / "rows" / "one", Threads(1))
    assert corpus.materials == of_parts  # which the page's /api/about tells


def test_the_served_page_tells_the_credits():
    corpus = Corpus([], materials=[Material("A", "Somebody", "CC0"), Material("B")])
    for own, credits in ((AskedCorpus(corpus), ["A (Somebody), CC0.", "B"]), (None, [])):
        parts = Parts("t", None, "", None, "", {}, own, Threads(1))
        client = TestClient(make_app(parts, ServeOptions()), base_url="http://127.0.0.1")
        assert client.get("/api/about").json()["credits"] == credits
    page = client.get("/").text
    assert 'id="credits"' in page
    assert "about.credits" in client.get("/page/page.js").text
