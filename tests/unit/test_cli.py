"""Every verb of the command line on a tiny corpus, and every mistake a user can make with it.

The verbs run in this process: their exit code, what they print, what they leave on disk. The
models are one layer deep and two steps trained; what they learn is tested elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from PIL import Image

from mmqa_jax.cli import main
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.systems import webqa

ROOT = Path(__file__).parents[2]
VERBS = (
    "demo", "ask", "prepare", "train", "embed", "index", "search", "rerank", "answer",
    "evaluate", "report",
)  # fmt: skip
LANDS = {
    "Arvania": "Pelot", "Borduria": "Szohod", "Cinnabar": "Vermil", "Doriath": "Menegroth",
    "Erewhon": "Colcha", "Florin": "Gilder", "Gondal": "Regina", "Hav": "Medina",
}  # fmt: skip
FLAGS = {"Arvania": (210, 47, 39), "Borduria": (30, 80, 160), "Cinnabar": (0, 0, 0)}
TINY = {  # one layer, one shape a model: compiling is what costs here
    "tokenizer": "corpus:200",
    "model.changes.hidden": 32,
    "model.changes.layers": 1,
    "model.changes.heads": 2,
    "model.changes.mlp": 32,
    "batches.batch_size": 4,
    "batches.threads": 0,
    "train.steps": 2,
    "train.checkpoint_every": 1,
    "train.log_every": 1,
}
TINY_OF = {
    "contrastive": {
        "model.vision.width": 32,
        "model.vision.layers": 1,
        "model.vision.heads": 2,
        "model.vision.mlp_width": 32,
        "model.vision.embed_dim": 32,
        "batches.query_length": 24,
        "batches.source_lengths": "(24,)",
        "inference.buckets": "(24,)",
    },
    "rerank": {
        "packing.buckets": "((1,64),)",
        "packing.max_question_tokens": 20,
        "inference.batch_size": 8,
    },
    "answer": {
        "packing.buckets": "((1,96),)",
        "packing.max_question_tokens": 20,
        "inference.max_new_tokens": 3,
        "inference.num_beams": 2,
        "inference.batch_size": 4,
    },
}


class Ended(NamedTuple):
    """How a verb ended."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> dict:
        """The JSON object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


def mmqa(*arguments: str | Path) -> Ended:
    """Runs a verb in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's --help
            code = stop.code
    return Ended(code, out.getvalue(), err.getvalue())


def done(*arguments: str | Path) -> dict:
    """Runs a verb that must succeed; its JSON."""
    ended = mmqa(*arguments, "--json")
    assert ended.code == 0, ended.err
    return ended.value


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and time; a workdir's lock is no content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def refused(tmp_path):
    """Runs a verb that must refuse its input: one sentence, exit 2, nothing left in tmp_path."""

    def run(*arguments: str | Path, message: str) -> None:
        before = tree(tmp_path)
        ended = mmqa(*arguments)
        assert ended.code == 2, ended.err
        assert ended.out == ""
        assert ended.err.startswith("mmqa: ")
        assert ended.err.count("\n") == 1, ended.err
        assert re.search(message, ended.err), ended.err
        assert tree(tmp_path) == before

    return run


def sentence(land: str) -> str:
    return f"The capital of {land} is {LANDS[land]}."


def question(number: int, split: str, land: str, **fields) -> dict:
    return {
        "id": f"{split}{number}", "split": split, "category": "text",
        "question": f"What is the capital of {land}?", "answers": [sentence(land)],
        "keywords": LANDS[land], "positives": [f"s-{land}"],
        "negatives": [f"s-{other}" for other in LANDS if other != land], **fields,
    }  # fmt: skip


def png(color: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), color).save(buffer, "PNG")
    return buffer.getvalue()


