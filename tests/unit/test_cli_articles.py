"""Questions of one corpus asked of another's articles: EchoSight's rows, search and evaluate."""

import json

import pytest
from cli_runs import ENGINE, done, flags_with, of_engine, rows_of, write_rows
from tiny_encoders import save_plain
from tiny_llm import write_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

ANIMALS = {"Lion": "a lion in the grass", "Cat": "a cat on a roof", "Owl": "an owl in a tree"}
HEADER = (
    "question,answer,question_type,dataset_name,dataset_image_ids,wikipedia_url,wikipedia_title"
)


def url(name: str) -> str:
    return f"https://en.wikipedia.org/wiki/{name}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("articles")
    entries = {
        url(name): {
            "title": name,
            "section_titles": [name, "Diet", "References"],
            "section_texts": [f"Here is {caption}.", f"Diet of {name}.", f"Books on {name}."],
            **{"image_urls": [], "image_reference_descriptions": [], "image_section_indices": []},
        }
        for name, caption in ANIMALS.items()
    }
    (folder / "wiki").mkdir()
    (folder / "wiki" / "encyclopedic_kb_wiki.json").write_text(json.dumps(entries))
    done("prepare", "infoseek_wiki", f"--raw={folder / 'wiki'}", f"--out={folder / 'sources'}")
    (folder / "raw").mkdir()
    asked = [
        f"What does {caption} eat?,meat,templated,inaturalist,{n},{url(name)},{name}"
        for n, (name, caption) in enumerate(ANIMALS.items())
    ]
    (folder / "raw" / "test.csv").write_text("\n".join([HEADER, *asked, ""]))
    done("prepare", "evqa", f"--raw={folder / 'raw'}", f"--out={folder / 'data'}")
    write_folder(folder / "llm")
    save_plain("xlm-roberta", folder / "reranker", classifier=True, num_labels=1)
    return folder


def flags(inputs, row: str, workdir, **more) -> list[str]:
    values = {
        "data.dir": inputs / "data",
        "data.sources": inputs / "sources",
        "parts.retriever.method": "bm25",
        "parts.retriever.model": "",
        "parts.retriever.index": "",
        "parts.retriever.asks": "text",
        "parts.retriever.modality": "text",
        **more,
    }
    if row.endswith("_reranked"):
        values["parts.reranker.model"] = inputs / "reranker"
    return flags_with("run", f"evqa/tables.py:{row}", workdir, values)


def test_a_row_reads_the_best_section(inputs, tmp_path):
    llm = {**of_engine(ENGINE), "parts.llm.model": inputs / "llm", "options.max_new_tokens": 3}
    result = done(*flags(inputs, "smollm2_reranked", tmp_path, **llm))
    assert set(result["scores"]) >= {"evqa/exact_match", "article_recall@1", "article_mrr"}
    traces, answers = (rows_of(tmp_path / f"{name}.jsonl") for name in ("trace", "predictions"))
    for trace, answer in zip(traces, answers, strict=True):
        (prompt,), (read,) = trace["prompts"], answer["read"]
        best, *_ = trace["articles"]
        assert read.partition("#")[0] == best
        assert "## Section Title: References" not in prompt
        assert f"# Wiki Article: {best.rpartition('/')[2]}\n## Section Title: " in prompt
    assert (tmp_path / "report.html").is_file()


def test_recall_of_articles_without_an_answer(inputs, tmp_path):
    """By the words of their captions the right articles come first."""
    result = done(*flags(inputs, "clip_by_picture", tmp_path))
    assert result["scores"]["article_recall@1"] == 1.0
    assert "evqa/exact_match" not in result["scores"]


def test_search_and_evaluate(inputs, tmp_path):
    found = tmp_path / "found.jsonl"
    common = f"--sources={inputs / 'sources'}", "--json"
    searched = done(
        "search", f"--data={inputs / 'data'}", "--method=bm25", "--asks=text", f"--out={found}",
        *common,
    )  # fmt: skip
    assert searched["articles"]["article_recall@1"] == 1.0
    evaluate = ("evaluate", "evqa", f"--references={inputs / 'data'}", f"--predictions={found}")
    scored = done(*evaluate, *common)
    assert scored["scores"] == pytest.approx(searched["articles"])
    rows = rows_of(found)
    rows[0] |= {"sources": [f"{url('Owl')}#1"], "scores": [1.0]}
    write_rows(found, rows)
    assert done(*evaluate, *common)["scores"]["article_recall@1"] == pytest.approx(2 / 3)


def test_refusals(inputs, tmp_path, refused):
    data = f"--data={inputs / 'data'}"
    out = f"--out={tmp_path / 'x.jsonl'}"
    refused("search", data, "--method=bm25", "--asks=picture", out, message="asks=picture.*dense")
    said = tmp_path / "said.jsonl"
    said.write_text(json.dumps({"question_id": "test_0_0", "answer": "x"}) + "\n")
    evaluate = ("evaluate", "evqa", f"--references={inputs / 'data'}", f"--predictions={said}")
    refused(*evaluate, "--sources=y", message="--sources=y: tells the articles of ranked sources")
    lost = {"data.sources": "nowhere"}
    refused(*flags(inputs, "clip_by_picture", tmp_path / "run", **lost), message="nowhere")
