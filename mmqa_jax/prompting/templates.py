"""Few-shot prompts: templates as TOML beside the systems that use them."""

from __future__ import annotations

import dataclasses
import functools
import string
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

from mmqa_jax.core.errors import UserError

_PACKAGE = "mmqa_jax.papers"
_FOLDER = "templates"


@dataclasses.dataclass(frozen=True)
class PromptTemplate:
    """A prompt of solved examples and one open question.

    Attributes:
      head: in front of everything; without `$` fields.
      shot: of one solved example, with fields such as `$question` and `$answer`.
      query: of the open question; the model continues it.
      single_spaces: whether two spaces that follow each other become one, once: in the template's
        text where a field is empty, and in the fields.
    """

    head: str
    shot: str
    query: str
    single_spaces: bool = False

    def without_head(self) -> PromptTemplate:
        """Returns its shots and its query alone."""
        return dataclasses.replace(self, head="")

    def render(self, shots: Sequence[Mapping[str, str]], query: Mapping[str, str]) -> str:
        """Fields of the shots and of the query -> the prompt.

        Raises:
          KeyError: a field that the template names is missing.
        """
        parts = [self._filled(self.shot, shot) for shot in shots]
        return "".join((self.head, *parts, self._filled(self.query, query)))

    def solve(self, example: Mapping[str, str]) -> str:
        """What completes the query of a solved example: its shot without its query."""
        shot, query = (self._filled(text, example) for text in (self.shot, self.query))
        if not shot.startswith(query):
            raise UserError(
                "option template: a shot of it does not begin with its query, so that nothing "
                "can be learned from it; use one whose shots do, such as rmr.rationale."
            )
        return shot.removeprefix(query).rstrip()

    def spaced(self, text: str) -> str:
        """A text with its spaces as this template's prompts have them."""
        return text.replace("  ", " ") if self.single_spaces else text

    def _filled(self, text: str, fields: Mapping[str, str]) -> str:
        return self.spaced(string.Template(text).substitute(fields))


@functools.cache
def load_template(name: str) -> PromptTemplate:
    """The template `FILE.TABLE`: a table of papers/templates/FILE.toml."""
    file, _, table = name.partition(".")
    folder = resources.files(_PACKAGE) / _FOLDER
    known = {
        f"{path.name.removesuffix('.toml')}.{found}": values
        for path in folder.iterdir()
        if path.name.endswith(".toml")
        for found, values in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }
    if name not in known:
        raise UserError(
            f"option template={name}: no such prompt template; use one of "
            f"{', '.join(sorted(known))}."
        )
    return PromptTemplate(**known[f"{file}.{table}"])
