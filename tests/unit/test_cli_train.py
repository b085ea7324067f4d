"""`mmqa train`: what it leaves alone, and the configs, workdirs and data it refuses."""

import shutil

import pytest
from cli_runs import ROOT, done, rows_of, train_flags, tree

from mmqa_jax.core.config import load_config, to_plain_dict
from mmqa_jax.tasks.registry import check_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def test_a_trained_run_is_not_trained_again(data, models):
    before = tree(models / "rerank")
    done("train", *train_flags("rerank", data, models / "rerank"))
    assert tree(models / "rerank") == before
    steps = [row["step"] for row in rows_of(models / "rerank" / "metrics.jsonl")]
    assert steps == [1, 2]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.train.stps=5", r"config key train\.stps: unknown; did you mean 'steps'\?"),
        ("--config.train.steps=many", r"--config\.train\.steps=many: .*a whole number"),
        ("--config.train", r"write it as --config\.KEY=VALUE"),
        ("--config.train=5", r"--config\.train: is a section"),
        ("--config=nowhere.py", r"--config=nowhere\.py: no such config file"),
        ("--config.data.dir=nothing", r"nothing: no such folder, a prepared corpus was expected"),
        ("--config.data.dir=", r"config key data\.dir is empty"),
        ("--profile=1", r"--profile=1: START:END was expected"),
        ("--profile=1:3", r"--profile=1:3: steps from 1 to 2 \(train\.steps\) were expected"),
        ("--profile=1:2 --only_start", r"--profile: --only_start"),
    ],
)
def test_wrong_configs(flag, message, refused, data, tmp_path):
    flags = train_flags("rerank", data, tmp_path / "run")
    refused("train", *flags, *flag.split(), message=message)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "rerank",
            {"task": "vlp"},
            r"key task=vlp: unknown; use one of contrastive, rerank, answer",
        ),
        ("rerank", {"data.split": "dev"}, r"config key data\.split=dev: .*no such questions"),
        ("rerank", {"tokenizer": "corpus:5"}, r"vocab_size=5: .*give at least"),
        ("rerank", {"model.trunk": "bert_huge"}, r"config key model\.trunk=bert_huge: unknown"),
        (
            "rerank",
            {"packing.buckets": "((1,9),)"},
            r"packing\.buckets: 9 text columns .*give at l",
        ),
        ("rerank", {"train.optimizer.name": "sgd"}, r"sgd"),
        ("rerank", {"train.steps": 0}, r"config key train\.steps=0: at least 1 was expected"),
        ("rerank", {"batches.batch_size": 0}, r"batch_size"),
        (
            "rerank",
            {"packing.match_types": "(6,)"},
            r"packing\.match_types: the model has no token",
        ),
        ("rerank", {"new_types": "(-1,)"}, r"new_types: .*type -1; use 0 to 5"),
        (
            "contrastive",
            {"pictures.size": 48},
            r"pictures\.size=48: the vision tower takes 32; set",
        ),
        ("answer", {"model.written_words": 0}, r"written_words=0: at least 1 was .*; .* larger"),
        ("answer", {"model.written_words": -3}, r"written_words=-3: at least 1 was expected"),
        ("answer", {"model.copy_head": False}, r"written_words .*: set model\.copy_head too"),
        (
            "answer",
            {"tokenizer": "minilm"},
            r"written_words=1000: .*; set tokenizer to minilm:corp",
        ),
        ("answer", {"inference.no_repeat_ngram": 1}, r"ngram=1: 0 \(words may repeat\) or 2"),
        ("answer", {"batches.shares.text": 2.0}, r"batches\.shares\.text=2\.0: a share above 0"),
    ],
)
def test_configs_that_fit_no_run(task, changes, message, data, refused, tmp_path):
    refused("train", *train_flags(task, data, tmp_path / "run", **changes), message=message)
    assert not (tmp_path / "run").exists()


def test_a_refused_config_leaves_the_workdir_to_the_corrected_one(data, refused, tmp_path):
    """Whether it is refused at once, once the corpus is open, or when the weights are filled in."""
    run = tmp_path / "new" / "run"
    for wrong, message in (
        ({"train.steps": 0}, r"train\.steps=0"),
        ({"data.split": "dev"}, r"data\.split=dev"),
        ({"init": "nowhere"}, r"nowhere"),
    ):
        refused("train", *train_flags("rerank", data, run, **wrong), message=message)
        assert not run.parent.exists()
    done("train", *train_flags("rerank", data, run), "--only_start")
    assert (run / "model.json").exists()


