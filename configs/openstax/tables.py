"""Multiple choice of OpenStax's textbooks with a small model: does retrieved text help?

1,673 of the corpus's questions have choices; those of `test` (313) are asked, with the 1,207 of
`train` as RMR's library. No paper has these rows. Their knowledge is the books' own paragraphs and
figures' captions; `section` searches the question's own section alone, which a question at hand
does not tell (an upper bound), `random` draws passages from everywhere (a lower one).
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "openstax"

DATA = "data/openstax"
MADE_BY = {DATA: f"mmqa prepare corpus --raw=downloads/openstax --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
_SMOLLM2 = _rows.language_model("smollm2", length=2048)
_MINILM = _rows.library(text="question_and_choices")


def _row(knowledge: dict | None = None, **options) -> dict:
    known = {} if knowledge is None else {"knowledge": _rows.knowledge(**knowledge)}
    return {
        "paper": "rmr",
        "setting": "rmr_choice",
        "parts": {"llm": _SMOLLM2, "library": _MINILM, **known},
        "options": {"shots": 0, "calibrated": True, **options},
        "where": {"kind": "multiple_choice"},
    }


_CHOICES = {"modality": "text", "text": "question_and_choices"}

# Row -> setting of papers/rmr.py, parts, options.
ROWS = {
    "smollm2_k0": _row(),
    "smollm2_k0_uncalibrated": _row(calibrated=False),
    "smollm2_k3": _row(shots=3),
    "smollm2_k3_random": _row(shots=3, similarity="random"),
    "smollm2_text1": _row({"modality": "text"}),
    "smollm2_text2": _row({"modality": "text", "top_k": 2}),
    "smollm2_text1_choices": _row(_CHOICES),
    "smollm2_text1_dense": _row({"modality": "text", "retriever": "dense"}),
    "smollm2_text1_fused": _row({"modality": "text", "retriever": "fused"}),
    "smollm2_figure1": _row({"modality": "image"}),
    "smollm2_any2": _row({"top_k": 2}),
    "smollm2_section1": _row({"modality": "text", "section_key": "section"}),
    "smollm2_section2": _row({"modality": "text", "section_key": "section", "top_k": 2}),
    "smollm2_random1": _row({"modality": "text", "retriever": "random"}),
    "smollm2_random2": _row({"modality": "text", "retriever": "random", "top_k": 2}),
    "smollm2_k3_text1": _row({"modality": "text"}, shots=3),
    "smollm2_k3_section1": _row({"modality": "text", "section_key": "section"}, shots=3),
}
_LLM = _rows.llm_rows(_SMOLLM2, {"method": "bm25"})
# SmolLM2 reads what BM25 found, and cites it; the choices have no gold sources.
ROWS |= {
    name: {**_LLM[name], "system": "webqa", "where": {"kind": "multiple_choice"}}
    for name in ("llm_question_only", "llm_retrieved", "llm_reranked")
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_text1") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="rmr",
        dataset="corpus",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
