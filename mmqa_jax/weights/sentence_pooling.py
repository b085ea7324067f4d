"""How a sentence-transformers folder makes one vector of a text, checked.

Here a sentence is the mean of BERT's token states, scaled to length 1 (retrieval/minilm.py, the
dual encoder). A folder that says otherwise would give other vectors without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.published_keys import check_keys

_MODULES, _PROMPTS = "modules.json", "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_OTHERS = (
    *("pooling_mode_cls_token", "pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    *("pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "pooling_mode": ("mean", ["mean"]),
    "pooling_mode_mean_tokens": (True,),
    "include_prompt": (True,),
    **dict.fromkeys(_OTHERS, (False,)),
}
_SIZES = ("word_embedding_dimension", "embedding_dimension")
_REMEDY = (
    "use a checkpoint whose sentences are means of their tokens, or move modules.json and the "
    "folders that it names away to take BERT's token states alone"
)


def check_mean_pooling(folder: Path) -> None:
    """Checks that a folder's sentences are means of their tokens; a plain BERT's pass.

    Args:
      folder: sentence-transformers': `modules.json`, and config.json of each module in a folder.

    Raises:
      UserError: another pooling, a further layer, texts in lower case, or a prompt before each.
    """
    for name, place in _modules(folder):
        package, _, kind = name.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            kind = name  # of code in the folder, which is not run
        if kind not in _KNOWN:
            raise UserError(f"{folder / _MODULES}: holds the layer {kind!r}; {_REMEDY}.")
        if kind == "Pooling":
            file = folder / place / "config.json"
            try:
                check_keys(read_json(file), str(file), read=_SIZES, fixed=_FIXED)
            except UserError as error:
                first = str(error).partition(";")[0]
                raise UserError(f"{first}; {_REMEDY}.") from error
    file = folder / _TRANSFORMER
    content = read_json(file) if file.is_file() else {}
    if isinstance(content, dict) and content.get("do_lower_case"):
        raise UserError(
            f"{file}: do_lower_case puts every text in lower case, which is not done here; take "
            "the key out, and set do_lower_case to true in tokenizer_config.json."
        )
    file = folder / _PROMPTS
    content = read_json(file) if file.is_file() else {}
    name = content.get("default_prompt_name") if isinstance(content, dict) else None
    prompts = content.get("prompts") if isinstance(content, dict) else None
    if name is not None and isinstance(prompts, dict) and prompts.get(name):
        raise UserError(
            f"{file}: default_prompt_name {name!r} puts {prompts[name]!r} before every text, which "
            "is not done here; take the key out and put it before your texts yourself."
        )


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """The class of each module, with its package, and its folder."""
    file = folder / _MODULES
    if not file.is_file():  # of a folder that was copied without it
        if (folder / "1_Pooling" / "config.json").is_file():
            yield "sentence_transformers.models.Pooling", "1_Pooling"
        return
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise UserError(f"{file}: is not a list of modules; fetch the file again.")
    for module in modules:
        yield str(module.get("type")), str(module.get("path", ""))
