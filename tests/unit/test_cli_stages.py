"""What goes wrong alike in the verbs that read a corpus, a model or another verb's file."""

import json
import shutil

import pytest
from cli_runs import done, write_documents

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize(
    ("verb", "flag", "message"),
    [
        ("embed", "--data=nowhere", r"nowhere: no such folder, a prepared corpus was expected"),
        ("search", "--data=nowhere", r"nowhere: no such folder"),
        ("evaluate", "--references=nowhere", r"nowhere: no such folder"),
        ("embed", "--model=nowhere", r"nowhere: no such file or folder"),
        ("search", "--model=nowhere", r"nowhere: no such file or folder"),
        ("rerank", "--model=nowhere", r"nowhere: no such file or folder"),
        ("answer", "--model=nowhere", r"nowhere: no such file or folder"),
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
        ("search", "--top_k=0", r"--top_k=0: at least 1 was expected; give a larger number"),
        ("rerank", "--top_k=-3", r"--top_k=-3: at least 1 was expected"),
        ("answer", "--threshold=1.5", r"--threshold=1\.5: a probability from 0 to 1 .*; give one"),
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


@pytest.mark.parametrize(
    ("verb", "task", "expected"),
    [
        ("embed", "rerank", "contrastive or example_retrieval or retriever"),
        ("search", "answer", "contrastive or example_retrieval or retriever"),
        ("rerank", "answer", "rerank"),
        ("answer", "rerank", "answer or fusion_in_decoder"),
    ],
)
def test_a_model_of_another_task(verb, task, expected, wrong, models, refused):
    message = rf"{task}: holds a model of task '{task}', {expected} was expected"
    refused(*wrong[verb], f"--model={models / task}", message=message)


@pytest.mark.parametrize("verb", ["embed", "search", "rerank", "answer", "evaluate"])
def test_a_corpus_that_was_not_prepared_to_its_end(verb, wrong, data, refused, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(data, folder)
    (folder / "corpus.json").unlink()
    flag = "--references" if verb == "evaluate" else "--data"
    changed = (*wrong[verb], f"{flag}={folder}")
    refused(*changed, message=r"half: holds no corpus\.json.*; make it with `mmqa prepare")
    (folder / "corpus.json").write_text('{\n"format": oops}')
    refused(*changed, message=r"corpus\.json, line 2, column 11: not valid JSON .*; repair that")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.json", r"model\.json, line 2, column 1: not valid JSON .*; repair that line"),
        ("config.json", r"config\.json, line 2, column 1: not valid JSON .*; repair that line"),
        ("tokenizer.json", r"run: tokenizer\.json is damaged .*; copy the folder again"),
    ],
)
@pytest.mark.parametrize("verb", ["embed", "search", "rerank", "answer"])
def test_a_run_whose_files_are_broken(verb, name, message, wrong, models, refused, tmp_path):
    task = {"embed": "contrastive", "search": "contrastive"}.get(verb, verb)
    shutil.copytree(models / task, tmp_path / "run")
    (tmp_path / "run" / name).write_text("{\noops")
    refused(*wrong[verb], f"--model={tmp_path / 'run'}", message=message)


@pytest.mark.parametrize("text", ["[]", "{}"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"config\.json: is not a run's config\.json; copy the run again"),
        ("model.json", r"model\.json: is not what training or|run: model\.json is damaged"),
    ],
)
def test_a_run_whose_files_are_of_another_shape(
    name, text, message, wrong, models, refused, tmp_path
):
    shutil.copytree(models / "rerank", tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    refused(*wrong["rerank"], f"--model={tmp_path / 'run'}", message=message)


def test_a_run_with_the_config_of_another(wrong, models, refused, tmp_path):
    shutil.copytree(models / "rerank", tmp_path / "run")
    shutil.copy(models / "answer" / "config.json", tmp_path / "run")
    message = r"run/config\.json: belongs to another run than model\.json"
    refused(*wrong["rerank"], f"--model={tmp_path / 'run'}", message=message)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "the largest"])
def test_weights_that_are_cut(name, wrong, models, refused, tmp_path):
    shutil.copytree(models / "rerank", tmp_path / "run")
    weights = tmp_path / "run" / "weights"
    files = (path for path in weights.rglob("*") if path.is_file())
    cut = max(files, key=lambda path: (path == weights / name, path.stat().st_size))
    cut.write_bytes(cut.read_bytes()[:50])
    message = r"run/weights: \S+ is damaged .*; copy the folder again"
    refused(*wrong["rerank"], f"--model={tmp_path / 'run'}", message=message)


@pytest.mark.parametrize("dataset", ["sources", "questions", "pictures"])
def test_records_that_are_cut(dataset, data, wrong, refused, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    for cut in (tmp_path / "data").glob(f"records-*/{dataset}/*array_record*"):
        cut.write_bytes(cut.read_bytes()[:50])
    message = rf"{dataset}: its \w+ records cannot be read .*; run `mmqa prepare` again"
    flags = ("--candidates=restricted", f"--data={tmp_path / 'data'}")
    refused(*wrong["rerank"], *flags, message=message)


@pytest.mark.parametrize("text", ["[]", '{"format": 1}'])
def test_a_corpus_manifest_of_another_shape(text, data, wrong, refused, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "corpus.json").write_text(text)
    message = r"corpus\.json: not a manifest of format 1; make it with `mmqa prepare"
    refused(*wrong["evaluate"], f"--references={tmp_path / 'data'}", message=message)


def test_a_corpus_without_questions(models, refused, tmp_path):
    raw = write_documents(tmp_path / "raw", [])
    data = tmp_path / "data"
    assert done("prepare", "corpus", f"--raw={raw}", f"--out={data}")["splits"] == {}
    flags = (f"--data={data}", f"--out={tmp_path / 'out'}")
    message = r"--split=test: .*data has no such questions.*the corpus has no questions"
    refused("search", *flags, "--method=bm25", message=message)
    refused("rerank", *flags, f"--model={models / 'rerank'}", message=message)
    refused("answer", *flags, f"--model={models / 'answer'}", message=message)
    refused("evaluate", "corpus", f"--references={data}", "--predictions=x", message=message)


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


@pytest.mark.parametrize("verb", ["search", "rerank", "answer"])
def test_an_output_that_cannot_be_written(verb, wrong, refused, tmp_path):
    (tmp_path / "out").mkdir()
    refused(*wrong[verb], message=r"out: .*folder")
    (tmp_path / "file").write_text("")
    refused(*wrong[verb], f"--out={tmp_path / 'file' / 'out'}", message=r"file/out")
