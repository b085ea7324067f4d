"""`mmqa caption`: VinVL's detections in, captions and tags out, and resumption."""

import json

import numpy as np
import pytest
from cli_runs import mmqa, succeeded
from flax import nnx
from test_regions import detections, write_vinvl

from mmqa_jax.core.files import write_json
from mmqa_jax.data.formats.coco import read_captions, read_scored_tsv
from mmqa_jax.data.regions import VinVLFeatures, oscar_regions
from mmqa_jax.data.tokenizers import train_wordpiece
from mmqa_jax.decoding.masked_lm import write_captions
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.oscar.network import Oscar, OscarConfig, OscarLayout
from mmqa_jax.runs.verbs import captioning
from mmqa_jax.weights.folder import describe_model, save_trained
from mmqa_jax.weights.registry import architecture
from tests.drawn_weights import drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

NUMBERS = (391895, 522418, 184613, 7)  # COCO's: not the rows


@pytest.fixture(scope="module")
def oscar(tmp_path_factory):
    """A random captioner, its tokenizer, and detections of four pictures."""
    folder = tmp_path_factory.mktemp("oscar")
    return folder, *write_captioner(folder)


def write_captioner(folder):
    """The files of `oscar`; returns the model, the tokenizer and the detections."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_wordpiece(["a man rides thing 0 1 2 3 4 . on the mat"], 120, lowercase=True)
    tokenizer.save(folder / "tokenizer.json")
    bert = BertConfig(
        vocab_size=tokenizer.vocab_size, hidden=12, layers=1, heads=2, mlp=16, positions=80,
        init_stddev=0.6, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = drawn(lambda: Oscar(OscarConfig(bert), rngs=nnx.Rngs()), stddev=bert.init_stddev)
    save_trained(folder / "model", model, nnx.state(model), {})
    found = {n: detections(2 + row, 1595, seed=row) for row, n in enumerate(NUMBERS)}
    write_vinvl(folder / "features.tsv", found)
    sizes = "".join(f'{n}\t[{{"height": 400, "width": 700}}]\n' for n in NUMBERS)
    (folder / "hw.tsv").write_text(sizes)
    return model, tokenizer, found


def caption_flags(folder, out, **changes):
    values = {
        "features": folder / "features.tsv", "sizes": folder / "hw.tsv", "batch_size": 3,
        "model": folder / "model", "tokenizer": folder / "tokenizer.json", "num_beams": 2,
        "out": out / "captions.tsv", "tags": out / "tags.tsv", **changes,
    }  # fmt: skip
    return ["caption", *(f"--{k}={v}" for k, v in values.items() if v is not None), "--json"]


def test_captions_and_tags(oscar, tmp_path):
    folder, model, tokenizer, found = oscar
    ended = succeeded(*caption_flags(folder, tmp_path))
    assert ended.value["pictures"] == 4
    captions = read_captions(tmp_path / "captions.tsv")
    assert list(captions) == list(NUMBERS)
    # Alone, with regions by falling confidence and their labels in the same order.
    layout = OscarLayout(
        cls_id=tokenizer.cls_id, sep_id=tokenizer.sep_id, pad_id=tokenizer.pad_id,
        mask_id=tokenizer.mask_id,
    )  # fmt: skip
    for row, number in enumerate(NUMBERS):
        objects = json.loads((folder / "features.tsv").read_text().split("\n")[row].split("\t")[1])
        picture = VinVLFeatures.detections(objects["objects"], "")
        order = np.argsort(-picture.scores)
        words = " ".join(f"thing {n}" for n in order)
        result = write_captions(
            *nnx.split(model),
            layout.prompt([tokenizer.encode(words)], [oscar_regions(picture, (400, 700))[order]]),
            mask_id=tokenizer.mask_id, sep_id=tokenizer.sep_id, pad_id=tokenizer.pad_id,
            num_beams=2, only_best=True,
        )  # fmt: skip
        wanted = tokenizer.decode(result.tokens[0, 0, : result.lengths[0, 0]].tolist())
        assert captions[number].replace(" ", "") == wanted.replace(" ", "")
        assert " ." not in captions[number]
    tags = read_scored_tsv(tmp_path / "tags.tsv", "class")
    assert [tag["class"] for tag in tags[7]] == [f"thing {n}" for n in order]
    confidences = [tag["conf"] for tag in tags[7]]
    assert confidences == pytest.approx(sorted(found[7]["scores"], reverse=True))


def test_a_killed_job_repeats_one_batch_at_most(oscar, tmp_path, monkeypatch):
    folder, *_ = oscar
    calls = []
    whole = captioning.OscarCaptioner.__call__

    def counted(self, pictures):
        if len(calls) == 1 and not (tmp_path / "second").exists():
            raise KeyboardInterrupt
        calls.append(len(pictures))
        return whole(self, pictures)

    monkeypatch.setattr(captioning.OscarCaptioner, "__call__", counted)
    assert mmqa(*caption_flags(folder, tmp_path)).code == 130
    assert not (tmp_path / "captions.tsv").exists()
    (tmp_path / "second").touch()
    assert mmqa(*caption_flags(folder, tmp_path)).code == 0
    assert calls == [3, 3]  # the last batch is filled up to the one shape
    assert len(read_captions(tmp_path / "captions.tsv")) == 4
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_pictures_without_regions_are_counted(oscar, tmp_path):
    folder, _, _, found = oscar
    features = tmp_path / "features.tsv"
    write_vinvl(features, {n: found[n] for n in NUMBERS[:2]})
    with open(features, "a") as file:
        offset = file.tell()
        file.write('12\t{"objects": []}\n')
    with open(features.with_suffix(".lineidx"), "a") as file:
        file.write(f"{offset}\n")
    ended = succeeded(*caption_flags(folder, tmp_path, features=features))
    assert ended.value["without_regions"] == 1
    assert read_scored_tsv(tmp_path / "captions.tsv", "caption")[12] == []


def test_what_is_missing_is_named(oscar, tmp_path, refused):
    folder, *_ = oscar
    message = r"picture 391895: its height and width are in no row .* with --sizes"
    refused(*caption_flags(folder, tmp_path, sizes=None), message=message)
    (tmp_path / "hw.tsv").write_text("391895\t{}\n")
    message = r"hw\.tsv, line 1: a name, a tab and"
    refused(*caption_flags(folder, tmp_path, sizes=tmp_path / "hw.tsv"), message=message)


def test_another_model_is_refused(oscar, tmp_path, refused):
    folder, *_ = oscar
    (tmp_path / "bert" / "weights").mkdir(parents=True)
    record = describe_model(architecture("bert"), BertConfig(), "float32")
    write_json(tmp_path / "bert" / "model.json", record)
    message = r"--model=.*bert: holds a model of kind 'bert', oscar was expected; convert one with"
    refused(*caption_flags(folder, tmp_path, model=tmp_path / "bert"), message=message)