def test_a_refused_config_leaves_what_was_there(data, refused, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    flags = train_flags("rerank", data, run, **{"data.split": "dev"})
    refused("train", *flags, message=r"data\.split=dev")
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c.packing.bukets = ((0, 64),)", r"packing\.bukets: unknown; did you mean 'buckets'"),
        ("c.augment.entites = 0.5", r"augment\.entites: unknown; did you mean 'entities'"),
        ("c.train.stepps = 3", r"train\.stepps: unknown; did you mean 'steps'"),
        ("c.batches.alike_shar = 0.1", r"batches\.alike_shar: unknown; .* 'alike_share'"),
        ("c.batches.query_length = 9", r"batches\.query_length: unknown; the known ones are"),
        ("c.model.chnges = {}", r"model\.chnges: unknown; did you mean 'changes'"),
        ("c.model.changes.layer = 1", r"model\.changes\.layer: unknown; did you mean 'layers'"),
        ("c.inference.num_beams = 5", r"inference\.num_beams: unknown"),
        ("c.inference.batch_size = 0", r"inference\.batch_size=0: at least 1 was expected"),
        ("c.masking = {}", r"key masking: unknown"),
        ("c.modle = {}", r"key modle: unknown; did you mean 'model'"),
        ("del c.mesh", r"key mesh is missing; add it"),
        ("del c.train.steps", r"train\.steps is missing; add it"),
        ("del c.model.patch", r"model\.patch is missing; add it"),
        ("c.model = 3", r"own\.py, line 4: .*model"),
        ("del c.model; c.model = 3", r"key model=3: a section was expected"),
        ("c.seed = 'a'", r"own\.py, line 4: .*seed"),
        ("del c.seed; c.seed = True", r"key seed=True: a whole number was expected"),
        ("c.seed = 2**40", r"key seed=1099511627776: at most 4,294,967,295 was expected"),
        ("c.packing.buckets = ((0,),)", r"packing\.buckets=\(\(0,\),\): a tuple whose items are"),
        ("c.pictures.resize = 'squish'", r"pictures\.resize='squish': one of squash, "),
        ("c.model.changes.heads = 0", r"model\.changes\.heads=0: at least 1 was expected"),
        ("c.model.frontend = 'x101'", r"key features\.root is missing; add it"),
        (
            "c.model.frontend = 'vinvl'; c.features = {'files': {'a': 'x.tsv'}}",
            r"key features\.files\.a: a number was expected",
        ),
        ("c.packing.segments = (4, 9)", r"packing\.segments: .*token type 9; use 0 to 5"),
        ("c.features = {'root': 'x101'}", r"key features: .*frontend=patches reads pixels; set it"),
        ("c.train.optimizer.multipliers = (('(', 2.0),)", r"'\(' is not a regular expression"),
        ("c.mesh.data = 3; c.batches.batch_size = 7", r"data=3.*does not fit 1 devices"),
        ("c.mesh = {'data': 1, 'dcn_tensor': 1}", r"key mesh\.dcn_tensor: unknown; did you"),
        ("c.mesh.dcn_fsdp = 2", r"mesh: dcn_fsdp=2 does not fit 1 slice: .*leave these axes out"),
        ("c.train.accumulate = 3", r"batch of 8: must be a multiple of 3"),
        ("raise RuntimeError('x')", r"own\.py, line 4: the config file fails \(RuntimeError: x\)"),
        ("return 3 +", r"own\.py, line 4: not valid python"),
    ],
)
def test_a_config_file_with_a_mistake(line, message, data, refused, tmp_path):
    rerank = f"{ROOT}/configs/atlas/rerank.py"
    (tmp_path / "own.py").write_text(
        "import runpy\n"
        "def get_config(mode=''):\n"
        f"    c = runpy.run_path({rerank!r})['get_config']('runlocal')\n"
        f"    {line}\n"
        "    return c\n"
    )
    flags = (f"--config={tmp_path / 'own.py'}", f"--config.data.dir={data}")
    refused("train", *flags, f"--workdir={tmp_path / 'run'}", message=message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)\n", r"own\.py, line 1: the config file fails \(SystemExit: 3\)"),
        ("x = '\0'\n", r"own\.py, line 1: not valid python \(source code string cannot"),
        ("def get_config():\n  x = 1\n    y = 2\n", r"own\.py, line 3: not valid python"),
        ("import json\njson.loads('{')\n", r"own\.py, line 2: the config file fails .*; repair it"),
    ],
)
def test_a_config_file_that_is_none(text, message, refused, tmp_path):
    (tmp_path / "own.py").write_text(text)
    flags = (f"--config={tmp_path / 'own.py'}", f"--workdir={tmp_path / 'run'}")
    refused("train", *flags, message=message)


