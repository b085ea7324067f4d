"""Rows of the papers' tables over the tiny corpus and the tiny models."""

from pathlib import Path

from cli_runs import ROOT

from mmqa_jax.core.config import load_config

# One row of every setting, and those whose parts differ.
ROWS = {
    "atlas:question_only": "question_only",
    "atlas:constant": "constant",
    "atlas:oracle": "oracle",
    "atlas:restricted": "restricted",  # with the retriever's similarity and a second hop
    "atlas:full": "full_scale",  # the same
    "atlas:restricted_vlp": "select_restricted",
    "atlas:full_vlp": "select_full_scale",
    "atlas:full_one_hop": "select_full_scale",  # with the similarity, one pass of the retriever
    "atlas:restricted_bm25": "retrieve_restricted",
    "atlas:restricted_dense": "retrieve_restricted",  # with a second hop
    "atlas:bm25": "retrieve_full_scale",
    "atlas:rrf": "retrieve_full_scale",
    "atlas:fused": "retrieve_full_scale",
    "atlas:fused_second_hop": "retrieve_full_scale",
    "webqa:vlp": "restricted",
    "webqa:clip2_vlp": "retrieved",
    "webqa:clip20_vlp": "full_scale",
    "webqa:bm25_full": "retrieve_full_scale",
    "webqa:bm25_known": "retrieve_full_scale",
    "webqa:clip2": "retrieve_full_scale",
    "webqa:clip2_unknown": "retrieve_full_scale",
}


def row_flags(name: str, workdir: Path, data: Path, models: Path, index: Path) -> list[str]:
    """`mmqa run` of a row, such as `atlas:full`, with the tiny parts."""
    paper, row = name.split(":")
    file = f"{ROOT}/configs/{paper}/tables.py:{row}"
    flags = ["run", f"--config={file}", f"--workdir={workdir}", "--split=test"]
    values = {"data.dir": data, "scoring.lemmatizer": "none"}
    for part, spec in load_config(file).parts.items():
        task = {"retriever": "contrastive", "reranker": "rerank", "reader": "answer"}[part]
        if spec.get("model"):
            values[f"parts.{part}.model"] = models / task
        if spec.get("index"):
            values[f"parts.{part}.index"] = index
        if spec.get("similarity"):
            values[f"parts.{part}.similarity.model"] = models / "contrastive"
            values[f"parts.{part}.similarity.index"] = index
    return flags + [f"--config.{key}={value}" for key, value in values.items()]
