"""`mmqa run` with wrong input: one sentence, exit 2, nothing written."""

import shutil

import pytest
from cli_runs import ROOT, done
from row_runs import row_flags

from mmqa_jax.retrieval.indexes.index import scann_available

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

WEBQA = f"{ROOT}/configs/webqa/tables.py"
# A row's config of one's own; {} is a change of it.
OWN_ROW = f"""
from mmqa_jax.core.config import load_config

def get_config():
    config = load_config("{ROOT}/configs/atlas/tables.py:bm25")
    with config.unlocked():
        {{}}
    return config
"""


@pytest.fixture
def flags(data, models, index, tmp_path):
    """Working flags of the restricted row of table 6, for one of them to go wrong."""
    return row_flags("webqa:vlp", tmp_path / "run", data, models, index)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("empty")
def test_all_missing_inputs_are_named_at_once(refused, tmp_path):
    """Each with the command that makes it."""
    flags = ("run", f"--config={WEBQA}:clip20_vlp", f"--workdir={tmp_path / 'run'}")
    expected = {
        "data/webqa": "mmqa prepare webqa",
        "weights/clip": "mmqa convert --model=clip",
        "runs/clip": "mmqa embed .*; mmqa index",
        "runs/vlp_select": "mmqa train --config=configs/webqa/vlp_select.py",
        "runs/vlp_qa": "mmqa train --config=configs/webqa/vlp_qa.py",
    }
    refused(*flags, message=r"row clip20_vlp: 5 of its inputs are missing: ")
    for path, made_by in expected.items():
        refused(*flags, message=rf"[ ;]{path} \({made_by}")
    assert not (tmp_path / "run").exists()


def test_only_missing_inputs_are_named(flags, refused):
    gone = ("--config.parts.reader.model=gone", "--config.scoring.bart=downloads/bart-large-cnn")
    refused(
        *flags, *gone,
        message=r"row vlp: 2 of its inputs are missing: downloads/bart-large-cnn \(transformers' .*"
        r"bart\.pth in it\); gone \(no such path; name another with --config\.KEY=PATH\)\.$",
    )  # fmt: skip
    gone = "--config.data.dir=gone"
    refused(*flags, gone, message=r"1 of its inputs are missing: gone \(no such path")


NO_MODE = r"this file has no such mode"
FUSION = "--config.parts.retriever.fusion_weight"
# Row of the working flags, what is changed, and the sentence.
WRONG = [
    ("atlas:restricted", "--config.parts.reranker.similarity.index=gone", r"missing: gone \("),
    *(
        ("webqa:vlp", f"--limit={limit}", rf"--limit={limit}: at least 1 was expected")
        for limit in ("0", "-1")
    ),
    ("webqa:vlp", "--limit=some", r"--limit: invalid int value: 'some'"),
    ("webqa:vlp", f"--config={WEBQA}:vlpp", rf"tables\.py:vlpp: {NO_MODE}; did you mean 'vlp"),
    ("webqa:vlp", f"--config={WEBQA}:xyz", r"tables\.py:xyz: .*the known ones are bm25_"),
    ("webqa:vlp", f"--config={WEBQA}:human", rf"tables\.py:human: {NO_MODE}"),  # is only cited
    ("webqa:vlp", "--config=nowhere.py:vlp", r"nowhere\.py: no such config file"),
    ("webqa:vlp", "--split=dev", r"--split=dev: .*choose one of test, train, val"),
    ("webqa:vlp", "--workdir={tmp}/file", r"--workdir=.*file: cannot be written"),
    *(
        ("webqa:vlp", f"--config.parts.{part}.model={{models}}/{task}", rf"{task}: .*'{task}'")
        for part, task in (("reader", "rerank"), ("reranker", "answer"))
    ),
    *(
        (
            "webqa:vlp",
            f"--config.options.threshold={threshold}",
            rf"options\.threshold={threshold}: a probability from 0 to 1",
        )
        for threshold in ("1.5", "-0.1")
    ),
    *(
        ("atlas:fused", f"{FUSION}={weight}", rf"fusion_weight={weight}: a weight from 0 .* to 1")
        for weight in ("1.5", "-0.1")
    ),
    ("atlas:oracle", "--split=val", r"the gold sources of all 3 questions of this split are"),
    (
        "webqa:clip2",
        "--config.parts.retriever.modality=unknown --config.data.dir={bare_data}",
        r"corpus",
    ),
]