def write_documents(folder: Path, questions: list[dict]) -> Path:
    """A corpus interchange folder: eight snippets, three flags, and the questions."""
    folder.mkdir(parents=True)
    sources = [
        {"id": f"s-{land}", "modality": "text", "text": sentence(land), "title": land}
        for land in LANDS
    ]
    for land, color in FLAGS.items():
        (folder / f"{land}.png").write_bytes(png(color))
        sources.append(
            {
                "id": f"p-{land}",
                "modality": "image",
                "text": f"Flag of {land}",
                "title": land,
                "image": f"{land}.png",
            }
        )
    for name, rows in (("sources", sources), ("questions", questions)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


QUESTIONS = [
    *(question(n, "train", land) for n, land in enumerate(LANDS)),
    # As in WebQA's test split: candidates, but which are gold is hidden.
    *(
        question(n, "val", land, positives=[], negatives=[f"s-{land}", "s-Hav"])
        for n, land in enumerate(list(LANDS)[:3])
    ),
    *(question(n, "test", land) for n, land in enumerate(list(LANDS)[2:5])),
    question(
        3, "test", "Arvania", question="What color has the flag of Arvania?", keywords="red",
        answers=["It is red."], category="color", positives=["p-Arvania"],
        negatives=["p-Borduria", "s-Arvania"],
    ),
    question(4, "test", "Hav", positives=[], negatives=[]),
]  # fmt: skip
TEST = [row for row in QUESTIONS if row["split"] == "test"]


@pytest.fixture(scope="module", autouse=True)
def _quiet(tmp_path_factory):
    """No progress lines, and a compile cache that is nobody else's."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_disable_most_optimizations",)
    before = {name: jax.config.values[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        patch.setenv("MMQA_CACHE", str(tmp_path_factory.mktemp("cache")))
        jax.config.update("jax_disable_most_optimizations", True)  # halves the compile time
        yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The prepared tiny corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    raw = write_documents(folder / "raw", QUESTIONS)
    result = done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
    assert result["data"] == str(folder / "data")
    return folder / "data"


def train_flags(name: str, data: Path, workdir: Path, **overrides) -> list[str]:
    values = {**TINY, **TINY_OF[name], "data.dir": data, **overrides}
    flags = [f"--config={ROOT}/configs/atlas/{name}.py:runlocal", f"--workdir={workdir}"]
    return flags + [f"--config.{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def models(data, tmp_path_factory):
    """A run of each task, trained by `mmqa train`."""
    folder = tmp_path_factory.mktemp("runs")
    for task in TINY_OF:
        result = done("train", *train_flags(task, data, folder / task))
        assert result == {"task": task, "steps": 2, "workdir": str(folder / task)}
    return folder


@pytest.fixture(scope="module")
def index(data, models, tmp_path_factory):
    """Embeddings and index of the tiny corpus."""
    folder = tmp_path_factory.mktemp("index") / "index"
    flags = (f"--data={data}", f"--model={models / 'contrastive'}", f"--out={folder}")
    result = done("embed", *flags)
    assert result == {"sources": 11, "dim": 32, "broken_pictures": 0}
    # A second time nothing is left to do.
    before = tree(folder / "embeddings")
    assert done("embed", *flags) == result
    assert tree(folder / "embeddings").keys() == before.keys()
    assert done("index", f"--embeddings={folder}", "--kind=exact")["rows"] == 11
    return folder


@pytest.fixture(scope="module")
def bm25(data, tmp_path_factory):
    """Rankings of the test questions by `mmqa search --method=bm25`."""
    path = tmp_path_factory.mktemp("bm25") / "bm25.jsonl"
    result = done("search", f"--data={data}", "--method=bm25", f"--out={path}")
    assert result["questions"] == 5
    # Capital questions name their land; the flag question has its picture's caption in it.
    assert result["recall"]["recall@1"] == 1.0
    return path


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Help, and what loads when


def test_every_verb_has_help_with_a_working_example():
    ended = mmqa("--help")
    assert ended.code == 0
    for verb in VERBS:
        assert re.search(rf"^ +{verb} +\w", ended.out, re.MULTILINE), verb
        own = mmqa(verb, "--help")
        assert own.code == 0
        example = own.out.partition("example:\n")[2].strip()
        assert example.startswith(f"mmqa {verb} ")
        _parses(example)


def _parses(example: str) -> None:
    """The example's flags are those of the parser."""
    import shlex

    from mmqa_jax.cli import _parser, _split_config_overrides

    kept, _ = _split_config_overrides(shlex.split(example)[1:])
    _parser().parse_args(kept)


def test_help_loads_no_numerical_library():
    script = (
        "import sys\n"
        "from mmqa_jax.cli import main\n"
        "for arguments in (['--help'], ['train', '--help']):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 0\n"
        "heavy = {'jax', 'numpy', 'grain', 'flax', 'orbax', 'PIL', 'rich', 'tokenizers',\n"
        "         'tensorflow_datasets', 'ml_collections', 'matplotlib', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_ends_as_main_does():
    command = Path(sys.executable).with_name("mmqa")
    ended = subprocess.run(
        [command, "serach"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert re.fullmatch(r"mmqa: .*'serach'.*see `mmqa --help`\.\n", ended.stderr)


# What the verbs do


def test_prepare_reports_what_it_wrote(data):
    corpus = open_corpus(data)
    assert len(corpus) == 11
    assert [q.id for q in corpus.questions("test")] == [row["id"] for row in TEST]
    assert corpus.manifest["counts"]["questions_without_sources"] == 1


def test_a_trained_run_is_not_trained_again(data, models):
    before = tree(models / "rerank")
    done("train", *train_flags("rerank", data, models / "rerank"))
    assert tree(models / "rerank") == before
    steps = [row["step"] for row in rows_of(models / "rerank" / "metrics.jsonl")]
    assert steps == [1, 2]


@pytest.mark.parametrize("flags", [["dense"], ["dense", "--two_pass"], ["fused"]])
def test_dense_search_ranks_every_question(data, models, index, bm25, tmp_path, flags):
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


def test_rerank_then_answer_from_what_is_selected(data, models, bm25, tmp_path):
    reranked, answers = tmp_path / "reranked.jsonl", tmp_path / "predictions.jsonl"
    result = done(
        "rerank", f"--data={data}", f"--model={models / 'rerank'}", f"--candidates={bm25}",
        "--top_k=4", f"--out={reranked}",
    )  # fmt: skip
    assert result["questions"] == 5
    found = {row["question_id"]: row["sources"][:4] for row in rows_of(bm25)}
    for row in rows_of(reranked):
        assert sorted(row["sources"]) == sorted(found[row["question_id"]])
        assert row["scores"] == sorted(row["scores"], reverse=True)
        assert all(0 <= score <= 1 for score in row["scores"])
    result = done(
        "answer", f"--data={data}", f"--model={models / 'answer'}", f"--sources={reranked}",
        "--threshold=0.0", f"--out={answers}",
    )  # fmt: skip
    assert result == {"questions": 5, "predictions": str(answers)}
    for prediction, row in zip(rows_of(answers), rows_of(reranked), strict=True):
        assert prediction["question_id"] == row["question_id"]
        assert prediction["sources"] == row["sources"][:2]  # above a threshold of 0
        assert len(prediction["beams"]) == 1  # inference.only_best
        assert prediction["answer"] == prediction["beams"][0][0]


def test_questions_without_sources_are_ranked_answered_and_scored(data, models, tmp_path):
    """test4 lists no sources: nothing to rerank, an answer from the question alone."""
    restricted, answers = tmp_path / "restricted.jsonl", tmp_path / "predictions.jsonl"
    done("rerank", f"--data={data}", f"--model={models / 'rerank'}", f"--out={restricted}")
    rows = {row["question_id"]: row for row in rows_of(restricted)}
    assert rows["test4"] == {"question_id": "test4", "sources": [], "scores": []}
    assert len(rows["test0"]["sources"]) == 8
    model = f"--model={models / 'answer'}"
    done("answer", f"--data={data}", model, f"--sources={restricted}", f"--out={answers}")
    assert rows_of(answers)[4]["sources"] == []
    done("answer", f"--data={data}", model, "--sources=oracle", f"--out={answers}")
    assert [row["sources"] for row in rows_of(answers)] == [r["positives"] for r in TEST]
    oracle = rows_of(answers)[4]
    done("answer", f"--data={data}", model, "--sources=none", f"--out={answers}")
    assert all(row["sources"] == [] for row in rows_of(answers))
    assert rows_of(answers)[4]["answer"] == oracle["answer"]
    result = done("evaluate", "corpus", f"--references={data}", f"--predictions={answers}")
    assert result["n"] == 5
    assert result["scores"]["source_f1/official"] == 0.0


def gold() -> list[dict]:
    return [
        {"question_id": row["id"], "answer": row["answers"][0], "sources": row["positives"]}
        for row in TEST
    ]


def test_evaluate_scores_predictions_by_hand(data, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}")
    path = write_rows(tmp_path / "gold.jsonl", gold())
    result = done(*flags, f"--predictions={path}")
    assert (result["dataset"], result["n"], result["missing"]) == ("corpus", 5, 0)
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(1.0, abs=1e-4)
    # One answer is missing, one wrong, one source too much.
    rows = gold()[1:]
    rows[0]["answer"] = "The capital of Doriath is unknown."
    rows[1]["sources"] = ["s-Erewhon", "s-Hav"]
    result = done(*flags, f"--predictions={write_rows(tmp_path / 'some.jsonl', rows)}")
    assert result["missing"] == 1
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(3 / 5, abs=1e-4)
    assert result["scores"]["source_f1/notebook"] == pytest.approx(
        (0 + 1 + 2 / 3 + 1) / 4, abs=1e-4
    )
    assert result["by_category"]["color"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert result["by_category"]["text"]["webqa_acc/no_lemma"] == pytest.approx(2 / 4, abs=1e-4)
    # Of what was answered alone.
    result = done(*flags, f"--predictions={tmp_path / 'some.jsonl'}", "--only_given")
    assert (result["n"], result["missing"]) == (4, 0)
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(3 / 4, abs=1e-4)


def test_evaluate_reads_the_leaderboards_format_and_rankings(data, bm25, tmp_path):
    flags = ("evaluate", "corpus", f"--references={data}")
    submission = {
        row["question_id"]: {"sources": row["sources"], "answer": row["answer"]} for row in gold()
    }
    (tmp_path / "submission.json").write_text(json.dumps(submission))
    result = done(*flags, f"--predictions={tmp_path / 'submission.json'}")
    assert result["scores"]["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    result = done(*flags, f"--predictions={bm25}")
    assert result["n"] == 4  # test4 has no gold sources
    assert result["scores"]["recall@1"] == 1.0
    assert result["scores"]["mrr"] == 1.0
    some = write_rows(tmp_path / "some.jsonl", rows_of(bm25)[1:])
    assert done(*flags, f"--predictions={some}", "--only_given")["n"] == 3


def test_hidden_gold_sources_stop_neither_search_nor_evaluate(data, models, tmp_path):
    flags = (f"--data={data}", "--split=val")
    found, restricted = tmp_path / "found.jsonl", tmp_path / "restricted.jsonl"
    result = done("search", *flags, "--method=bm25", f"--out={found}")
    assert result == {"questions": 3, "recall": {}}
    assert len(rows_of(found)) == 3
    done("rerank", *flags, f"--model={models / 'rerank'}", f"--out={restricted}")
    assert [len(row["sources"]) for row in rows_of(restricted)] == [2, 2, 2]
    answers = [
        {"question_id": row["id"], "answer": row["answers"][0]}
        for row in QUESTIONS
        if row["split"] == "val"
    ]
    path = write_rows(tmp_path / "answers.jsonl", answers)
    flags = (f"--references={data}", "--split=val", f"--predictions={path}")
    scores = done("evaluate", "corpus", *flags)["scores"]
    assert scores["webqa_acc/no_lemma"] == pytest.approx(1.0, abs=1e-4)
    assert not [name for name in scores if name.startswith("source_f1")]


# What a user can get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"required: VERB; see `mmqa --help`"),
        (["serach"], r"invalid choice: 'serach' .*see `mmqa --help`"),
        (["report", "--wokdir=x"], r"unrecognized arguments: --wokdir=x"),
        (["prepare", "msmarco", "--out=x"], r"invalid choice: 'msmarco' .*atlas.*webqa.*corpus"),
        (["evaluate", "squad"], r"invalid choice: 'squad'.*see `mmqa evaluate --help`"),
        (["search", "--data=x", "--method=bm25"], r"required: --out; see `mmqa search --help`"),
        (["search", "--method=bm26"], r"--method: invalid choice: 'bm26'"),
        (["search", "--top_k=many"], r"--top_k: invalid int value: 'many'"),
        (["answer", "--threshold=half"], r"--threshold: invalid float value: 'half'"),
        (["report", "--config.seed=1"], r"seed=1: `mmqa report` takes no --config"),
        (["demo", "--config.seed", "1"], r"--config\.seed: write it as --config\.KEY=VALUE"),
        (["train", "--workdir=x"], r"required: --config"),
        (["ask"], r"required: question"),
    ],
)
def test_wrong_commands(arguments, message, refused):
    refused(*arguments, message=message)


def test_traceback_is_shown_on_request():
    ended = mmqa("report", "--workdir=nowhere-at-all", "--traceback")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("mmqa: nowhere-at-all: holds no finished demo")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.train.stps=5", r"--config\.train\.stps: .*did you mean 'train\.steps'\?"),
        ("--config.train.steps=many", r"--config\.train\.steps=many: .*a whole number"),
        ("--config.train", r"write it as --config\.KEY=VALUE"),
        ("--config.train=5", r"--config\.train: is a section"),
        ("--config=nowhere.py", r"--config=nowhere\.py: no such config file"),
        ("--config.data.dir=nothing", r"nothing: no such folder, a prepared corpus was expected"),
        ("--config.data.dir=", r"config key data\.dir is empty"),
    ],
)
def test_wrong_configs(flag, message, refused, data, tmp_path):
    flags = train_flags("rerank", data, tmp_path / "run")
    refused("train", *flags, flag, message=message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "vqa"}, r"config key task=vqa: unknown; use one of contrastive, rerank, answer"),
        ({"data.split": "dev"}, r"config key data\.split=dev: .*no such questions"),
        ({"tokenizer": "corpus:5"}, r"vocab_size=5: .*give at least"),
        ({"model.trunk": "bert_huge"}, r"config key model\.trunk=bert_huge: unknown"),
        ({"packing.buckets": "((1,9),)"}, r"packing\.buckets: 9 text columns .*give at least"),
        ({"train.optimizer.name": "sgd"}, r"sgd"),
        ({"train.steps": 0}, r"config key train\.steps=0: a whole number of at least 1"),
        ({"batches.batch_size": 0}, r"batch_size"),
    ],
)
def test_configs_that_fit_no_run(changes, message, data, tmp_path):
    ended = mmqa("train", *train_flags("rerank", data, tmp_path / "run", **changes))
    assert ended.code == 2
    assert re.fullmatch(rf"mmqa: .*{message}.*\n", ended.err), ended.err
    assert not (tmp_path / "run" / "model.json").exists()


