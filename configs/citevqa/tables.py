"""The rows on CiteVQA: a model reads the passages that BM25 finds in all documents, and cites them.

The rectangle of a cited passage is that of its lines in the PDF file. A question's own documents
are not told to it: they are found, as in a collection. Rows of models alone are the control.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "citevqa"

DATA, DOCUMENTS = "data/citevqa", "data/citevqa_documents"
_RAW = "downloads/CiteVQA"
_rows = config_beside(__file__, "../rows.py")
MADE_BY = {
    DATA: f"mmqa prepare citevqa --raw={_RAW} --out={DATA}",
    DOCUMENTS: f"mmqa prepare folder --raw={_RAW}/data/pdf --out={DOCUMENTS}",
    **dict(_rows.QWEN_VL.values()),
}
ROWS = {**_rows.alone(), **_rows.found_in_documents(DOCUMENTS)}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "bm25_qwen3_vl") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="rmr",
        dataset="citevqa",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
