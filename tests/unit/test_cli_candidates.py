"""`mmqa train` of a VQA model and `mmqa candidates`, without pictures and on authors' grids."""

import json
import shutil

import numpy as np
import pytest
from cli_runs import ROOT, done, flags_with, mmqa, quietly, tree, weights_of
from vqa_files import write_okvqa

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import fold_of, open_corpus
from mmqa_jax.prompting.examples.side_files import load_answer_aware, load_candidates
from mmqa_jax.runs.verbs.candidates import nearest
from mmqa_jax.tasks.run import run_training
from mmqa_jax.tasks.vqa import load_vqa_model
from tests.drawn_weights import drawn_starts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TINY = {
    "tokenizer": "corpus:200", "batches.lengths": "(24,)", "batches.batch_size": 4,
    "batches.threads": 0, "inference.batch_size": 2, "train.steps": 40,
    "train.checkpoint_every": 0, "train.log_every": 40, "train.optimizer.learning_rate": 1e-2,
}  # fmt: skip
FUSION = {
    "hidden": 16, "heads": 2, "mlp": 16, "layers": 1, "flat_mlp": 8, "flat_out": 12, "dropout": 0.0,
}  # fmt: skip
TEXT = {
    "hidden": 16, "layers": 1, "heads": 2, "mlp": 16, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def flags_of(workdir, data, mode="runlocal", **changes) -> list[str]:
    values = {**TINY, "data.dir": data, **changes}
    return flags_with("train", f"okvqa/mcan.py:{mode}", workdir, values)


def whole_run_flags(workdir, data, **changes) -> list[str]:
    """A run on all of train, as Prophet's own."""
    flags = flags_of(workdir, data, **{"data.split": "train", **changes})
    return [*flags, "--config.data.folds=1", "--config.data.more_splits=()"]


@pytest.fixture(scope="module")
def trained(cli_cache, tmp_path_factory):
    """OK-VQA's files, a run on each half of the test split, and one on train.

    The first is trained, the others are as they start. Its answers are those of its questions, the
    others take them over: with as many answers they are the same compiled programs.
    """
    folder = tmp_path_factory.mktemp("vqa")
    raw, data = write_okvqa(folder / "raw"), folder / "data"
    done("prepare", "okvqa", f"--raw={raw}", f"--out={data}")
    same = {"answers.file": folder / "run0/answers.json"}
    with quietly(cli_cache):
        result = done(*flags_of(folder / "run0", data, **{"data.fold": 0}), initializers=True)
        assert result["task"] == "vqa"
        done(*flags_of(folder / "run1", data, **{"data.fold": 1}, **same), "--only_start")
        # With the weights of the first: a program less than to draw its own.
        same |= {"init": folder / "run0"}
        done(*whole_run_flags(folder / "whole", data, **same), "--only_start")
    return folder


def run_candidates(trained, out, *models, **flags):
    names = [f"--{key}={value}" for key, value in flags.items()]
    paths = [str(trained / model) for model in models]
    return mmqa(
        "candidates", f"--data={trained / 'data'}", "--model", *paths, *names, f"--out={out}",
        "--json",
    )  # fmt: skip


def test_each_half_is_served_by_the_others_model(trained, tmp_path):
    ended = run_candidates(trained, tmp_path, "run0", "run1", examples_split="test")
    assert ended.code == 0, ended.err
    questions = open_corpus(trained / "data").questions("test")
    candidates = load_candidates(tmp_path / "candidates.json")
    examples = load_answer_aware(tmp_path / "answer_aware_examples.json")
    assert candidates.keys() == examples.keys() == {q.id for q in questions}
    halves = {fold: [q for q in questions if fold_of(q.id, 2) == fold] for fold in (0, 1)}
    assert all(halves.values())
    for fold, half in halves.items():
        model = load_vqa_model(trained / f"run{1 - fold}")
        found = model.candidates(half)
        for question in half:
            answers, confidences = zip(*found[question.id], strict=True)
            words, scores = zip(*candidates[question.id], strict=True)
            assert (words, scores) == (answers, pytest.approx(confidences))
            assert set(examples[question.id]) == {q.id for q in halves[1 - fold]}
    value = ended.value
    assert value["questions"] == 3
    assert set(value["scores"]) >= {"accuracy", "recall@10", "oracle@10"}


def test_a_model_learns_its_questions(trained):
    model = load_vqa_model(trained / "run0")
    corpus = open_corpus(trained / "data")
    own = [q for q in corpus.questions("test") if fold_of(q.id, 2) == 0]
    own += corpus.questions("train")
    found = model.candidates(own)
    for question in own:
        target = model.answers.targets(question)
        answers = [answer for answer, _ in found[question.id]]
        assert target[model.answers.answers.index(answers[0])] == max(target.values())
        confidences = [confidence for _, confidence in found[question.id]]
        assert confidences == sorted(confidences, reverse=True)


def test_examples_are_by_cosine():
    class Named:
        def __init__(self, name):
            self.id = name

    asked, library = [Named("q")], [Named(n) for n in "abcd"]
    latents = np.array([[1.0, 0.0]], "f4")
    of_library = np.array([[0.1, 1.0], [9.0, 9.0], [0.5, 0.1], [-1.0, 0.0]], "f4")
    assert nearest(asked, latents, library, of_library) == {"q": ["c", "b", "a", "d"]}


def test_prophets_own_split(trained, tmp_path):
    """One model on train: candidates of test and of its own examples, as heuristics.py."""
    ended = run_candidates(trained, tmp_path / "out", "whole")
    assert ended.code == 0, ended.err
    candidates = load_candidates(tmp_path / "out/candidates.json")
    assert candidates.keys() == {"15", "25", "26", "35"}
    examples = load_answer_aware(tmp_path / "out/answer_aware_examples.json")
    assert examples == {name: ["15"] for name in ("25", "26", "35")}


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        (["run0"], {"examples_split": "test"}, "of the 3 questions of test are in every model's"),
        (["run0", "run0"], {"examples_split": "test"}, "are another model's already"),
        (["run0", "run1"], {"split": "train"}, r"run0: was trained on all of train"),
        (["data"], {}, "data"),
    ],
)
def test_runs_that_do_not_fit(models, flags, message, trained, tmp_path):
    ended = run_candidates(trained, tmp_path / "out", *models, **flags)
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "out").exists()