def test_a_workdir_of_another_config_is_refused(refused, data, models, tmp_path):
    shutil.copytree(models / "rerank", tmp_path / "run")
    flags = train_flags("rerank", data, tmp_path / "run", seed=7)
    refused("train", *flags, message=r"another config: seed \(0 there, 7 now\).*new --workdir")


@pytest.fixture
def wrong(data, models, index, bm25, tmp_path):
    """Working flags of the verbs that read models and files, for one of them to go wrong."""
    out = f"--out={tmp_path / 'out'}"
    corpus = f"--data={data}"
    contrastive, embeddings = f"--model={models / 'contrastive'}", f"--index={index}"
    return {
        "embed": ["embed", corpus, contrastive, out],
        "index": ["index", f"--embeddings={index}"],
        "search": ["search", corpus, "--method=dense", contrastive, embeddings, out],
        "rerank": ["rerank", corpus, f"--model={models / 'rerank'}", f"--candidates={bm25}", out],
        "answer": ["answer", corpus, f"--model={models / 'answer'}", f"--sources={bm25}", out],
        "evaluate": ["evaluate", "corpus", f"--references={data}", f"--predictions={bm25}"],
    }


@pytest.mark.parametrize(
    ("verb", "flag", "message"),
    [
        ("embed", "--data=nowhere", r"nowhere: no such folder, a prepared corpus was expected"),
        ("search", "--data=nowhere", r"nowhere: no such folder"),
        ("evaluate", "--references=nowhere", r"nowhere: no such folder"),
        ("embed", "--model=nowhere", r"nowhere: holds no trained weights"),
        ("search", "--model=nowhere", r"nowhere: holds no trained weights"),
        ("rerank", "--model=nowhere", r"nowhere: holds no trained weights"),
        ("answer", "--model=nowhere", r"nowhere: holds no trained weights"),
        ("index", "--embeddings=nowhere", r"nowhere.*mmqa embed"),
        ("search", "--index=nowhere", r"nowhere"),
        ("rerank", "--candidates=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
        ("answer", "--sources=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
        ("evaluate", "--predictions=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
        ("evaluate", "--predictions=nowhere.json", r"nowhere\.json: no such file"),
        ("search", "--split=dev", r"--split=dev: .*choose one of test, train, val"),
        ("rerank", "--split=dev", r"--split=dev: .*choose one of test, train, val"),
        ("answer", "--split=dev", r"--split=dev: .*choose one of test, train, val"),
        ("evaluate", "--split=dev", r"--split=dev: .*choose one of test, train, val"),
        ("search", "--top_k=0", r"--top_k=0: at least 1 was expected"),
        ("rerank", "--top_k=-3", r"--top_k=-3: at least 1 was expected"),
        ("answer", "--threshold=1.5", r"--threshold=1\.5: a probability from 0 to 1"),
        ("answer", "--threshold=-0.1", r"--threshold=-0\.1: a probability from 0 to 1"),
        ("answer", "--threshold=nan", r"--threshold=nan: a probability from 0 to 1"),
        # Rankings of another split.
        ("rerank", "--split=val", r"bm25\.jsonl, line 1: question 'test0' is not among the 3"),
        ("answer", "--split=val", r"bm25\.jsonl, line 1: question 'test0' is not among the 3"),
        ("evaluate", "--split=val", r"bm25\.jsonl, line 1: question 'test0' is not among the 3"),
    ],
)
def test_wrong_flags_of_the_stages(verb, flag, message, wrong, refused):
    refused(*wrong[verb], flag, message=message)


def test_dense_search_needs_a_model_and_an_index(wrong, data, refused, tmp_path):
    flags = ["search", f"--data={data}", f"--out={tmp_path / 'out'}"]
    for method in ("dense", "fused"):
        message = rf"--method={method} needs --model and --index"
        refused(*flags, f"--method={method}", message=message)
        refused(*flags, f"--method={method}", "--index=somewhere", message=message)


@pytest.mark.parametrize(
    ("verb", "task", "expected"),
    [
        ("embed", "rerank", "contrastive"),
        ("search", "answer", "contrastive"),
        ("rerank", "answer", "rerank"),
        ("answer", "rerank", "answer"),
    ],
)
def test_a_model_of_another_task(verb, task, expected, wrong, models, refused):
    refused(
        *wrong[verb],
        f"--model={models / task}",
        message=rf"{task}: holds a model of task '{task}', {expected} was expected",
    )


@pytest.mark.parametrize("verb", ["embed", "search", "rerank", "answer", "evaluate"])
def test_a_corpus_that_was_not_prepared_to_its_end(verb, wrong, data, refused, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(data, folder)
    (folder / "corpus.json").unlink()
    flag = "--references" if verb == "evaluate" else "--data"
    refused(*wrong[verb], f"{flag}={folder}", message=r"half: holds no corpus\.json")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sources": ["s-Nowhere"]}, r"line 2: source 's-Nowhere' is not in the corpus"),
        ({"question_id": "other"}, r"line 2: question 'other' is not among the 5"),
        ({"question_id": "test0"}, r"line 2: question 'test0' is ranked twice"),
        ({"sources": ["s-Hav", "s-Gondal"]}, r"line 2: 2 sources but 1 scores"),
        ({"scores": ["high"]}, r"line 2: scores must be a list of finite numbers"),
        ({"scores": None}, r"line 2: scores must be"),
        (None, r"bad\.jsonl: 1 of 5 questions have no ranking, the first is 'test1'"),
        ("{oops", r"line 2: not valid JSON"),
        ("[1, 2]", r"line 2: expected \{\"question_id\", \"sources\", \"scores\"\}"),
    ],
)
@pytest.mark.parametrize("verb", ["rerank", "answer", "evaluate"])
def test_broken_rankings(verb, row, message, wrong, bm25, refused, tmp_path):
    lines = bm25.read_text().splitlines()
    if isinstance(row, dict):
        known = json.loads(lines[1])
        known = {**known, "sources": known["sources"][:1], "scores": known["scores"][:1]}
        row = json.dumps({**known, **row})
    lines[1:2] = [row] if row is not None else []
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    flag = {"rerank": "--candidates", "answer": "--sources", "evaluate": "--predictions"}[verb]
    refused(*wrong[verb], f"{flag}={path}", message=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question_id": "other"}, r"no question has the id 'other'"),
        ({"question_id": "test0"}, r"question 'test0' is answered twice"),
        ({"question_id": 7}, r"bad\.jsonl, line 2: expected an object with a text \"question_id\""),
        ({"answer": 7}, r"bad\.jsonl, line 2: \"answer\" must be text"),
        ({"sources": "s-Hav"}, r"bad\.jsonl, line 2: \"sources\" must be a list of id strings"),
        ({"sources": [3]}, r"bad\.jsonl, line 2: \"sources\" must be a list of id strings"),
        (
            {"sources": ["s-Nowhere"]},
            r"bad\.jsonl, line 2: source 's-Nowhere' is not in the corpus",
        ),
        ("{oops", r"bad\.jsonl, line 2: not valid JSON"),
        ("[]", r"bad\.jsonl, line 2: expected an object"),
    ],
)
def test_broken_predictions(change, message, data, refused, tmp_path):
    lines = [json.dumps(row) for row in gold()]
    lines[1] = change if isinstance(change, str) else json.dumps({**gold()[1], **change})
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    flags = ("evaluate", "corpus", f"--references={data}")
    refused(*flags, f"--predictions={tmp_path / 'bad.jsonl'}", message=message)


def test_broken_submission(data, refused, tmp_path):
    path = tmp_path / "submission.json"
    flags = ("evaluate", "webqa", f"--references={data}", f"--predictions={path}")
    path.write_text('{"test0":\n {"answer": "a",\n "sources": oops}}')
    refused(*flags, message=r"submission\.json, line 3, column 13: not valid JSON")
    path.write_text('{"test0": {"answer": "a"}}')
    refused(*flags, message=r"submission\.json, Guid test0: sources must be a list")
    path.write_text('{"other": {"answer": "a", "sources": []}}')
    refused(*flags, message=r"no question has the id 'other'")


@pytest.mark.parametrize("verb", ["search", "rerank", "answer"])
def test_an_output_that_cannot_be_written(verb, wrong, refused, tmp_path):
    (tmp_path / "out").mkdir()
    refused(*wrong[verb], message=r"out: .*folder")
    (tmp_path / "file").write_text("")
    refused(*wrong[verb], f"--out={tmp_path / 'file' / 'out'}", message=r"file/out")


def test_embeddings_of_another_corpus_are_refused(wrong, models, index, refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS[:3])
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'other'}")
    other = f"--data={tmp_path / 'other'}"
    refused(*wrong["embed"], other, f"--out={index}", message=r"corpus_fingerprint")
    refused(*wrong["search"], other, "--split=train", message=r"embeddings.*corpus")


