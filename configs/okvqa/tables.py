"""The rows on OK-VQA: PICa's table, PromptCap, MAVL's tables, and the same with a small model.

`pica_*` are PICa's, for a server with the completion model that the user names and with the CLIP
vectors that its authors published, `mavl*`, `prophet_llama` and `promptcap_llama` MAVL's;
`kat_*` are KAT's, a T5 that kat.py trains, without a language model; `smollm2_*` are ours. The
library of examples and the questions are the two halves of one split in our rows, because captions
of the train pictures were not at hand; the papers' take the train split.
PromptCap's own captions are written for each question; in our row VinVL's stand in.
`smollm2_similar_factbook` and `_openstax*` are KAT-style: a passage of the World Factbook (in
Atlas) or of textbooks follows the caption.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "pica"

DATA = "data/okvqa"
MADE_BY = {DATA: f"mmqa prepare okvqa --raw=downloads/okvqa --out={DATA}"}
ATLAS, OPENSTAX = "data/atlas", "data/openstax"
MADE_BY[ATLAS] = f"mmqa prepare atlas --out={ATLAS}"
MADE_BY[OPENSTAX] = f"mmqa prepare corpus --raw=downloads/openstax --out={OPENSTAX}"
VECTORS = "downloads/PICa/coco_clip_new"
CLIP = "weights/clip"  # in place of the vectors
MADE_BY[CLIP] = f"mmqa convert --model=clip --source=downloads/ViT-B-16.pt --out={CLIP}"
MADE_BY[VECTORS] = "git clone https://github.com/microsoft/PICa downloads/PICa"
TOLERANCE = 0.02

_rows = config_beside(__file__, "../rows.py")
_agents = config_beside(__file__, "../agents.py")
_kats = config_beside(__file__, "kat.py")
MADE_BY |= _agents.made_by("okvqa", "test")
MADE_BY |= {
    f"data/runs/kat-{name}": f"mmqa train --config=configs/okvqa/kat.py{mode} "
    f"--config.data.dir={DATA} --workdir=data/runs/kat-{name}"
    for name, mode in (("base", ":base"), ("large", ""), ("large-explicit", ":large_explicit"))
}
MADE_BY |= {
    path: "okvqa.zip of github.com/guilk/KAT, README.md, unpacked in downloads/KAT"
    for path in _kats.knowledge("val").values()
    if path
}
_SMOLLM2 = _rows.language_model("smollm2")
_DAVINCI = _rows.language_model("davinci-002", "openai")
_HALVES = _rows.library(split="test", folds=2)
_UNCOMPARED = _rows.library(text_model="")
_PICA = _rows.library(text_model="", vectors=VECTORS)
_PROMPTCAP = {"captions": {"captions": _agents.promptcap_file("okvqa"), "tags": ""}}


def _published(row: str, value: float, table: str = "2") -> tuple[dict, ...]:
    return (
        {
            "table": table,
            "row": row,
            "column": "accuracy",
            "published": round(value / 100, 4),
            "tolerance": TOLERANCE,
            "scorer": "vqa_accuracy/official",
            "group": "",
        },
    )


def _paper(row: str, value: float, library: dict = _PICA, **options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica",
        "parts": {"llm": _DAVINCI, "library": library},
        "options": {"shots": 16, "shot_captions": "people", **options},
        "published": _published(row, value),
    }


def _ours(**options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {"shots": 8, "similarity": "question", "max_new_tokens": 8, **options},
        "questions": 1000,
    }


def _knowing(data: str, **knowledge) -> dict:
    """With the best snippet for caption and question, or as `knowledge` says."""
    own = {"data": data, "modality": "text", "text": "question_and_caption", "max_words": 60}
    row = _ours()
    row["parts"] = {**row["parts"], "knowledge": _rows.knowledge(**{**own, **knowledge})}
    return row


def _promptcap(llm: dict, library: dict, captions: dict, **options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica_promptcap",
        "parts": {"llm": llm, "library": library, **captions},
        "options": options,
    }


def _baseline(setting: str, **options) -> dict:
    return {
        "paper": "pica",
        "setting": setting,
        "parts": {"library": _HALVES},
        "options": {"similarity": "question", **options},
        "questions": 1000,
    }


def _kat(name: str, published: tuple, *, answers: bool = True) -> dict:
    """KAT as its README.md has it, with a reader that kat.py trained."""
    found = _kats.knowledge("val", answers=answers)
    del found["rankings"]
    folder = f"data/runs/{name.replace('_', '-')}"
    return {
        "paper": "mavl",
        "system": "kat",
        "setting": "kat",
        "parts": {
            "facts": found,
            "fusion_reader": {"model": folder, "config": "", "tokenizer": ""},
        },
        "published": _agents.figures(published, "vqa_accuracy/kat"),
    }


def _mavl(row: str, value: float) -> tuple:
    return ("1", row, "accuracy", value)


def _of_kat(row: str, value: float) -> tuple:
    return ("KAT, README.md", row, "accuracy", value)


def _ablated(row: str, value: float) -> tuple:
    return ("3", row, "OK-VQA", value)


# MAVL, tables 1 and 3.
_MAVL = {
    "mavl": (_mavl("Ours", 55.6), _ablated("Ours", 55.6)),
    "mavl_without_agents": (_ablated("x (Multi-agents)", 53.8),),
    "mavl_without_tools": (_ablated("x (Tools)", 54.4),),
    "mavl_without_planners": (_ablated("x (Planners)", 54.7),),
    "mavl_without_all": (_ablated("x (All)", 52.4),),
    "prophet_llama": (_mavl("Prophet-LLaMA", 52.8),),
    "promptcap_llama": (_mavl("PromptCap-LLaMA", 53.4),),
}
# Row -> setting of papers/pica.py, prophet.py or mavl.py, parts, options, published figures (PICa,
# table 2; MAVL, tables 1 and 3).
ROWS = {
    "pica_base": _paper("PICa-Base (C)", 42.0, _UNCOMPARED, similarity="random"),
    "pica_base_tags": _paper("PICa-Base (C+T)", 43.3, _UNCOMPARED, similarity="random", tags=True),
    "pica_full": _paper("PICa-Full (C)", 46.9, ensemble=5),
    "pica_full_tags": _paper("PICa-Full (C+T)", 48.0, ensemble=5, tags=True),
    "promptcap": _promptcap(_DAVINCI, _PICA, _PROMPTCAP)
    | {"published": _published("PromptCap", 60.4, "PromptCap, abstract")},
    "smollm2_zero_shot": _ours(shots=0),
    "smollm2_random": _ours(similarity="random"),
    "smollm2_similar": _ours(),
    "smollm2_similar_tags": _ours(tags=True),
    "smollm2_ensemble": _ours(ensemble=5),
    "smollm2_promptcap": _promptcap(_SMOLLM2, _HALVES, {}, shots=8, similarity="question")
    | {"questions": 1000},
    "smollm2_similar_factbook": _knowing(ATLAS),
    "smollm2_similar_openstax": _knowing(OPENSTAX),
    "smollm2_similar_openstax_dense": _knowing(OPENSTAX, retriever="dense"),
    "smollm2_similar_openstax_random": _knowing(OPENSTAX, retriever="random"),
    "copy_nearest": _baseline("copy_nearest"),
    "vote_of_nearest": _baseline("vote_of_nearest", shots=16),
    **_agents.paper_rows("okvqa", _MAVL, "vqa_accuracy/official"),
    "kat_base": _kat("kat_base", (_of_kat("base_both_knowledge", 50.58),)),
    "kat_large": _kat("kat_large", (_mavl("KAT", 53.1), _of_kat("large_both_knowledge", 53.09))),
    "kat_large_explicit": _kat(
        "kat_large_explicit", (_of_kat("large_explicit_only", 44.25),), answers=False
    ),
    **_agents.our_rows("okvqa", _agents.halves("test"), 1000),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {
    name: _agents.cited([_mavl(name, value)], "vqa_accuracy/official")
    for name, value in {
        "MUTAN+AN": 27.8,
        "Mucko": 29.2,
        "ConceptBert": 33.7,
        "KRISP": 38.9,
        "MAVEx": 39.4,
        "Visual Retriever-Reader": 39.2,
        "VLC-BERT": 43.1,
        "TRiG": 49.4,
        "UnifER": 42.1,
        "PICa-Base (Caption)": 42.0,
        "PICa-Base (Caption+Tags)": 43.3,
        "PICa-Full (Caption)": 46.9,
        "PICa-Full (Caption+Tags)": 48.0,
    }.items()
}
ROWS["smollm2_mavl_planner"] = _agents.learned_planner("okvqa", ROWS)
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_similar") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="pica",
        dataset="okvqa",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
