"""Forms of answers that a client asks for: JSON of a schema, and calls of its functions.

A form is a grammar, which the engine keeps to (decoding/sampling.py), and for functions a text that
tells the model of them. All models call functions as Qwen's do (Hermes' format): a JSON object
between `<tool_call>` and `</tool_call>`; results come back in `<tool_response>`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.prompting.backends.json_fields import Fields, WrongField, wrong

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_FUNCTIONS = 128
# Between JSON's parts: small models would go on with blanks for ever.
_BLANKS = r" |\n {0,12}"
_ANY = {"type": "object"}
_NOTHING = {**_ANY, "properties": {}}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function; its arguments are JSON text, as OpenAI's API has them."""

    name: str
    arguments: str

    def written(self) -> str:
        """The text that the model is shown of it."""
        return (
            f'{_OPEN}\n{{"name": {json.dumps(self.name)}, "arguments": {self.arguments}}}\n{_CLOSE}'
        )


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
      grammar: in llguidance's Lark; "": any text.
      instructions: for the system prompt; "": none.
      calls: whether functions may be called.
    """

    grammar: str = ""
    instructions: str = ""
    calls: bool = False


def read_form(fields: Fields) -> AnswerForm:
    """Reads `response_format`, `tools` and `tool_choice`; WrongField for what is wrong in them."""
    schema = _schema(fields.take("response_format", dict, {"type": "text"}))
    rows, choice = fields.take("tools", list, []), fields.take("tool_choice", (str, dict), "auto")
    several = fields.take("parallel_tool_calls", bool, True)
    functions = [_function(row, f"tools[{number}]") for number, row in enumerate(rows)]
    if len(functions) > _MOST_FUNCTIONS:
        raise WrongField(
            f"tools has {len(functions)} functions, up to {_MOST_FUNCTIONS} at once.", param="tools"
        )
    names = [function["name"] for function in functions]
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else choice.get("name")
        if name not in names:
            raise wrong("tool_choice", choice, "expected the name of a function in tools")
        functions, choice, several = [functions[names.index(name)]], "required", False
    if choice not in ("auto", "none", "required") or (choice == "required" and not functions):
        raise wrong("tool_choice", choice, "expected auto, none, or required where there are tools")
    if not functions or choice == "none":
        return AnswerForm("" if schema is None else f"start: {_json(schema)}")
    if schema is not None:
        raise WrongField(
            "response_format: an answer is either JSON or a call; leave tools out.",
            param="response_format",
        )
    listed = "\n".join(map(json.dumps, functions))
    instructions = (
        f"Functions that you can call, each with a JSON schema of its arguments:\n{listed}\n"
        f"Write a call as\n{Call('NAME', '{...}').written()}\n"
        f"and end there: its result follows in <tool_response>."
    )
    is_forced = choice == "required"
    return AnswerForm(_call_grammar(functions, is_forced, several), instructions, True)


def _schema(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of `response_format`; None: text."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY
    named = form.get("json_schema", form)  # in the Responses API the schema is beside the type
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise wrong(
            "response_format", form, "expected text, json_object, or json_schema with its schema"
        )
    return schema


def _function(row: Any, key: str) -> dict[str, Any]:
    """A function's name, description and parameters."""
    named = row.get("function", row) if isinstance(row, dict) else None
    if not isinstance(named, dict) or row.get("type") != "function":
        raise wrong(key, row, 'expected {"type": "function", "function": {...}}')
    name, schema = named.get("name"), named.get("parameters") or _NOTHING
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{key}.function.name", name, "expected letters, digits, _ and -, up to 64")
    if not isinstance(schema, dict):
        raise wrong(f"{key}.function.parameters", schema, "expected a JSON schema")
    if "properties" in schema:  # what a schema leaves open a small model would fill for ever
        schema = {"additionalProperties": False, **schema}
    return {"name": name, "description": named.get("description") or "", "parameters": schema}


def _json(schema: Mapping[str, Any]) -> str:
    options = {"whitespace_pattern": _BLANKS}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _call_grammar(functions: Sequence[Mapping[str, Any]], is_forced: bool, several: bool) -> str:
    """Text and calls in Lark: calls alone where they are forced."""
    calls, rules, tail = [], [], json.dumps("}\n" + _CLOSE)
    for number, function in enumerate(functions):
        head = json.dumps(f'\n{{"name": "{function["name"]}", "arguments": ')
        calls.append(f"opening {head} arguments_{number} {tail}")
        rules.append(f"arguments_{number}: {_json(function['parameters'])}")
    if is_forced:
        rules += [
            f"opening: {json.dumps(_OPEN)}",
            'start: call ("\\n" call)*' if several else "start: call",
        ]
    else:  # a lazy lexeme ends where the mark first stands
        rules += [
            f"opening[lazy]: TEXT {json.dumps(_OPEN)}",
            "TEXT: /(.|\\n)*/",
            "start: call* TEXT" if several else "start: call | TEXT",
        ]
    return "\n".join([*rules, f"call: {' | '.join(calls)}"])


class CallReader:
    """Takes the calls out of an answer's text, piece by piece."""

    def __init__(self) -> None:
        self._held = ""  # what may begin a call, or does
        self._follows = False  # whether a call was the last: line breaks behind it are no text

    def push(self, piece: str, *, is_last: bool = False) -> tuple[str, list[Call]]:
        """The text and the calls that are final once a piece is added; a call that the answer's end
        cuts off is no call, and no text."""
        text, calls = self._begun(self._held + piece), list[Call]()
        plain = []
        while _OPEN in text:
            before, _, rest = text.partition(_OPEN)
            plain.append(before)
            body, closed, after = rest.partition(_CLOSE)
            if not closed:
                self._held = "" if is_last else _OPEN + rest
                return "".join(plain), calls
            call = _call(body)
            if call is None:
                plain.append(f"{_OPEN}{body}{_CLOSE}")
            calls += [call] if call else []
            self._follows = call is not None
            text = self._begun(after)
        begun = next((n for n in range(len(_OPEN), 0, -1) if text.endswith(_OPEN[:n])), 0)
        self._held = "" if is_last else text[len(text) - begun :]
        plain.append(text if is_last else text[: len(text) - begun])
        return "".join(plain), calls

    def _begun(self, text: str) -> str:
        if self._follows:
            text = text.lstrip("\n")
            self._follows = not text
        return text


def _call(body: str) -> Call | None:
    """A whole call; None: it is none."""
    try:
        made = json.loads(body)
        return Call(made["name"], json.dumps(made["arguments"], ensure_ascii=False))
    except (ValueError, TypeError, KeyError):
        return None


def calls_text(rows: Sequence[Any], key: str) -> str:
    """The text of an earlier answer's `tool_calls`; WrongField for what is wrong with them."""
    calls = []
    for number, row in enumerate(rows):
        function = row.get("function") if isinstance(row, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise wrong(f"{key}[{number}]", row, "expected a function with name and arguments")
        calls.append(Call(name, arguments or "{}").written())
    return "\n".join(calls)


def response_text(content: str) -> str:
    """The text of a function's result."""
    return f"<tool_response>\n{content}\n</tool_response>"