@pytest.mark.parametrize("name", ["contrastive", "rerank", "answer", "demo"])
def test_an_unknown_mode_is_refused(name, refused, tmp_path):
    config = f"--config={ROOT}/configs/atlas/{name}.py:runlocl"
    verb = "demo" if name == "demo" else "train"
    message = r"runlocl: this file has no such mode; did you mean 'runlocal'\?"
    refused(verb, config, f"--workdir={tmp_path / 'run'}", message=message)


@pytest.mark.parametrize(("mode", "modality"), [("vlp_i", "image"), ("vlp_t", "text")])
def test_modes_of_one_modality_see_its_questions_as_often(mode, modality):
    """14,400 examples of 4,729 picture questions and 40 % of 3,870 text questions (Atlas)."""
    both, one = (load_config(f"{ROOT}/configs/atlas/answer.py{m}") for m in ("", f":{mode}"))
    check_config(one)
    shown = {"image": 4729, "text": both.batches.shares.text * 3870}
    steps = both.train.steps * shown[modality] / sum(shown.values())
    assert one.train.steps == round(steps)
    assert one.data.modality == modality
    one.train.steps, one.batches.shares = both.train.steps, both.batches.shares
    del one.data.modality
    assert to_plain_dict(one) == to_plain_dict(both)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("contrastive", r"contrastive training: no question lists a gold source; check the split"),
        ("rerank", r"rerank training: no question lists a gold source; check the split"),
        ("answer", r"answer training: no question has a reference answer; check the split"),
    ],
)
def test_questions_without_sources_and_answers_teach_nothing(
    task, message, bare_data, refused, tmp_path
):
    refused("train", *train_flags(task, bare_data, tmp_path / "run"), message=message)
    assert not (tmp_path / "run").exists()


def test_a_workdir_of_another_config_is_refused(refused, data, models, tmp_path):
    shutil.copytree(models / "rerank", tmp_path / "run")
    flags = train_flags("rerank", data, tmp_path / "run", seed=7)
    refused("train", *flags, message=r"another config: seed \(0 there, 7 now\).*new --workdir")
    (tmp_path / "run" / "config.json").write_text('{\n "config": oops}')
    refused("train", *flags, message=r"config\.json, line 2, column 12: not valid JSON .*; repair")


def test_what_a_finished_run_is_refused_for(refused, data, models, tmp_path):
    shutil.copytree(models / "rerank", tmp_path / "run")
    longer = train_flags("rerank", data, tmp_path / "run", **{"train.steps": 3})
    refused("train", *longer, message=r"train\.steps=3: the run began with 2.*--stretch_schedule")
    flags = train_flags("rerank", data, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").write_text("{oops")
    refused("train", *flags, message=r"run: tokenizer\.json is damaged .*; copy the folder again")
    (tmp_path / "run" / "model.json").write_text("[]")
    refused("train", *flags, message=r"model\.json: is not what training or `mmqa convert`")


def test_a_checkpoint_that_is_cut_is_named(refused, data, models, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(models / "rerank", run)
    (run / "model.json").unlink()
    last = run / "checkpoints" / "2"
    cut = max((last / "params").rglob("*"), key=lambda path: path.is_file() * path.stat().st_size)
    cut.write_bytes(cut.read_bytes()[:100])
    message = r"checkpoints/2: params/.* is damaged .*no earlier checkpoint is whole; .*, or delete"
    flags = train_flags("rerank", data, run)
    refused("train", *flags, message=message)
    shutil.rmtree(run / "checkpoints")
    assert done("train", *flags, "--only_start")["steps"] == 0
    assert (run / "model.json").exists()
    # It begins anew: no row of the steps that are lost is left.
    assert rows_of(run / "metrics.jsonl") == []
