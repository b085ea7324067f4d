"""`mmqa candidates` of a checkpoint that Prophet's authors trained, converted."""

import json

import jax
import numpy as np
import pytest
from cli_runs import ROOT, done
from flax import nnx
from tiny_checkpoints import make_source
from vqa_files import write_okvqa

from mmqa_jax.data.tokenizers import train_wordpiece
from mmqa_jax.prompting.examples.side_files import load_answer_aware, load_candidates
from mmqa_jax.weights.folder import load_converted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

ANSWERS = [f"answer{n}" for n in range(17)]  # 13 of the pretraining, 4 of finetuning
QUESTIONS = {"25": "what sport is this", "26": "how many wheels", "35": "what is cooking"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Converted weights, and all that their config names."""
    folder = tmp_path_factory.mktemp("prophet")
    source = make_source("mcan", folder / "downloads")
    done(*source.flags("mcan"), f"--out={folder / 'weights'}")
    done("prepare", "okvqa", f"--raw={write_okvqa(folder / 'raw')}", f"--out={folder / 'data'}")
    tokenizer = train_wordpiece(["What sport is this? two wheels"] * 9, 30)
    assert tokenizer.vocab_size == source.config.text.vocab_size
    tokenizer.save(folder / "tokenizer.json")
    (folder / "answers.json").write_text(json.dumps(ANSWERS))
    grids = folder / "grids/val2014"
    grids.mkdir(parents=True)
    (folder / "grids/train2014").mkdir()
    for number in (1, 2, 3):
        name = "train2014" if number == 1 else "val2014"
        np.savez(folder / f"grids/{name}/COCO_{name}_{number:012d}.npz", x=grid_of(number))
    return folder


def grid_of(image_id: int) -> np.ndarray:
    return np.random.default_rng(image_id).normal(size=(3, 3, 11)).astype("f4")


def flags_of(files, out, config="finetune", **changes) -> list[str]:
    values = {
        "tokenizer": files / "tokenizer.json", "answers.file": files / "answers.json",
        "features.root": files / "grids", "batches.lengths": "(9,)", **changes,
    }  # fmt: skip
    given = [f"--config={ROOT}/configs/okvqa/mcan.py:{config}"] if config else []
    return [
        "candidates", f"--data={files / 'data'}", f"--model={files / 'weights'}", *given,
        *(f"--config.{key}={value}" for key, value in values.items()), f"--out={out}", "--json",
    ]  # fmt: skip


def test_candidates_are_the_scores_of_the_weights(files, tmp_path):
    value = done(*flags_of(files, tmp_path))
    assert (value["questions"], value["examples"]) == (3, 1)
    found = load_candidates(tmp_path / "candidates.json")
    assert found.keys() == {"15", *QUESTIONS}
    assert load_answer_aware(tmp_path / "answer_aware_examples.json") == {
        name: ["15"] for name in QUESTIONS
    }
    graphdef, state = nnx.split(load_converted(files / "weights"))
    logits = jax.jit(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs))
    tokenizer = train_wordpiece(["What sport is this? two wheels"] * 9, 30)
    for (name, text), image in zip(QUESTIONS.items(), (2, 2, 3), strict=True):
        tokens = [tokenizer.cls_id, *tokenizer.encode(text)[:7], tokenizer.sep_id]
        ids = np.array([[*tokens, *[0] * (9 - len(tokens))]])
        scores = 1 / (
            1 + np.exp(-np.asarray(logits(state, ids, grid_of(image).reshape(1, 9, 11))[0]))
        )
        best = np.argsort(-scores, kind="stable")[:10]
        assert [answer for answer, _ in found[name]] == [ANSWERS[n] for n in best]
        np.testing.assert_allclose([score for _, score in found[name]], scores[best], rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ("", {}, "changes a config, but there is none"),
        ("small", {}, "and a config of model.image=grid belong together"),
        ("finetune", {"answers.file": ""}, "answers.file: is empty, and a converted checkpoint"),
        ("finetune", {"answers.file": "FEW"}, "has 2 entries, the weights in"),
        ("finetune", {"tokenizer": "minilm.json"}, "minilm.json"),
    ],
)
def test_what_does_not_belong_together(config, changes, message, files, tmp_path, refused):
    few = tmp_path / "few.json"
    few.write_text('["ivy", "zebra"]')
    changes = {key: str(few) if value == "FEW" else value for key, value in changes.items()}
    if config == "small":
        whole = {"data.split": "train", "data.folds": 1, "data.more_splits": "()"}
        flags = flags_of(files, tmp_path / "out", config, **whole)
        flags = [flag for flag in flags if "features" not in flag]
    else:
        flags = flags_of(files, tmp_path / "out", config, **changes)
    refused(*flags, message=message)
    assert not (tmp_path / "out").exists()


def test_a_config_of_another_task_is_refused(files, refused, tmp_path):
    flags = ["candidates", f"--data={files / 'data'}", f"--model={files / 'weights'}"]
    config = f"--config={ROOT}/configs/webqa/contrastive.py"
    message = "--config: is of the task contrastive, vqa was expected; name another"
    refused(*flags, config, f"--out={tmp_path / 'out'}", message=message)


def test_a_checkpoint_needs_its_config_and_a_run_none(files, tmp_path, refused):
    out = f"--out={tmp_path / 'out'}"
    bare = ("candidates", f"--data={files / 'data'}", f"--model={files / 'weights'}", out)
    refused(
        *bare, message="a converted checkpoint does not say how it was trained; give its config"
    )
    flags = [f.replace("weights", "data") for f in flags_of(files, tmp_path / "out")]
    refused(*flags, message="--config is for checkpoints that `mmqa convert` wrote")
