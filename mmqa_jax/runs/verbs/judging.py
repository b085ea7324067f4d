"""`mmqa judge`: opens the parts, judges solved examples and writes their scores."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import check_section, read_typed, spec_of
from mmqa_jax.core.workdir import claim_workdir
from mmqa_jax.data.batches.retriever import FILE, write_example_scores
from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.extensions.example_judging import JudgeOptions, judge_examples, mean_scores
from mmqa_jax.prompting.few_shot import load_template
from mmqa_jax.runs.parts import LLMSpec, open_llm
from mmqa_jax.tasks.library import LibrarySpec, check_similarity, open_library

RESPONSES = "responses"
_SPEC: dict[str, Any] = {
    "data": {"dir": str, "splits": tuple[str, ...]},
    "parts": {"llm": spec_of(LLMSpec), "library": dict},
    "judge": spec_of(JudgeOptions, minimum=0),
}


def run_judging(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Judges the questions of a config's splits, or continues: answers are kept as they come.

    The folder gets example_scores.jsonl; config.json and responses/ are for continuing. Returns
    what `--json` prints: questions, candidates, and the mean scores by which example is shown.
    """
    check_section(config, "", _SPEC)
    options = JudgeOptions(**config.judge.to_dict())
    load_template(options.template)
    spec = read_typed(LibrarySpec, config.parts.library, "parts.library")
    check_similarity(options.similarity, spec, key="judge.similarity")
    if options.candidates < 2:
        raise UserError(
            f"config key judge.candidates={options.candidates}: at least 2 were expected; a "
            "retriever learns which of several helps more."
        )
    corpus = open_corpus(config.data.dir)
    questions = [q for split in config.data.splits for q in _questions(config, corpus, split)]
    with claim_workdir(folder, config, work=(f"{RESPONSES}*",)):
        library = open_library(corpus, spec)
        llm = open_llm(LLMSpec(**config.parts.llm.to_dict()), folder / RESPONSES)
        try:
            judged = judge_examples(questions, llm, library, options)
        finally:
            llm.close()
        write_example_scores(folder / FILE, judged.rows)
    return {
        "out": str(folder / FILE),
        "questions": len(judged.rows),
        "unscored_questions": len(questions) - len(judged.rows),
        "candidates": sum(len(row.scores) for row in judged.rows),
        "left_out": judged.left_out,
        "mean_score": mean_scores(judged.rows),
    }


def _questions(config: ConfigDict, corpus: Corpus, split: str) -> list[Question]:
    judged = [q for q in corpus.questions(split) if q.answer_index is not None]
    if not judged:
        raise UserError(
            f"config key data.splits={tuple(config.data.splits)}: {config.data.dir} holds no "
            f"questions of split {split} with choices and a known answer; choose another."
        )
    return evenly(judged, config.judge.questions)
