"""Actions of a model that searches: one dataclass each, whose fields are its arguments.

A paper's style reads them in what the model wrote; as tools their names, arguments and docstrings
are what the model is told of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.prompting.citations import read_citations

Box = tuple[int, int, int, int]
_FULL = 1000  # a box's unit: thousandths of the picture's width and height


@dataclasses.dataclass(frozen=True)
class Action:
    """An action says what the model does in a turn.

    Attributes:
      kind: its name.
      budget: the field of search_loop.Budget that counts it; "": none does.
    """

    kind: ClassVar[str]
    budget: ClassVar[str] = ""

    @property
    def content(self) -> str:
        """Its arguments, for traces."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return ", ".join(str(value) for value in values if value not in ("", (), None))

    @classmethod
    def tool(cls) -> dict[str, Any]:
        """The action as a function of OpenAI's tools."""
        schemas = {"str": {"type": "string"}, "int": {"type": "integer"}}
        schemas["Box"] = {"type": "array", "items": {"type": "integer"}}
        fields = dataclasses.fields(cls)
        properties = {field.name: schemas[str(field.type)] for field in fields}
        needed = [field.name for field in fields if field.default is dataclasses.MISSING]
        parameters = {"type": "object", "properties": properties, "required": needed}
        about = " ".join((cls.__doc__ or "").split())
        function = {"name": cls.kind, "description": about, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class SearchTexts(Action):
    """Finds the sources that fit a query best."""

    kind: ClassVar[str] = "search_texts"
    budget: ClassVar[str] = "text_searches"
    query: str


@dataclasses.dataclass(frozen=True)
class SearchPictures(Action):
    """Finds the pictures that fit a query best."""

    kind: ClassVar[str] = "search_pictures"
    budget: ClassVar[str] = "picture_searches"
    query: str


@dataclasses.dataclass(frozen=True)
class SearchByPicture(Action):
    """Finds sources by a picture: the number of a result that shows one, 0 the question's own."""

    kind: ClassVar[str] = "search_picture"
    budget: ClassVar[str] = "picture_searches"
    picture: int = 0

    @property
    def content(self) -> str:
        """The result's number; "" of the question's own picture."""
        return str(self.picture or "")


@dataclasses.dataclass(frozen=True)
class OpenPage(Action):
    """Reads on around a result, by its number: what stands before and after it on its page."""

    kind: ClassVar[str] = "open_page"
    budget: ClassVar[str] = "pages"
    source: int


@dataclasses.dataclass(frozen=True)
class Zoom(Action):
    """Shows a part of a picture larger: the number of a result, 0 the question's own; the box is
    [left, top, right, bottom] in thousandths of width and height."""

    kind: ClassVar[str] = "zoom"
    budget: ClassVar[str] = "zooms"
    picture: int
    box: Box

    def __post_init__(self):
        left, top, right, bottom = self.box
        if not (0 <= left < right <= _FULL and 0 <= top < bottom <= _FULL):
            raise ValueError("box: [left, top, right, bottom] from 0 to 1000 was expected")

    def pixels(self, width: int, height: int) -> tuple[float, ...]:
        """The box in pixels of a picture."""
        sides = (width, height) * 2
        return tuple(side * x / _FULL for side, x in zip(sides, self.box, strict=True))


@dataclasses.dataclass(frozen=True)
class Crop(Zoom):
    """Shows a part of a picture, whose box is in pixels; what is beyond the picture is left out."""

    kind: ClassVar[str] = "crop"

    def __post_init__(self):
        left, top, right, bottom = self.box
        if not (0 <= left < right and 0 <= top < bottom):
            raise ValueError("width and height must be positive integers, x and y 0 or more.")

    def pixels(self, width: int, height: int) -> tuple[float, ...]:
        """The box; ValueError where none of it is in the picture."""
        sides = (width, height) * 2
        box = tuple(float(min(side, x)) for side, x in zip(sides, self.box, strict=True))
        if box[0] >= width or box[1] >= height:
            raise ValueError(f"the box lies outside of {width} x {height} pixels")
        return box


@dataclasses.dataclass(frozen=True)
class Answer(Action):
    """Answers; numbers in brackets cite results."""

    kind: ClassVar[str] = "answer"
    text: str


@dataclasses.dataclass(frozen=True)
class GiveUp(Action):
    """Ends without an answer, as nothing that was found answers the question."""

    kind: ClassVar[str] = "give_up"
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Invalid(Action):
    """Says that nothing in the turn could be read as an action, and why."""

    kind: ClassVar[str] = "invalid"
    reason: str = ""


TOOLS = {
    action.kind: action
    for action in (SearchTexts, SearchPictures, SearchByPicture, OpenPage, Zoom, Answer, GiveUp)
}


def called(name: Any, arguments: Any) -> Action:
    """The action of a function call; Invalid, with a reason, where it is none."""
    if not isinstance(name, str) or name not in TOOLS:
        return Invalid(f"there is no tool {name!r:.80}; use one of {', '.join(TOOLS)}")
    kind = TOOLS[name]
    if isinstance(arguments, str):
        with contextlib.suppress(UserError):
            arguments = parse_json(arguments, name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(arguments, Mapping) or not arguments.keys() <= fields.keys():
        return Invalid(f"{name}: an object with {', '.join(fields) or 'nothing'} was expected")
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key not in arguments:
            if field.default is dataclasses.MISSING:
                return Invalid(f"{name}: {key} is missing")
            continue
        value = _read(str(field.type), arguments[key])
        if value is None:
            return Invalid(f"{name}: {key}={arguments[key]!r:.80} is no {field.type}")
        values[key] = value
    try:
        return kind(**values)
    except ValueError as error:
        return Invalid(f"{name}: {error}")


def _read(kind: str, value: Any) -> Any:
    """An argument of a type by its name; None: it is of another, or an empty text."""
    if kind == "str":
        return value.strip() or None if isinstance(value, str) else None
    if kind == "int":
        return value if type(value) is int and 0 <= value < 10_000 else None
    is_box = isinstance(value, list) and len(value) == 4 and all(type(x) is int for x in value)
    return tuple(value) if is_box else None


def cited_answer(text: str, sources: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """An answer without its citations, and the sources that these number."""
    citations = read_citations(text, len(sources))
    return citations.text, tuple(sources[number - 1] for number in citations.numbers)