def test_a_question_longer_than_the_model_takes(wrong, data, models, refused, tmp_path):
    long = question(0, "test", "Hav", question="What is the capital of Hav, " * 9 + "please?")
    raw = write_documents(tmp_path / "raw", [*QUESTIONS, {**long, "id": "long"}])
    corpus = f"--data={tmp_path / 'data'}"
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    message = r"question long: .*\d+ tokens, the model takes 20"
    refused(*wrong["rerank"], corpus, "--candidates=restricted", message=message)
    refused(*wrong["answer"], corpus, "--sources=none", message=message)


# Raw files


def test_missing_and_unknown_raw_folders(refused, tmp_path):
    out = f"--out={tmp_path / 'out'}"
    refused("prepare", "webqa", out, message=r"--raw: name the folder with the files of webqa")
    refused("prepare", "corpus", out, "--raw=nowhere", message=r"--raw=nowhere: no such folder")
    refused("prepare", "atlas", out, "--raw=x", message=r"--raw: Atlas is made from installed")
    raw = tmp_path / "raw"
    raw.mkdir()
    flags = (f"--raw={raw}", out)
    refused("prepare", "webqa", *flags, message=r"WebQA_train_val\.json: no such file")
    refused("prepare", "corpus", *flags, message=r"sources\.jsonl: no such file")