@pytest.mark.parametrize(("row", "changes", "message"), WRONG)
def test_a_flag_that_is_wrong(
    row, changes, message, data, bare_data, models, index, refused, tmp_path
):
    (tmp_path / "file").write_text("")
    flags = row_flags(row, tmp_path / "run", data, models, index)
    changes = changes.format(tmp=tmp_path, models=models, bare_data=bare_data).split()
    refused(*flags, *changes, message=message)
    assert not (tmp_path / "run").exists()


def test_the_keys_of_a_row():
    """Each of them is one that may be given."""
    config = f"--config={ROOT}/configs/scienceqa/tables.py:smollm2_k3"
    keys = done("run", config, "--keys")["keys"]
    options = {key: value for key, value in keys.items() if key.startswith("options.")}
    assert (keys["parts.library.text_model"], options["options.shots"]) == ("minilm", 3)
    flags = [f"--config.{key}={value}" for key, value in options.items()]
    assert done("run", config, "--keys", *flags)["keys"] == keys


def test_a_flag_that_is_missing(refused):
    refused("run", "--workdir=x", message=r"required: --config")
    refused("run", f"--config={WEBQA}:vlp", message=r"--workdir is missing")


@pytest.mark.parametrize("file", ["atlas/answer.py", "atlas/demo.py", "webqa/vlp_select.py:vinvl"])
def test_a_config_that_is_no_row(file, refused, tmp_path):
    flags = ("run", f"--config={ROOT}/configs/{file}", f"--workdir={tmp_path / 'run'}")
    refused(*flags, message=r"does not define a row of a table .*tables\.py:vlp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# How to run the rows", r"notes\.py: a config file must define get_config"),
        ("These are notes.", r"notes\.py, line 1: not valid python"),
        ("def get_config():\n    return {}\n", r"notes\.py: get_config must return an ml_coll"),
        ("import nowhere", r"notes\.py, line 1: the config file fails"),
    ],
)
def test_a_config_file_that_is_no_config(text, message, refused, tmp_path):
    (tmp_path / "notes.py").write_text(text)
    flags = ("run", f"--config={tmp_path / 'notes.py'}", f"--workdir={tmp_path / 'run'}")
    refused(*flags, message=message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("options.treshold=0.3", r"options\.treshold: unknown; did you mean 'threshold'"),
        ("options.top_k=20", r"config key options\.top_k: unknown; .* cap, select"),
        ("options.threshold=high", r"--config\.options\.threshold=high: .*a number"),
        ("options.select=bets", r"config key options\.select='bets': one of .*did you mean 'best'"),
        ("options.cap=wqa", r"config key options\.cap='wqa': .*did you mean 'webqa'"),
        ("parts.retriever.method=bm25", r"parts\.retriever: unknown; .* reader, reranker"),
        ("setting=restrict", r"setting=restrict: use one of question_only, .*restricted"),
        ("setting=oracle", r"config key options\.cap: unknown; remove it\."),
        ("system=vlp", r"config key system=vlp: use one of webqa, pica, rmr, prophet, mavl"),
        ("dataset=webq", r"config key dataset='webq': .*did you mean 'webqa'"),
        ("data.modality=video", r"config key data\.modality='video'"),
        ("data.questions=-1", r"config key data\.questions=-1: at least 0"),
        ("scoring.lemmatizer=spcy", r"config key scoring\.lemmatizer='spcy': .*'spacy'"),
        ("data.split=dev", r"--split=dev: .*choose one of test, train, val"),
    ],
)
def test_wrong_values(override, message, flags, refused, tmp_path):
    flags = [flag for flag in flags if not flag.startswith("--split")]
    refused(*flags, f"--config.{override}", message=message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("config.options.treshold = 0.3", r"config key options\.treshold: unknown; .*cited"),
        ("config.options.citd = 3", r"config key options\.citd: unknown; did you mean 'cited'"),
        ("config.options = {'cited': 'two'}", r"config key options\.cited='two': a whole number"),
        ("config.options.cited = 0", r"config key options\.cited=0: at least 1 was expected"),
        ("del config.parts.retriever", r"config key parts\.retriever is missing; add it"),
        ("config.parts.reader = {'model': 'x'}", r"config key parts\.reader: unknown"),
        ("config.parts.retriever.metod = 'bm25'", r"config key parts\.retriever\.metod: unknown"),
        ("config.parts.retriever.method = 'bm52'", r"method='bm52': .*did you mean 'bm25'"),
        ("config.parts.retriever.fusion_weight = 0.5", r"fusion_weight: works only with method"),
        ("del config.row", r"the file does not define a row of a table \(no key `row`\)"),
        ("del config.data.split", r"config key data\.split is missing"),
        ("config.note = 'x'", r"config key note: unknown"),
    ],
)
def test_a_row_of_ones_own_that_does_not_fit_its_setting(change, message, data, refused, tmp_path):
    (tmp_path / "own.py").write_text(OWN_ROW.format(change))
    flags = (f"--config={tmp_path / 'own.py'}", f"--workdir={tmp_path / 'run'}")
    refused("run", *flags, f"--config.data.dir={data}", message=message)


