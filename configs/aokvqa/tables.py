"""The rows on A-OKVQA: RMR's table 2, MAVL's tables 2 and 3, and ours with a small model.

`qwen25_vl`, `qwen3_vl` and `rmr_*` of these ask successors of RMR's models as it asks Gemini; they
have no published figures.

RMR's library is ScienceQA's train split. Our PICa rows take one half of val as the library of the
other, because captions of the train pictures are not at hand.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "rmr"

DATA, SCIENCEQA, CLIP = "data/aokvqa", "data/scienceqa", "weights/clip"
MADE_BY = {
    DATA: f"mmqa prepare aokvqa --raw=downloads/aokvqa --out={DATA}",
    SCIENCEQA: f"mmqa prepare scienceqa --raw=downloads/scienceqa --out={SCIENCEQA}",
    CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
}
TOLERANCE = 0.02

_rows = config_beside(__file__, "../rows.py")
_agents = config_beside(__file__, "../agents.py")
MADE_BY |= _agents.made_by("aokvqa", "val") | dict(_rows.QWEN_VL.values())
_SMOLLM2 = _rows.language_model("smollm2")
_GEMINI = _rows.language_model("gemini-pro-vision", "openai")
_HALVES = _rows.library(split="val", folds=2)
_LIBRARY = _rows.library(data=SCIENCEQA, text_model=CLIP, image_model=CLIP)


def _published(row: str, value: float) -> tuple[dict, ...]:
    return (
        {
            "table": "2",
            "row": row,
            "column": "direct answer",
            "published": round(value / 100, 4),
            "tolerance": TOLERANCE,
            "scorer": "a_okvqa_da/official",
            "group": "",
        },
    )


def _rmr(llm: dict, shots: int, published: tuple[dict, ...] = ()) -> dict:
    return {
        "paper": "rmr",
        "system": "rmr",
        "setting": "rmr_direct",
        "parts": {"llm": llm, "library": _LIBRARY},
        "options": {"shots": shots, "chat": True, "pictures": True, **_rows.RMR},
        "published": published,
    }


def _direct(**options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {
            "shots": 8,
            "similarity": "question",
            "shot_answer": "majority",
            "max_new_tokens": 8,
            **options,
        },
    }


def _choice(**options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica_choice",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {"shots": 8, "similarity": "question", "shot_answer": "majority", **options},
    }


def _mavl(row: str, value: float, column: str = "val") -> tuple:
    return ("2", row, column, value)


def _ablated(row: str, value: float) -> tuple:
    return ("3", row, "A-OKVQA", value)


# MAVL, tables 2 and 3, whose answers on val are scored.
_MAVL = {
    "mavl": (_mavl("Ours", 53.8), _ablated("Ours", 53.8)),
    "mavl_without_agents": (_ablated("x (Multi-agents)", 51.8),),
    "mavl_without_tools": (_ablated("x (Tools)", 52.3),),
    "mavl_without_planners": (_ablated("x (Planners)", 52.8),),
    "mavl_without_all": (_ablated("x (All)", 51.1),),
    "prophet_llama": (_mavl("Prophet-LLaMA", 51.2),),
    "promptcap_llama": (),  # the table has no figure of val
}
# Table 2's column `test`: only the leaderboard has these answers.
_MAVL_TEST = {
    "mavl": (_mavl("Ours", 49.1, "test"),),
    "prophet_llama": (_mavl("Prophet-LLaMA", 48.0, "test"),),
    "promptcap_llama": (_mavl("PromptCap-LLaMA", 48.1, "test"),),
}
_MAVL_CITED = {  # val, test
    "Pythia": (25.2, 21.9),
    "ClipCap": (30.9, 25.9),
    "ViLBERT": (30.6, 25.9),
    "LXMERT": (30.7, 25.9),
    "KRISP": (33.7, 27.1),
    "VLC-BERT": (None, 38.1),
    "GPV-2": (48.6, 40.7),
    "Unified-IO": (None, 45.2),
}
# Row -> setting of papers/pica.py, rmr.py, prophet.py or mavl.py, parts, options, published
# figures (RMR, table 2; MAVL, tables 2 and 3).
ROWS = {
    "gemini": _rmr(_GEMINI, 0, _published("Gemini", 44.2)),
    "gemini_rmr": _rmr(_GEMINI, 3, _published("Gemini+RMR", 63.1)),
    **{name: _rmr(_rows.qwen_vl(name), 0) for name in _rows.QWEN_VL},
    **{f"rmr_{name}": _rmr(_rows.qwen_vl(name), 3) for name in _rows.QWEN_VL},
    "smollm2_zero_shot": _direct(shots=0),
    "smollm2_random": _direct(similarity="random"),
    "smollm2_similar": _direct(),
    "smollm2_choice": _choice(),
    "smollm2_choice_mean": _choice(score="mean"),
    "smollm2_choice_calibrated": _choice(calibrated=True),
    "smollm2_choice_zero_shot": _choice(shots=0, calibrated=True),
    "smollm2_promptcap": {  # PromptCap's order, the questions' own captions
        "paper": "pica",
        "setting": "pica_promptcap",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {"shots": 8, "similarity": "question"},
    },
    **_agents.paper_rows("aokvqa", _MAVL, "a_okvqa_da/official"),
    **_agents.paper_rows("aokvqa", _MAVL_TEST, "a_okvqa_da/official", split="test"),
    **_agents.our_rows("aokvqa", _agents.halves("val"), 0),
    "smollm2_prophet_choice": _agents.choice_row("aokvqa", _agents.halves("val")),
}
MISSING: dict[str, tuple[dict, ...]] = {}
_RMR_CITED = {
    name: _published(name, value)
    for name, value in {
        "Pythia": 25.2,
        "ViLBERT": 30.6,
        "LXMERT": 30.7,
        "KRISP": 33.7,
        "GPV-2": 48.6,
        "BLIP-2": 53.2,
        "PaLM-CoT": 41.5,
        "PICa": 42.4,
        "IPVR": 46.4,
        "PromptCap": 56.3,
        "Prophet": 58.2,
        "PaLI-3-VPD generalist": 56.5,
        "PaLI-X-VPD generalist": 62.7,
    }.items()
}
CITED = {
    name: (
        *_RMR_CITED.get(name, ()),
        *_agents.cited(
            [
                _mavl(name, value, column)
                for column, value in zip(("val", "test"), _MAVL_CITED.get(name, ()), strict=False)
                if value is not None
            ],
            "a_okvqa_da/official",
        ),
    )
    for name in (*_RMR_CITED, *(name for name in _MAVL_CITED if name not in _RMR_CITED))
}
ROWS["smollm2_mavl_planner"] = _agents.learned_planner("aokvqa", ROWS)
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_similar") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="pica",
        dataset="aokvqa",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
