"""`mmqa convert --check`, and the tokenizer of a converted GGUF file."""

import sys
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import RunError, UserError


def compare_layers(model: str | None, source: Path, converted: Path | None) -> dict[str, Any]:
    """Prints both sides' deviations; RunError if one is beyond the bound."""
    from mmqa_jax.evaluation.tables import Table, show
    from mmqa_jax.models.check import BOUND, check

    rows = check(model, source, converted)
    cells = [
        [
            row.name,
            *(f"{x:.1e}" for x in (row.deviation, row.allowed)),
            f"{row.size:.3g}",
            "pass" if row.passed else "FAIL",
        ]
        for row in rows
    ]
    columns = ["", "largest deviation", "allowed", "of values up to", ""]
    show(Table(f"{converted or source} beside transformers", columns, cells, f"Allowed: {BOUND}."))
    failed = [row for row in rows if not row.passed]
    if failed:
        raise RunError(
            f"--check: {len(failed)} of {len(rows)} layers and outputs deviate from transformers "
            f"by more than is allowed, the first is {failed[0].name} by "
            f"{failed[0].deviation:.1e}; report it with the model's name."
        )
    print(f"pass: {len(rows)} layers and outputs are within the bound")
    compared = [row._asdict() | {"allowed": row.allowed} for row in rows]
    return {"check": {"passed": True, "bound": BOUND, "compared": compared}}


def export_retrieval_run(source: Path, out: Path, *, overwrite: bool) -> dict[str, Any] | None:
    """Writes what a run of `retriever` or `reranker` trained as sentence-transformers has it.

    Returns:
      What the command prints as JSON; None: the source is something else.
    """
    from mmqa_jax.core.files import read_json, write_json
    from mmqa_jax.tasks.reranker import Reranker
    from mmqa_jax.tasks.retriever import Retriever
    from mmqa_jax.tasks.task import read_run
    from mmqa_jax.weights import output_folder
    from mmqa_jax.weights.record import RECORD, read_metadata

    kinds = (Retriever, Reranker)
    named = [kind.name for kind in kinds]
    if not (source / RECORD).is_file() or read_metadata(source).get("task") not in named:
        return None
    output_folder.check_paths(source, out, overwrite)
    task, _ = read_run(source, kinds)
    with output_folder.whole_folder(out, 0) as folder:
        task.export(source, folder)
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", {**config, output_folder.WRITTEN_BY: "mmqa convert"})
    return {"model": task.name, "out": str(out), "export": "hf"}


def write_tokenizer(source: Path, folder: Path) -> list[str]:
    """Writes the tokenizer of a GGUF file as files; returns their names."""
    from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer

    try:
        tokenizer = open_text_tokenizer(source)
    except UserError as error:  # the weights are of use without it
        print(f"{source}: its tokenizer is not written ({error})", file=sys.stderr)
        return []
    before = set(folder.iterdir())
    tokenizer.save(folder)
    return sorted(file.name for file in set(folder.iterdir()) - before)
