"""`python -m tests.bench harnesses`: real models in the authors' harnesses, ours beside theirs.

`lm_eval` asks SmolLM2-135M the first 20 multiple-choice questions of OpenStax (../shared/data) by
`mmqa_jax.harness` and by lm-eval's own class `hf`, in float32 from the same GGUF file; the figures
are lm-eval's accuracy. `mteb` searches 300 captions of OpenStax for its paragraphs by MiniLM, with
`mmqa_jax.harness` and with MTEB's own wrapper of sentence-transformers; the figures are MTEB's
nDCG@10. `largest` is the largest difference of a log-likelihood, or of a document's score. A
harness that is not installed is left out (`pip install lm_eval mteb`).
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmqa_jax.core.host import host_name
from tests.bench import Options
from tests.bench.runner import Case, measure
from tests.shared_data import SHARED

# Questions of lm_eval; captions and paragraphs of mteb.
_SIZES = {"small": (6, 100, 20), "full": (20, 300, 60)}


def run(options: Options) -> dict[str, Any]:
    """Compares those of the harnesses that are installed, or those selected."""
    items, captions, paragraphs = _SIZES[options.size or "full"]
    compare: dict[str, Callable[[], Case]] = {
        "lm_eval": lambda: _lm_eval(items),
        "mteb": lambda: _mteb(captions, paragraphs),
    }
    wanted = options.chosen(tuple(compare))
    there = tuple(name for name in wanted if importlib.util.find_spec(name))
    facts = {"left_out": [f"{name} is not installed." for name in wanted if name not in there]}
    cases = (compare[name]() for name in there)
    return measure("harnesses", cases, there, 1, device=host_name(), **facts)


def _lm_eval(count: int) -> Case:
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    from mmqa_jax.harness import lm_eval_model
    from mmqa_jax.runs.parts import LLMSpec, open_llm
    from mmqa_jax.weights.bundled import smollm2_path

    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        items = [row for row in _rows("questions.jsonl") if row.get("choices")][:count]
        file = Path(folder) / "items.jsonl"
        with file.open("w") as lines:
            for row in items:
                item = {key: row[key] for key in ("question", "choices", "answer_index")}
                lines.write(json.dumps(item) + "\n")
        config = {
            "task": "openstax",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": folder},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "answer_index",
            "metric_list": [{"metric": "acc"}],
        }
        file = smollm2_path()
        options = {"dtype": "float32", "batch_size": 1, "device": "cpu"}
        theirs = HFLM(pretrained=str(file.parent), gguf_file=file.name, **options)
        ours = lm_eval_model(open_llm(LLMSpec("smollm2", dtype="float32"), Path(folder)))
        accuracy, scored = {}, {}
        for name, model in (("ours", ours), ("peer", theirs)):
            task = ConfigurableTask(config=config)
            result = lm_eval.simple_evaluate(
                model, tasks=[task], log_samples=True, bootstrap_iters=0
            )
            accuracy[name] = result["results"]["openstax"]["acc,none"]
            scored[name] = [
                float(answer[0][0] if isinstance(answer[0], list | tuple) else answer[0])
                for sample in result["samples"]["openstax"]
                for answer in sample["resps"]
            ]
    pairs = list(zip(scored["ours"], scored["peer"], strict=True))
    largest = max(abs(first - second) for first, second in pairs)
    notes = {"largest": largest, "continuations": len(pairs)}
    return Case("lm_eval", "accuracy", accuracy["ours"], accuracy["peer"], notes=notes)


def _mteb(of_captions: int, of_paragraphs: int) -> Case:
    import datasets
    import mteb
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper

    from mmqa_jax.harness import MTEBModel
    from mmqa_jax.weights.bundled import minilm_path

    captions = [
        {"id": row["id"], "title": "", "text": row["text"]}
        for row in _rows("sources.jsonl")
        if row["modality"] == "image" and row["text"]
    ][:of_captions]
    known = {row["id"] for row in captions}
    asked = [row for row in _rows("questions.jsonl") if known.issuperset(row["positives"] or "-")]
    asked = asked[:of_paragraphs]

    class Captions(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Captions", description="", reference=None, type="Retrieval", category="t2t",
            modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="ndcg_at_10", dataset={"path": "none/none", "revision": "none"}, date=None,
            domains=None, task_subtypes=None, license=None, annotations_creators=None, dialect=None,
            sample_creation=None, bibtex_citation="",
        )  # fmt: skip

        def load_data(self, **_: Any) -> None:
            queries = [{"id": row["id"], "text": row["question"]} for row in asked]
            self.dataset = {
                "default": {
                    "test": {
                        "corpus": datasets.Dataset.from_list(captions),
                        "queries": datasets.Dataset.from_list(queries),
                        "relevant_docs": {
                            row["id"]: dict.fromkeys(row["positives"], 1) for row in asked
                        },
                        "top_ranked": None,
                    }
                }
            }
            self.data_loaded = True

    ndcg, found = {}, {}
    for name, model in (
        ("ours", MTEBModel("minilm")),
        ("peer", SentenceTransformerEncoderWrapper(str(minilm_path()), device="cpu")),
    ):
        with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
            result = mteb.evaluate(model, Captions(), cache=None, prediction_folder=folder)
            ndcg[name] = result.task_results[0].scores["test"][0]["ndcg_at_10"]
            (file,) = Path(folder).rglob("*.json")
            found[name] = json.loads(file.read_text())["default"]["test"]
    largest = max(
        abs(score - found["ours"][query][document])
        for query, scores in found["peer"].items()
        for document, score in scores.items()
    )
    notes = {"largest": largest, "queries": len(asked), "documents": len(captions)}
    return Case("mteb", "nDCG@10", ndcg["ours"], ndcg["peer"], notes=notes)


def _rows(name: str) -> list[dict[str, Any]]:
    with (SHARED / "openstax" / name).open(encoding="utf-8") as lines:
        return list(map(json.loads, lines))