def test_a_row_of_ones_own(data, tmp_path):
    (tmp_path / "own.py").write_text(OWN_ROW.format("config.options.cited = 1"))
    flags = (f"--config={tmp_path / 'own.py'}", f"--workdir={tmp_path / 'run'}")
    assert done("run", *flags, f"--config.data.dir={data}")["questions"] == 5


def test_a_dense_retriever_without_its_index(data, refused, tmp_path):
    flags = row_flags("atlas:bm25", tmp_path / "run", data, data, data)
    (tmp_path / "own.py").write_text(OWN_ROW.format("config.parts.retriever.method = 'dense'"))
    wrong = f"--config={tmp_path / 'own.py'}"
    refused(*flags, wrong, message=r"method=dense: needs parts\.retriever\.model and")


@pytest.mark.skipif(not scann_available(), reason="ScaNN is not installed")
def test_an_index_that_searches_approximately(data, models, index, refused, tmp_path):
    other = tmp_path / "index"
    shutil.copytree(index / "embeddings", other / "embeddings")
    done("index", f"--embeddings={other}", "--kind=scann")
    flags = row_flags("webqa:clip2", tmp_path / "run", data, models, other)
    message = r"index: searches approximately, but .*index_kind=exact; run `mmqa index .*=exact`"
    refused(*flags, message=message)
    assert done(*flags, "--config.parts.retriever.index_kind=any")["questions"] == 5


def test_the_workdir_of_another_row(flags, data, models, index, refused, tmp_path):
    """Of another limit, split or part, too; what is in it stays."""
    bm25 = row_flags("atlas:bm25", tmp_path / "run", data, models, index)
    done(*bm25)
    refused(*flags, message=r"run: holds a run of row bm25; name a new --workdir for vlp\.$")
    refused(*bm25, "--limit=2", message=r"limit \(None there, 2 now\)")
    message = r"run: holds a run of another config: .*differ; name a new --workdir"
    refused(*bm25, "--split=val", message=message)
    refused(*bm25, "--split=val", message=r"data\.split \('test' there, 'val' now\)")
    wrong = "--config.options.cited=3"
    refused(*bm25, wrong, message=r"options\.cited \(2 there, 3 now\)")
    # What changes no result is no difference: the published figures.
    (tmp_path / "own.py").write_text(OWN_ROW.format("config.published = ()"))
    assert done(*bm25, f"--config={tmp_path / 'own.py'}")["questions"] == 5


def test_the_workdir_of_something_else(flags, models, data, refused, tmp_path):
    shutil.copytree(models / "answer", tmp_path / "run")
    refused(*flags, message=r"run: holds a run of another config")
    (tmp_path / "run" / "config.json").write_text("[]")
    refused(*flags, message=r"run/config\.json: is not a run's config\.json")


@pytest.mark.parametrize("sums", [True, False])
def test_damaged_weights(sums, flags, models, refused, tmp_path):
    damaged = tmp_path / "answer"
    shutil.copytree(models / "answer", damaged)
    if not sums:  # of a version that wrote none
        (damaged / "weights" / "SHA256SUMS").unlink()
    for file in (damaged / "weights").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:20])
    message = r"answer/weights: files in it are missing, truncated or damaged"
    if sums:
        message = r"answer/weights: SHA256SUMS is damaged .*; copy the folder again, or train"
    refused(*flags, f"--config.parts.reader.model={damaged}", message=message)
    assert not (tmp_path / "run").exists()
