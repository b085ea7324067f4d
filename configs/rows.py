"""What the rows of every paper's table have in common. Not an experiment itself."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto
from mmqa_jax.prompting.backends.http import ServerConfig
from mmqa_jax.runs.parts import LLMS, KnowledgeSpec, LLMReaderSpec, LLMRerankerSpec
from mmqa_jax.runs.row import RowData, Scoring, find_setting
from mmqa_jax.tasks.library import LibrarySpec

AUTO = "auto"  # chosen where it is used

# What RMR's own rows say of triplets: equation 2 as printed; the paper does not say whether a
# rationale has the lecture, too.
RMR = {"similarity": "bimodal_unnormalized", "rationale": "solution"}

# LLaVA-1.5's checkpoints, converted -> where they come from.
LLAVA15 = {
    name: (
        f"weights/{folder}",
        f"mmqa convert --model=llava --source=downloads/llava-v1.5-{size} --out=weights/{folder}",
    )
    for name, folder, size in (
        ("llava15_7b", "llava7b", "7b"),
        ("llava15_13b", "llava", "13b"),
    )
}

# Successors of RMR's Qwen-VL, converted -> where they come from.
QWEN_VL = {
    name: (
        f"weights/{name}",
        f"mmqa convert --model=qwen_vl --source=downloads/{source} --out=weights/{name}",
    )
    for name, source in (
        ("qwen25_vl", "Qwen2.5-VL-7B-Instruct"),
        ("qwen3_vl", "Qwen3-VL-8B-Instruct"),
    )
}


def llava15(
    name: str, cells: Sequence[tuple[str, str, float]], scorer: str, **options: Any
) -> dict:
    """A row of LLaVA-1.5 with its own prompt.

    Args:
      name: of LLAVA15.
      cells: column, group and published figure (percent) of each.
    """
    return {
        "paper": "llava",
        "system": "llava",
        "setting": "llava",
        "parts": {"llm": language_model(LLAVA15[name][0], length=4096)},
        "options": options,
        "published": tuple(
            {
                "table": "docs/MODEL_ZOO.md",
                "row": f"LLaVA-1.5 {name.removeprefix('llava15_').upper()}",
                "column": column,
                "published": round(value / 100, 4),
                "tolerance": 0.01,
                "scorer": scorer,
                "group": group,
            }
            for column, group, value in cells
        ),
    }


def qwen_vl(name: str) -> dict[str, Any]:
    """The section `parts.llm` of one of QWEN_VL, with room for its pictures of any size."""
    return language_model(QWEN_VL[name][0], length=8192)


def language_model(
    model: str, backend: str = "engine", cache: str = "", **engine: Any
) -> dict[str, Any]:
    """The section `parts.llm` with every key that may be overridden.

    Args:
      model: as `mmqa prompt --model`.
      cache: folder of kept responses that several rows share; "" is each workdir's own.
      engine: values that differ from these (see configs/prompt/default.py). `length` is what
        prompts are shortened to; the other sizes and the devices are chosen.
    """
    sizes = {"slots": AUTO, "length": 1024, "buckets": AUTO, "prefill_tokens": AUTO}
    return {
        "model": model,
        "backend": backend,
        "tokenizer": "",
        "dtype": "auto",
        "mesh": {"data": AUTO, "fsdp": AUTO, "tensor": AUTO},
        "engine": {**sizes, **engine},
        "server": dataclasses.asdict(ServerConfig()),
        "cache": cache,
    }


def heuristics(candidates: str, examples: str) -> dict[str, str]:
    """The section `parts.heuristics`: the files of a VQA model."""
    return {"candidates": candidates, "examples": examples}


def library(**changes: Any) -> dict[str, Any]:
    """The section `parts.library` with every key: MiniLM's similarity within the row's own data."""
    return dataclasses.asdict(LibrarySpec(**changes))


def knowledge(**changes: Any) -> dict[str, Any]:
    """The section `parts.knowledge` with every key: the best passage by BM25."""
    return dataclasses.asdict(KnowledgeSpec(**changes))


def alone() -> dict[str, dict[str, Any]]:
    """A model asked for a short answer without any source, in RMR's words without triplets.

    QWEN_VL see the question's picture; SmolLM2 reads the words of the question alone.
    """
    models = {name: qwen_vl(name) for name in QWEN_VL}
    models["smollm2"] = language_model("smollm2", length=2048)
    return {
        name: {
            "setting": "rmr_direct",
            "parts": {"llm": llm, "library": library(text_model="")},
            "options": {
                "shots": 0,
                "similarity": "random",
                "chat": True,
                "pictures": name in QWEN_VL,
            },
        }
        for name, llm in models.items()
    }


def make_alone(name: str, dataset: str, raw: str) -> ConfigDict:
    """The config of a row of `alone` on the test split of a benchmark, whose files are in `raw`."""
    data = f"data/{dataset}"
    made_by = {data: f"mmqa prepare {dataset} --raw={raw} --out={data}", **dict(QWEN_VL.values())}
    row = alone()[name]
    return make_row(
        name, row, system="rmr", dataset=dataset, data=data, split="test", made_by=made_by
    )


def llm_rows(
    llm: dict[str, Any], retriever: Mapping[str, Any], *, top_k: int = 5
) -> dict[str, dict[str, Any]]:
    """WebQA's settings with a language model that reads, and in the last two also reranks.

    Args:
      llm: of `language_model`.
      retriever: the section `parts.retriever` of the collection.
      top_k: sources that are read as they were retrieved.
    """
    reads = {"llm": llm, "reader": dataclasses.asdict(LLMReaderSpec())}
    reranks = {"reranker": dataclasses.asdict(LLMRerankerSpec()), **reads}
    return {
        "llm_question_only": {"setting": "question_only", "parts": reads},
        "llm_oracle": {"setting": "oracle", "parts": reads},
        "llm_retrieved": {
            "setting": "retrieved",
            "parts": {"retriever": retriever, **reads},
            "options": {"top_k": top_k},
        },
        "llm_restricted": {
            "setting": "restricted",
            "parts": reranks,
            "options": {"threshold": 0.2, "cap": "none", "select": "best"},
        },
        "llm_reranked": {
            "setting": "full_scale",
            "parts": {"retriever": retriever, **reranks},
            "options": {"threshold": 0.2, "top_k": 20, "select": "best"},
        },
    }


def found_in_documents(documents: str) -> dict[str, dict[str, Any]]:
    """The models of `alone` with the passages that BM25 finds in the corpus of this folder."""
    models = {name: qwen_vl(name) for name in QWEN_VL}
    models["smollm2"] = language_model("smollm2", length=2048)
    rows = {
        name: llm_rows(llm, {"method": "bm25"})["llm_retrieved"] for name, llm in models.items()
    }
    return {
        f"bm25_{name}": {**row, "system": "webqa", "sources": documents}
        for name, row in rows.items()
    }


def ranking_row(retriever: Mapping[str, Any], depth: int, data: str) -> dict[str, Any]:
    """A row of a benchmark of retrieval: `depth` sources of the collection in `data`, ranked."""
    return {
        "setting": "retrieve_full_scale",
        "parts": {"retriever": retriever},
        "options": {"cited": depth, "top_k": depth},
        "data": data,
    }


def encoder_inputs(
    dataset: str, sets: Mapping[str, str], model: str, name: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Dense retrievers of a benchmark whose sets are corpora of their own.

    Args:
      sets: name of a set -> its files.
      model: ORG/NAME of the encoder on the hub.
      name: of its indexes' folder.

    Returns:
      Set -> the section `parts.retriever`; and where the corpora, the model and the indexes come
      from.
    """
    place = f"downloads/{model.partition('/')[2]}"
    made_by = {place: f"{model} of the Hugging Face hub"}
    retrievers = {}
    for of_set, raw in sets.items():
        data, index = f"data/{dataset}/{of_set}", f"runs/{dataset}/{name}/{of_set}"
        made_by |= {
            data: f"mmqa prepare {dataset} --raw={raw} --out={data}",
            index: f"mmqa embed --data={data} --model={place} --out={index}; "
            f"mmqa index --embeddings={index} --kind=exact",
        }
        retrievers[of_set] = {"method": "dense", "model": place, "index": index}
    return retrievers, made_by