def test_bad_documents(refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    flags = ("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    text = (raw / "questions.jsonl").read_text()
    (raw / "questions.jsonl").write_text(text.replace('{"id": "train2"', '{"id" "train2"'))
    refused(*flags, message=r"questions\.jsonl, line 3: not valid JSON")
    (raw / "questions.jsonl").write_text(text.replace('"s-Gondal"', '"s-Gone"', 1))
    refused(*flags, message=r"questions\.jsonl, line 1: source 's-Gone' is not in sources\.jsonl")
    (raw / "sources.jsonl").write_text("\n")
    refused(*flags, message=r"sources\.jsonl: the corpus is empty")


def test_an_out_folder_that_holds_a_corpus_is_left_alone(refused, data, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    shutil.copytree(data, tmp_path / "out")
    flags = ("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    refused(*flags, message=r"out: holds a prepared corpus already; name another")


COLORS = {30000000: (255, 0, 0), 30000001: (0, 255, 0), 30000002: (0, 0, 255)}


@pytest.fixture
def webqa_raw(tmp_path):
    """WebQA's official files in small: one question over three pictures."""
    raw = tmp_path / "webqa"
    raw.mkdir()
    facts = [{"image_id": n, "caption": f"Caption {n}", "title": "T"} for n in COLORS]
    datum = {
        "Q": '"Is it red?"', "A": ['"Yes."'], "Keywords_A": '"yes"', "Qcate": "YesNo",
        "split": "val", "Guid": "g1", "img_posFacts": facts[:1], "img_negFacts": facts[1:],
        "txt_negFacts": [{"snippet_id": "g1_0", "fact": "Ice is cold.", "title": "Ice"}],
    }  # fmt: skip
    (raw / "WebQA_train_val.json").write_text(json.dumps({"g1": datum}, indent=1))
    write_pictures(raw, {n: png(color) for n, color in COLORS.items()})
    (raw / "ATTRIBUTION.txt").write_text("Pictures: nobody's.")  # no line break at its end
    return raw


def write_pictures(raw: Path, pictures: dict[int, bytes]) -> None:
    lines = [b"%d\t%s\n" % (n, base64.b64encode(data)) for n, data in pictures.items()]
    offsets = np.cumsum([0, *map(len, lines)])[:-1]
    (raw / "imgs.tsv").write_bytes(b"".join(lines))
    (raw / "imgs.lineidx").write_text("".join(f"{offset}\n" for offset in offsets))


def test_a_broken_picture_is_counted_and_named_and_the_run_goes_on(webqa_raw, tmp_path):
    pictures = {n: png(color) for n, color in COLORS.items()} | {30000001: b"no picture"}
    write_pictures(webqa_raw, pictures)
    ended = mmqa("prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}", "--json")
    assert ended.code == 0, ended.err
    assert list(ended.value["broken_pictures"]) == ["images/30000001"]
    assert ended.value["counts"]["broken_pictures"] == 1
    assert ended.value["counts"]["pictures"] == 2
    assert "Pictures: nobody's." in ended.out
    assert re.search(r"1 picture.* broken.*images/30000001", ended.err)
    corpus = open_corpus(tmp_path / "out")
    assert corpus.picture(corpus.row["30000001"]) is None
    assert corpus.picture(corpus.row["30000002"]) == pictures[30000002]
    # The caption still takes part.
    path = tmp_path / "bm25.jsonl"
    flags = (f"--data={tmp_path / 'out'}", "--split=val", f"--out={path}")
    done("search", *flags, "--method=bm25")
    assert "30000001" in rows_of(path)[0]["sources"]


def test_bad_official_files(webqa_raw, refused, tmp_path):
    flags = ("prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}")
    good = (webqa_raw / "WebQA_train_val.json").read_text()
    lines = good.splitlines()
    number = next(n for n, line in enumerate(lines) if '"Qcate"' in line)
    lines[number] = lines[number].replace(":", "")
    (webqa_raw / "WebQA_train_val.json").write_text("\n".join(lines))
    refused(*flags, message=rf"WebQA_train_val\.json, line {number + 1}, .*not valid JSON")
    (webqa_raw / "WebQA_train_val.json").write_text("{}")
    refused(*flags, message=r"list no facts, so the corpus is empty")
    (webqa_raw / "WebQA_train_val.json").write_text(good)
    (webqa_raw / "imgs.lineidx").unlink()
    refused(*flags, message=r"imgs\.lineidx: no such file")
    (webqa_raw / "imgs.tsv").unlink()
    refused(*flags, message=r"imgs\.tsv: no such file")


# Demos


def test_ask_and_report_need_a_finished_demo(refused, tmp_path):
    message = r"run: holds no finished demo"
    refused("report", f"--workdir={tmp_path / 'run'}", message=message)
    refused("ask", f"--workdir={tmp_path / 'run'}", "Why?", message=message)


def test_a_picture_file_that_is_no_picture(refused, tmp_path):
    (tmp_path / "notes.png").write_text("these are notes")
    flags = ("ask", f"--workdir={tmp_path / 'run'}", "What is this?")
    refused(*flags, f"--image={tmp_path / 'notes.png'}", message=r"notes\.png: .*picture")
    refused(*flags, f"--image={tmp_path / 'gone.png'}", message=r"gone\.png: no such picture file")
    refused(*flags, f"--image={tmp_path}", message=r"a picture file was expected")


def test_a_demo_with_a_wrong_config_starts_nothing(refused, tmp_path):
    flags = ("demo", f"--config={ROOT}/configs/atlas/demo.py", f"--workdir={tmp_path / 'run'}")
    refused(*flags, "--config.evaluate.question=9", message=r"did you mean 'evaluate\.questions'")
    refused(*flags, "--config.rerank.train.steps=no", message=r"steps=no: .*a whole number")


def test_threshold_printed_by_rerank_is_the_best_on_its_questions(data, models, tmp_path):
    path = tmp_path / "restricted.jsonl"
    result = done(
        "rerank", f"--data={data}", f"--model={models / 'rerank'}", "--split=train",
        f"--out={path}",
    )  # fmt: skip
    from mmqa_jax.retrieval.rankings import read_rankings

    best, sweep = webqa.tune_threshold(open_corpus(data).questions("train"), read_rankings(path))
    assert (result["best_threshold"], result["source_f1"]) == (best, pytest.approx(sweep[best]))
