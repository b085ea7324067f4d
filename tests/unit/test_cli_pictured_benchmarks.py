"""`mmqa run` of benchmarks with several pictures in a prompt, by a tiny model that sees."""

import pytest
import test_mathvista
import test_mmmu
import test_mragbench
from cli_runs import done, flags_with, of_engine, rows_of
from test_mragbench import data as mragbench  # noqa: F401  a fixture
from tiny_llm import MODEL, llama_config, write_folder, write_qwen_vl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# One block, so that there is a program for one length of context only.
ENGINE = {"slots": 4, "buckets": (32,), "prefill_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen_vl(tmp_path_factory.mktemp("llm") / "model")


def run(name: str, row: str, model, data, workdir, length=512, **values) -> tuple[dict, list[dict]]:
    values = {"data.dir": data, "parts.llm.model": model, **values}
    values |= of_engine({**ENGINE, "length": length})
    scores = done(*flags_with("run", f"{name}/tables.py:{row}", workdir, values))
    assert (scores["prompts"]["failed"], scores["prompts"]["too_long"]) == (0, 0)
    return scores, rows_of(workdir / "trace.jsonl")


def test_mmmu_with_pictures_in_place(model, tmp_path):
    test_mmmu.write(tmp_path / "raw", test_mmmu.VAL, test_mmmu.OPEN)
    done("prepare", "mmmu", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    tokens = {"options.max_new_tokens": 4}
    scores, traces = run("mmmu", "qwen25_vl", model, tmp_path / "data", tmp_path / "run", **tokens)
    assert scores["n_by_category"]["Music"] == 2
    assert [trace["prompts"][0].count("<image>") for trace in traces] == [1, 2, 1]


def test_mragbench_with_retrieved_pictures_as_sources(models, model, mragbench, tmp_path):  # noqa: F811
    """Embedded, indexed, retrieved and shown, with recall of the gold pictures."""
    encoder, index = models / "contrastive", tmp_path / "index"
    done("embed", f"--data={mragbench}", f"--model={encoder}", f"--out={index}")
    done("index", f"--embeddings={index}", "--kind=exact")
    values = {"parts.retriever.model": encoder, "parts.retriever.index": index, "options.top_k": 3}
    few = {"options.max_new_tokens": 4}
    row, folder = "qwen25_vl_retrieved", tmp_path / "retrieved"
    scores, traces = run("mragbench", row, model, mragbench, folder, **values, **few)
    assert {"mragbench/rule", "recall@2", "citation_recall"} <= scores["scores"].keys()
    assert [trace["prompts"][0].count("<image>") for trace in traces] == [4, 2]
    folder = tmp_path / "given"
    _, traces = run("mragbench", "qwen25_vl_given", model, mragbench, folder, **few)
    rows = rows_of(folder / "predictions.jsonl")
    assert [len(row["read"]) for row in rows] == [2, 1]
    assert test_mragbench.SEVERAL.strip() in traces[0]["prompts"][0]


def test_mathvista_extracted_by_rules_then_by_a_model(tmp_path):
    """A row of responses, and a row that extracts from what it left."""
    test_mathvista.write_json(tmp_path / "raw")
    done("prepare", "mathvista", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    llm = write_folder(tmp_path / "llm", llama_config(MODEL.vocab_size, positions=2560))
    data, first, second = tmp_path / "data", tmp_path / "first", tmp_path / "second"
    few = {"options.max_new_tokens": 4}
    scores, traces = run("mathvista", "smollm2", llm, data, first, length=2560, **few)
    assert {"mathvista/official", "mathvista/empty_wrong"} <= scores["scores"].keys()
    more = {"parts.finished.run": first, "parts.llm.backend": "engine"}
    more |= {"options.extraction_tokens": 4}
    _, extracted = run("mathvista", "gpt4_extracts", llm, data, second, length=2560, **more)
    responses, left = ([trace["outputs"][0] for trace in each] for each in (traces, extracted))
    assert [one["text"] for one in left] == [one["text"] for one in responses]