def make_row(
    name: str,
    row: Mapping[str, Any],
    *,
    system: str,
    dataset: str,
    data: str,
    split: str,
    made_by: Mapping[str, str],
) -> ConfigDict:
    """The config of one row, as `mmqa run` takes it.

    Args:
      name: of the row.
      row: its setting and parts, and where they differ from the defaults its options, published
        figures, questions (so many, evenly over the split; 0 is all), modality, split, where
        (values that keys of the questions must have), sources (folder of those that are searched,
        if not its own), context (`pictures` or `sources`: what of a question's gold sources is its
        caption; data/batches/vqa.py), folds and fold (a part of the questions).
      made_by: path of an input -> where it comes from.
    """
    config = ConfigDict()
    config.row = name
    config.system = row.get("system", system)
    config.setting = row["setting"]
    config.dataset = dataset
    config.data = {
        "dir": data,
        "sources": row.get("sources", RowData.sources),
        "split": row.get("split", split),
        "questions": row.get("questions", RowData.questions),
        "modality": row.get("modality", RowData.modality),
        **{key: row[key] for key in ("where", "context", "folds", "fold") if key in row},
    }
    config.parts = row["parts"]
    for part, name in itertools.product(LLMS, ("engine", "mesh")):
        section = config.parts.get(part, {}).get(name, {})
        for key in [key for key, value in section.items() if value == AUTO]:
            with section.ignore_type():
                section[key] = auto()  # which a number may replace
    # Every option of the setting, so that each can be overridden.
    config.options = find_setting(config.system, row["setting"]).options(row.get("options", {}))
    config.scoring = dataclasses.asdict(Scoring())
    config.published = row.get("published", ())
    config.made_by = tuple(made_by.items())
    return config
