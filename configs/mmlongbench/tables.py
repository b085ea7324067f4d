"""The rows on MMLongBench-Doc: a model reads the passages that BM25 finds in all documents.

A question's own document is not told to it: it is found, as in a collection of documents. Rows of
models alone are the control.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "mmlongbench"

DATA, DOCUMENTS = "data/mmlongbench", "data/mmlongbench_documents"
_RAW = "downloads/MMLongBench-Doc"
_rows = config_beside(__file__, "../rows.py")
MADE_BY = {
    DATA: f"mmqa prepare mmlongbench --raw={_RAW} --out={DATA}",
    DOCUMENTS: f"mmqa prepare folder --raw={_RAW}/data/documents --out={DOCUMENTS}",
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
        dataset="mmlongbench",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
