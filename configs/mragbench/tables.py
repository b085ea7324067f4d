"""The rows on MRAG-Bench: a vision-language model without, with given, gold and retrieved pictures.

They ask by the authors' prompts (papers/mragbench.py). `*_cited` read the retriever's pictures as
numbered sources, with WebQA's settings and our reader, and cite the ones that they used. No
published figure is among them: the authors' repository has none.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "mragbench"

DATA, CLIP, INDEX, ONEVISION = (
    *("data/mragbench", "weights/clip", "runs/clip_mragbench"),
    "weights/onevision_7b",
)
MADE_BY = {
    DATA: f"mmqa prepare mragbench --raw=downloads/mragbench --out={DATA}",
    CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
    INDEX: f"mmqa embed --data={DATA} --model={CLIP} --out={INDEX}; "
    f"mmqa index --embeddings={INDEX} --kind=exact",
    ONEVISION: "mmqa convert --model=onevision "
    f"--source=downloads/llava-onevision-qwen2-7b-ov-hf --out={ONEVISION}",
}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.QWEN_VL.values())
_CLIP = {"method": "dense", "model": CLIP, "index": INDEX}
_MODELS = {
    "onevision": _rows.language_model(ONEVISION, length=16_384),
    # Room for six pictures of any size beside the 4,096 tokens of an answer.
    **{
        name: _rows.language_model(model, length=16_384)
        for name, (model, _) in _rows.QWEN_VL.items()
    },
}


def _row(llm: dict, setting: str, **options: bool | int) -> dict:
    parts = {"llm": llm} | ({"retriever": _CLIP} if setting == "retrieved" else {})
    return {"setting": setting, "parts": parts, "options": options}


ROWS = {
    f"{name}_{setting}": _row(llm, setting)
    for name, llm in _MODELS.items()
    for setting in ("alone", "given", "gold", "retrieved")
}
ROWS |= {
    f"{name}_cited": {**_rows.llm_rows(llm, _CLIP)["llm_retrieved"], "system": "webqa"}
    for name, llm in _MODELS.items()
}
ROWS |= {
    # Retrieval alone, by question and picture: recall@k of the gold pictures.
    "clip": {
        "system": "webqa",
        "setting": "retrieve_full_scale",
        "parts": {"retriever": _CLIP},
        "options": {"cited": 5},
    },
    # From the words of the question alone; of a short context the answers are short.
    "smollm2": _row(
        _rows.language_model("smollm2", length=2048), "alone", picture=False, max_new_tokens=128
    ),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "qwen3_vl_retrieved") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="mragbench",
        dataset="mragbench",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
