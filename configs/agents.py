"""The rows of Prophet and MAVL, the same on OK-VQA and A-OKVQA. Not an experiment itself.

The paper's need LLaMA-2 7B, captions of the train pictures, the candidates and answer-aware
examples of Prophet's authors, and passages of Wikipedia, such as DPR's. Ours take
SmolLM2-135M-Instruct, one half of the split as the library of the other, candidates of a VQA model
trained on that other half, and OpenStax's paragraphs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.core.config import config_beside

_rows = config_beside(__file__, "rows.py")
LLAMA, WIKIPEDIA, OPENSTAX = "weights/llama2_7b", "data/wikipedia", "data/openstax"
MADE_BY = {
    LLAMA: f"mmqa convert --model=llama --source=downloads/Llama-2-7b-hf --out={LLAMA}",
    WIKIPEDIA: f"mmqa prepare dpr --raw=downloads/dpr --out={WIKIPEDIA}",
    OPENSTAX: f"mmqa prepare corpus --raw=downloads/openstax --out={OPENSTAX}",
}
TOLERANCE = 0.02
Figure = tuple[str, str, str, float]  # table, row, column, accuracy in percent

_WITHOUT_AGENTS = {"agents": ("manager",), "votes": (4.0,)}
_PROPHETS = "downloads/prophet/assets"
# Data set and split ("": its rows' own) -> candidates and answer-aware examples by the names that
# Prophet's README and scripts use.
_PROPHETS_FILES = {
    ("okvqa", ""): (
        f"{_PROPHETS}/candidates_okvqa.json",
        f"{_PROPHETS}/answer_aware_examples_okvqa.json",
    ),
    ("aokvqa", ""): (
        f"{_PROPHETS}/candidates_aokvqa_val.json",
        f"{_PROPHETS}/examples_aokvqa_val.json",
    ),
    ("aokvqa", "test"): (
        f"{_PROPHETS}/candidates_aokvqa_test.json",
        f"{_PROPHETS}/examples_aokvqa_test.json",
    ),
}
KEY_WORDS = 3  # for which Tool_2 has a block each: as many as figure 5's example
# Row of table 3 -> options of the setting `mavl`.
ABLATIONS = {
    "mavl": {},
    "mavl_without_agents": _WITHOUT_AGENTS,
    "mavl_without_planners": {"plans": "all"},
    "mavl_without_tools": {"plans": "none"},
    "mavl_without_all": {"plans": "none", **_WITHOUT_AGENTS},
}


def figures(found: Sequence[Figure], scorer: str) -> tuple[dict, ...]:
    """Published figures as a row's `published`."""
    return tuple(
        {
            "table": table,
            "row": row,
            "column": column,
            "published": round(value / 100, 4),
            "tolerance": TOLERANCE,
            "scorer": scorer,
            "group": "",
        }
        for table, row, column, value in found
    )


def cited(found: Sequence[Figure], scorer: str) -> tuple[dict, ...]:
    """Figures of MAVL's tables that it cites, or that only a leaderboard gives."""
    return tuple({**figure, "paper": "mavl"} for figure in figures(found, scorer))


def paper_rows(
    dataset: str, published: Mapping[str, Sequence[Figure]], scorer: str, *, split: str = ""
) -> dict:
    """The rows of MAVL's tables that are run.

    Args:
      dataset: whose files of Prophet's authors are in downloads/prophet.
      published: row -> its figures; rows that are not there are left out.
      split: `test`: the rows' names end in `_test`, and their examples are those of train and val,
        as Prophet's authors have them there; "": the split that the data set's rows are of.
    """
    llm = _rows.language_model(LLAMA, length=4096)
    heuristics = _rows.heuristics(*_PROPHETS_FILES[dataset, split])
    more_splits = ("val",) if split else ()
    parts = {
        "llm": llm,
        "library": _rows.library(text_model="", more_splits=more_splits),
        "heuristics": heuristics,
    }
    rows = {
        name: {"setting": "mavl", "parts": {**parts, "knowledge": _rows.knowledge(data=WIKIPEDIA)},
               "options": {"key_words": KEY_WORDS, **options}}
        for name, options in ABLATIONS.items()
    }  # fmt: skip
    rows["prophet_llama"] = {
        "setting": "prophet",
        "parts": parts,
        "options": {"shots": 8, "candidates": 5, "ensemble": 1},
    }
    rows["promptcap_llama"] = {  # the same prompt with PromptCap's captions
        **rows["prophet_llama"],
        "parts": {**parts, "captions": {"captions": promptcap_file(dataset), "tags": ""}},
    }
    return {
        f"{name}_{split}" if split else name: {
            **row,
            "paper": "mavl",
            "system": row["setting"],
            "published": figures(published[name], scorer),
            **({"split": split} if split else {}),
        }
        for name, row in rows.items()
        if name in published
    }