def test_answers_of_another_run(trained, tmp_path, refused):
    """A vocabulary that differs from the head's, or from that of a run that resumes."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run0", run)
    answers = json.loads((run / "answers.json").read_text())
    (run / "answers.json").write_text(json.dumps([*answers, "zebra"]))
    (run / "SHA256SUMS").unlink()  # changed on purpose
    before = tree(run)
    flags = (f"--data={trained / 'data'}", f"--out={tmp_path / 'out'}", "--examples_split=test")
    message = f"{len(answers) + 1} answers, but the weights beside it have {len(answers)}"
    refused("candidates", "--model", run, trained / "run1", *flags, message=message)
    ended = mmqa(*flags_of(run, trained / "data", **{"train.steps": 40, "data.fold": 0}))
    assert ended.code == 0  # complete: nothing is read
    (run / "model.json").unlink()
    message = "this run began with other answers"
    refused(*flags_of(run, trained / "data", **{"data.fold": 0}), message=message)
    assert before.keys() - tree(run).keys() == {"model.json"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches.lengths": "(24,16)"}, r"batches\.lengths=\(24, 16\): increasing numbers from 3"),
        ({"data.fold": 2}, r"data\.fold=2: 0 to data\.folds - 1 = 1"),
        ({"model.image": "pixels"}, r"model\.image is 'pixels': expected one of grid, regions"),
        ({"model.fusion.heads": 5}, r"mcan\.fusion\.heads is 5"),
        ({"train.optimizer.name": "adamw"}, r"model\.frozen_text=True: weight decay would"),
        ({"answers.min_questions": 99}, r"answers\.min_questions=99: no answer"),
        ({"tokenizer": "words"}, r"tokenizer=words: .* name a WordPiece tokenizer"),
    ],
)
def test_wrong_configs(change, message, trained, refused, tmp_path):
    refused(*flags_of(tmp_path / "run", trained / "data", **change), message=message)


def test_prophets_recipe_on_grids(trained, tmp_path):
    """Pretraining's start, the new head alone, then all: each starts from the one before."""
    for name, number in (("train2014", 1), ("val2014", 2), ("val2014", 3)):
        folder = tmp_path / "grids" / name
        folder.mkdir(parents=True, exist_ok=True)
        grid = np.random.default_rng(number).normal(size=(2, 2, 6)).astype("f4")
        np.savez(folder / f"COCO_{name}_{number:012d}.npz", x=grid)
    (tmp_path / "vqav2.json").write_text('["ivy", "zebra"]')

    def stage(mode, name, only_start=False, **more):
        changes = {
            **{f"model.fusion.{key}": value for key, value in FUSION.items()},
            **{key: value for key, value in TINY.items() if "learning_rate" not in key},
            "model.grid": 2, "model.image_features": 6, "features.root": str(tmp_path / "grids"),
            "train.steps": 2, "answers.min_questions": 1, "data.dir": str(trained / "data"),
            "seed": 3,  # of biases whose mean is not near 0
        }  # fmt: skip
        config = load_config(f"{ROOT}/configs/okvqa/mcan.py:{mode}", {**changes, **more})
        config.model.changes = TEXT
        with drawn_starts():
            run_training(config, tmp_path / name, only_start=only_start)

    first = {"data.split": "train", "answers.file": str(tmp_path / "vqav2.json")}
    stage("pretrain", "pretrain", only_start=True, init="scratch", **first)
    base = {"answers.base": str(tmp_path / "pretrain")}
    stage("head", "head", init=str(tmp_path / "pretrain"), **base)
    stage("finetune", "finetune", only_start=True, init=str(tmp_path / "head"), **base)
    assert load_vqa_model(tmp_path / "head").answers.answers == ("ivy", "zebra", "vine")
    with pytest.raises(UserError, match="its head has 2 answers, and the first 2 of the run's 2"):
        stage("finetune", "other", init=str(tmp_path / "pretrain"), **{"answers.base": ""})
    # The head's stage moves the new answers alone; they start at 0 and the mean of the others.
    states = {name: weights_of(tmp_path / name) for name in ("pretrain", "head", "finetune")}
    for name, value in states["pretrain"].items():
        np.testing.assert_array_equal(states["head"][name], value, err_msg=name)
        np.testing.assert_array_equal(states["finetune"][name], value, err_msg=name)
    for name in ("new_head/kernel", "new_head/bias"):
        np.testing.assert_array_equal(states["finetune"][name], states["head"][name], err_msg=name)
    assert np.abs(states["head"]["new_head/kernel"]).max() < 5e-3
    assert np.abs(states["head"]["new_head/kernel"]).max() > 0
    mean = np.mean(states["pretrain"]["head/bias"])
    assert abs(mean) > 2e-2
    np.testing.assert_allclose(states["head"]["new_head/bias"], mean, atol=5e-3)
