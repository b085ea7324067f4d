"""`mmqa models`, and refusals that name a model which works."""

import json

import pytest

from mmqa_jax.cli import main
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.weights.registry import architecture, names


def test_all_families_are_listed_with_what_was_measured(capsys):
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    listed = {row["family"] for row in rows}
    assert {*FAMILIES, *names(), *text_encoders.FAMILIES} <= listed
    of_texts = {row["family"] for row in rows if row["embeds"]}
    assert of_texts >= {"bert", "modernbert", "embedding_gemma2", "eurobert"}
    sizes = {row["size"]: row for row in rows}
    assert sizes["qwen3_vl_8b"]["sees"] == "yes"
    assert sizes["qwen3_8b"]["sees"] == ""
    # Parameters of Qwen3-8B's report, 8.19e9, in bfloat16, split over four chips.
    assert abs(float(sizes["qwen3_8b"]["GiB"]) - 8.19e9 * 2 / 2**30) < 0.1
    assert float(sizes["qwen3_8b"]["GiB a chip of v5e:2x4"]) == 3.83
    assert all(0 < float(row["deviation"]) < 1e-4 for row in rows if row["deviation"])


@pytest.mark.parametrize(
    ("model_type", "remedy"),
    [
        ("qwen3_6", r"nearest by name that is read is 'qwen3_5'.*--backend=openai"),
        ("gemma9", r"is 'gemma'.*`mmqa models`.*--backend=openai"),
        ("xyz", r"serve this one elsewhere.*--backend=openai; `mmqa models` lists"),
    ],
)
def test_a_foreign_family_names_what_works(model_type, remedy, tmp_path):
    write_json(tmp_path / "config.json", {"model_type": model_type})
    for name in ("llama", "clip"):
        with pytest.raises(UserError, match=f"model_type is '{model_type}', expected .*{remedy}"):
            architecture(name).open(tmp_path)


def test_a_family_of_another_model_names_that(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    with pytest.raises(UserError, match=r"or --model=bert to convert this one"):
        architecture("clip").open(tmp_path)