def our_rows(
    dataset: str, library: Mapping[str, Any], questions: int, *, knowledge: str = OPENSTAX
) -> dict:
    """The same systems with SmolLM2, and what the paper lacks.

    Args:
      library: fields of the part `library` that differ from its defaults; see `halves`.
      questions: of every row; 0 is all.
      knowledge: folder of the sources that are searched; "" is the row's own.
    """
    parts = _our_parts(dataset, library)
    team = {**parts, "knowledge": _rows.knowledge(data=knowledge, modality="text")}
    shown = {"shots": 4, "candidates": 5}  # where figure 8 levels off; more is slow on two cores
    known = {"knowledge_words": 25, "knowledge_tokens": 64}
    known["knowledge_template"] = "mavl.knowledge_short"
    asked = {**shown, "chat": True, "task": "test_input", **known}
    finished = {"finished": {"run": _finished(dataset)}}
    every_plan = {"finished": {"run": _finished(dataset, "smollm2_mavl_oracle")}}
    rows = {
        "smollm2_prophet": ("prophet", parts, {**shown, "ensemble": 5}),
        "smollm2_prophet_one": ("prophet", parts, {**shown, "ensemble": 1}),
        **{
            f"smollm2_{name}": ("mavl", team, {**asked, **options})
            for name, options in ABLATIONS.items()
        },
        "smollm2_mavl_oracle": ("mavl", team, {**asked, "plans": "oracle"}),
        "smollm2_mavl_one_plan": ("mavl_one_plan", every_plan, {}),
        "smollm2_mavl_probability": ("mavl_revote", finished, {"weighting": "probability"}),
        "smollm2_mavl_fitted": ("mavl_revote", finished, {"weighting": "fitted"}),
        "smollm2_draws": ("mavl_draws", parts, shown),
        "vqa_model_alone": ("prophet_candidate", {"heuristics": parts["heuristics"]}, {}),
    }
    return {
        name: {
            "paper": "mavl",
            "system": setting.partition("_")[0],
            "setting": setting,
            "parts": own,
            "options": options,
            "questions": questions,
        }
        for name, (setting, own, options) in rows.items()
    }


def learned_planner(dataset: str, rows: Mapping[str, Any]) -> dict:
    """The row `smollm2_mavl` with the planner of planner.py, on the half that it did not learn.

    Args:
      rows: of `our_rows`.
    """
    row = rows["smollm2_mavl"]
    planner = _rows.language_model(_planner(dataset), cache=row["parts"]["llm"]["cache"])
    return {**row, "parts": {**row["parts"], "planner": planner}, "folds": 2, "fold": 1}


def halves(split: str) -> dict[str, Any]:
    """The library of a split whose halves are each other's."""
    return {"split": split, "folds": 2}


def choice_row(dataset: str, library: Mapping[str, Any]) -> dict:
    """Prophet's prompt with SmolLM2, multiple choice."""
    return {
        "paper": "mavl",
        "system": "prophet",
        "setting": "prophet_choice",
        "parts": _our_parts(dataset, library),
        "options": {"shots": 4, "candidates": 5},
    }


def _our_parts(dataset: str, library: Mapping[str, Any]) -> dict:
    cache = f"runs/{dataset}_responses"
    return {
        "llm": _rows.language_model("smollm2", cache=cache),
        "library": _rows.library(**library, text_model=""),
        "heuristics": _rows.heuristics(*_our_files(dataset)),
    }


def made_by(dataset: str, split: str) -> dict[str, str]:
    """Path of an input of these rows -> where it comes from; `split` is its own library."""
    authors = "assets of github.com/MILVLG/prophet"
    ours = (
        f"mmqa candidates --data=data/{dataset} --split={split} --examples_split={split} "
        f"--model runs/{dataset}_mcan_0 runs/{dataset}_mcan_1 --out=runs/{dataset}_candidates"
    )
    return {
        **MADE_BY,
        **{
            path: authors
            for (of, _), files in _PROPHETS_FILES.items()
            for path in files
            if of == dataset
        },
        promptcap_file(dataset): (
            "PromptCap's caption of every question and example, {question_id: caption}, by its "
            "prompt 'please describe this image according to the given question: QUESTION'"
        ),
        **ours_made_by(dataset, ours),
        _planner(dataset): (
            f"mmqa train --config=configs/okvqa/planner.py --config.data.dir=data/{dataset} "
            f"--config.data.split={split} --config.data.outcomes="
            f"{_finished(dataset, 'smollm2_mavl_oracle')} --workdir={_planner(dataset)}"
        ),
    }


def ours_made_by(dataset: str, candidates: str) -> dict[str, str]:
    """The same of the inputs of our rows alone; `candidates` is the command that makes theirs."""
    return {
        **dict.fromkeys(_our_files(dataset), candidates),
        **{
            _finished(dataset, row): f"mmqa run --config=configs/{dataset}/tables.py:{row} "
            f"--workdir={_finished(dataset, row)}"
            for row in ("smollm2_mavl", "smollm2_mavl_oracle")
        },
    }


def promptcap_file(dataset: str) -> str:
    """PromptCap's captions of a benchmark's questions."""
    return f"downloads/promptcap/{dataset}_captions.json"


def _our_files(dataset: str) -> tuple[str, str]:
    folder = f"runs/{dataset}_candidates"
    return f"{folder}/candidates.json", f"{folder}/answer_aware_examples.json"


def _planner(dataset: str) -> str:
    return f"runs/{dataset}_planner"


def _finished(dataset: str, row: str = "smollm2_mavl") -> str:
    return f"runs/tables/{dataset}/{row}"
