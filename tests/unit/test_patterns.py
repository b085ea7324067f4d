"""Regular expressions of the package take time in proportion to the text, whatever the text is.

They are read from the source, so that a new one is tested without an entry here. The attacks are
made from each expression's own parts: long repetitions of what it repeats, behind what leads there
and before what makes it fail.
"""

import ast
import collections
import contextlib
import functools
import importlib
import inspect
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from re import _compiler as compiler
from re import _constants as kinds
from re import _parser as parser
from typing import NamedTuple

import pytest

import mmqa_jax

pytestmark = pytest.mark.slow

ROOT = Path(mmqa_jax.__file__).parent
FUNCTIONS = ("fullmatch", "match", "search", "sub", "subn", "split", "findall", "finditer")
LENGTHS = (20, 400, 3000)  # of attacks; an exponential expression shows at the first
LONG = 6000
SECONDS = 0.002  # CPU time that an attack takes, or its expression is linear by far
REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
ONE = (kinds.IN, kinds.ANY, kinds.NOT_LITERAL, kinds.LITERAL)  # kinds of nodes: one character
ALPHABET = " \n0aZ_.,é-("
ENDS = ("", "\0", "a", ",")
# Pinned sources, whose texts are short and known: the CIA's Factbook and pictures of emoji.
OWN_TEXT = ("data/atlas/",)

# Expressions that are made at run time: of escaped words, of key maps, or by users for themselves.
MADE_LATER = {
    "core/files": 1,  # a number of too many digits
    "data/chat_template": 1,  # the marks of pictures
    "data/tokenizers": 1,  # special tokens
    "extensions/second_hop": 1,  # a title
    "training/optimizer": 6,  # the user's own, of parameters' names
    "training/state": 2,
    "weights/hub": 1,  # names of files
    "weights/keymap": 5,
    "weights/layouts": 2,
    "models/two_towers/keys": 1,
    "models/detection/keys": 1,
    "models/llama/keys": 1,  # parts of a family's tensors' names
    "weights/published": 1,
}
QUADRATIC = [
    ("search", r"\s*\[(\d+(?:\s*[,;]\s*\d+)*)\]"),
    ("search", r"\d+$"),
    ("search", r"(\d+)(?:\.\w+)?$"),
    ("search", r"(\d+)(\.jpg)?\.npz$"),
    ("search", r"<meta[^>]+charset\s*=\s*[\"']?\s*([\w.:-]+)"),
    ("search", r"<meta[^<>]+charset\s*=\s*[\"']?\s*([\w.:-]+)"),
    ("match", r" {0,3}(#{1,6})\s+(.*?)\s*#*\s*$"),
    ("findall", r"!\[([^\]]*)\]\(\s*<?([^)\s>]+)>?[^)]*\)"),
    ("sub", r"\[([^\]]+)\]\([^)]*\)"),
    ("findall", r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    ("findall", r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
    ("fullmatch", r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"),
    ("search", r'The answer is "(.*)"\.'),
    ("fullmatch", r"(?:\w+,?)*"),
]


class Expression(NamedTuple):
    """A call of `re` in the package.

    Attributes:
      place: module and source of the call.
      pattern: None where it is made of what is known at run time only.
      methods: that read texts by it.
    """

    place: str
    pattern: re.Pattern | None
    methods: frozenset[str]


def assigned(tree: ast.AST) -> dict[ast.expr, str]:
    """The names that values are assigned to, also several at once."""
    names = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[value] = name
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=False)  # `a, *b = c, d, e` has more
                names |= {value: t.id for t, value in pairs if isinstance(t, ast.Name)}
    return names


def value_of(node: ast.expr | None, module: dict) -> object:
    """What an expression of a module's top level is; None where it is known at run time only."""
    if node is None:
        return None
    try:
        tree = ast.fix_missing_locations(ast.Expression(node))
        return eval(compile(tree, "a module of the package", "eval"), {**module, "re": re})
    except (NameError, SyntaxError):
        return None


@functools.cache
def expressions() -> list[Expression]:
    """All of the package, also those in key maps, which are read as they are searched there."""
    return [*called(), *in_key_maps()]


def in_key_maps() -> Iterator[Expression]:
    folders = (ROOT / "weights", ROOT / "models")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        called = {part for call in calls(tree) for part in ast.walk(call)}
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if "\n" not in text and "\\" in text:
                    if node not in called:
                        with contextlib.suppress(re.error):  # a part of one
                            place = f"{path.relative_to(ROOT)}: {text!r}"
                            yield Expression(place, re.compile(text), frozenset({"search"}))


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=function)):
                if function in ("compile", *FUNCTIONS):
                    yield node


def called() -> Iterator[Expression]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    used = collections.defaultdict(set)  # the attributes of all that bears a name, by its module
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name)):
                    private = name.startswith("_")
                    used[path if private else None, name].add(node.attr)
    for path, tree in trees.items():
        names, module = assigned(tree), None
        for node in calls(tree):
            function = node.func.attr
            where = path.relative_to(ROOT).with_suffix("")
            module = module or vars(importlib.import_module(".".join(("mmqa_jax", *where.parts))))
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            given = inspect.signature(getattr(re, function)).bind_partial(*node.args, **given)
            text = value_of(given.arguments["pattern"], module)
            flags = value_of(given.arguments.get("flags"), module) or 0
            name = names.get(node, "")
            methods = {function}
            if function == "compile":
                methods = used[path if name.startswith("_") else None, name] & set(FUNCTIONS)
            yield Expression(
                f"{where}: {ast.unparse(node)}",
                re.compile(text, flags) if isinstance(text, str | bytes) else None,
                frozenset(methods or FUNCTIONS),
            )


def accepted(node, flags: int, alphabet: str) -> list[str]:
    """The characters that a node of a parsed expression matches."""
    state = parser.State()
    state.flags = flags
    matching = compiler.compile(parser.SubPattern(state, [node]), flags)
    return [c for c in alphabet if matching.fullmatch(c)]


def example(nodes, flags: int, alphabet: str, turn: int = 0) -> str:
    """A text that nodes of a parsed expression match, lookarounds aside; another one each turn."""
    text = ""
    for kind, value in nodes:
        if kind in ONE:
            characters = accepted((kind, value), flags, alphabet) or [""]
            text += characters[turn % len(characters)]
        elif kind is kinds.SUBPATTERN:
            text += example(value[3], flags, alphabet, turn)
        elif kind is kinds.ATOMIC_GROUP:
            text += example(value, flags, alphabet, turn)
        elif kind is kinds.BRANCH:
            text += example(value[1][turn % len(value[1])], flags, alphabet, turn)
        elif kind in REPEATS:
            text += example(value[2], flags, alphabet, turn) * max(value[0], 1)
    return text


def repeated(nodes, flags: int, alphabet: str, before: str = "") -> Iterator[tuple[str, str]]:
    """What leads to each long repeat, and texts that it repeats."""
    for kind, value in nodes:
        if kind in REPEATS:
            yield from repeated(value[2], flags, alphabet, before)
            if value[1] > 20:
                for turn in range(4):
                    yield before, example(value[2], flags, alphabet, turn)
        elif kind is kinds.SUBPATTERN:
            yield from repeated(value[3], flags, alphabet, before)
        elif kind is kinds.ATOMIC_GROUP:
            yield from repeated(value, flags, alphabet, before)
        elif kind is kinds.BRANCH:
            for branch in value[1]:
                yield from repeated(branch, flags, alphabet, before)
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            yield from repeated(value[1], flags, alphabet, before)
        before += example([(kind, value)], flags, alphabet)


def parsed(pattern: re.Pattern) -> tuple[parser.SubPattern, int]:
    """The nodes of an expression, of bytes as of Latin-1, and its flags."""
    text = pattern.pattern
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    return parser.parse(text, pattern.flags & ~re.UNICODE), pattern.flags


def attacks(pattern: re.Pattern) -> list[tuple[str, str, str]]:
    """Beginnings, what is repeated, and ends."""
    nodes, flags = parsed(pattern)
    alphabet = "".join(dict.fromkeys(f"{ALPHABET}{pattern.pattern}"))
    whole = example(nodes, flags, alphabet)
    pumps = {("", pump) for pump in (*" \n0a_", whole, whole[:-1], whole[1:])}
    for before, body in repeated(nodes, flags, alphabet):
        pumps |= {
            ("", body),
            (before, body),
            ("", before),
            ("", before + body),
            ("", body + before),
        }
    ends = dict.fromkeys((*ENDS, whole[-1:]))
    return sorted((before, pump, end) for before, pump in pumps if pump for end in ends)


def seconds(pattern: re.Pattern, methods: frozenset[str], text: str) -> float:
    """CPU time of reading a text from end to end."""
    subject = text.encode("latin-1", "replace") if isinstance(pattern.pattern, bytes) else text
    began = time.thread_time()
    for method in methods & {"match", "fullmatch"}:
        getattr(pattern, method)(subject)
    if methods - {"match", "fullmatch"}:
        collections.deque(pattern.finditer(subject), maxlen=0)
    return time.thread_time() - began


def slow(pattern: re.Pattern, methods: frozenset[str]) -> tuple[str, str, str] | None:
    """An attack whose time grows faster than the text."""

    def taken(attack: tuple[str, str, str], length: int) -> float:
        before, pump, end = attack
        return seconds(pattern, methods, before + pump * (length // len(pump)) + end)

    def is_slow(attack: tuple[str, str, str]) -> bool:
        if any(taken(attack, length) > 4 * SECONDS for length in LENGTHS):
            return True
        short = taken(attack, LONG)
        return short > SECONDS and taken(attack, 2 * LONG) > 3 * short

    tried = attacks(pattern)
    # Three times, for a clock that counts something else, too.
    if found := next((a for a in tried if all(is_slow(a) for _ in range(3))), None):
        return found
    longest = max(tried, key=lambda attack: taken(attack, LONG))
    return longest if taken(longest, 100_000) > 100 * SECONDS else None


def endless_numbers(nodes, flags: int) -> Iterator[bool]:
    """Whether groups of a parsed expression are digits without end."""
    for kind, value in nodes:
        if kind is kinds.SUBPATTERN:
            match list(value[3]):
                case [(repeat, (_, kinds.MAXREPEAT, body))] if repeat in REPEATS:
                    yield [accepted(one, flags, "0a .Z-") for one in body] == [["0"]]
            yield from endless_numbers(value[3], flags)
        elif kind in REPEATS:
            yield from endless_numbers(value[2], flags)
        elif kind is kinds.BRANCH:
            yield from (found for branch in value[1] for found in endless_numbers(branch, flags))


def test_expressions_made_at_run_time_are_known():
    later = (e.place.partition(":")[0] for e in expressions() if e.pattern is None)
    assert collections.Counter(p for p in later if not p.startswith(OWN_TEXT)) == MADE_LATER


def test_expressions_of_the_package_are_linear():
    found = {
        expression.place: attack
        for expression in expressions()
        if expression.pattern is not None and not expression.place.startswith(OWN_TEXT)
        if (attack := slow(expression.pattern, expression.methods)) is not None
    }
    assert found == {}


def test_numbers_that_are_read_have_an_end():
    """`int` raises at more than 4,300 digits. In these two, numbers stay text."""
    texts = ("evaluation/tables", "models/t5/keys")
    found = [
        expression.place
        for expression in expressions()
        if expression.pattern is not None and not expression.place.startswith((*OWN_TEXT, *texts))
        if any(endless_numbers(*parsed(expression.pattern)))
    ]
    assert found == []


@pytest.mark.parametrize("expression", QUADRATIC)
def test_the_attacks_find_what_is_not_linear(expression):
    """All of these stood in the package, but for the last, which is exponential."""
    method, text = expression
    assert slow(re.compile(text), frozenset({method})) is not None


# What stood in the authors' files, or here, before it was made linear.
EQUAL = [
    ("evaluation.multiple_choice", lambda m: m._NUMBERS[1], r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    (
        "evaluation.multiple_choice",
        lambda m: m._NUMBERS[2],
        r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
    ),
    ("retrieval.rankings", lambda m: m._NUMBER, r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"),
    ("data.region_records", lambda m: m._NUMBER, r"(?:\d+)$"),
    ("benchmarks.okvqa", lambda m: m._LAST_NUMBER, r"\d+(?:\.\w+)?$"),
    ("data.records.grid_records", lambda m: m._ID, r"\d+(?:\.jpg)?\.npz$"),
]


@pytest.mark.parametrize(("module", "ours", "theirs"), EQUAL)
def test_linear_expressions_find_what_the_quadratic_ones_did(module, ours, theirs):
    ours = ours(importlib.import_module(f"mmqa_jax.{module}"))
    draw = random.Random(0)
    pieces = [*"0159.,-+eE []; x\n", "12", ".jpg", ".npz"]
    for _ in range(20_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(14)))
        spans = [match.span() for match in ours.finditer(text)]
        assert spans == [match.span() for match in re.finditer(theirs, text)], text
        assert bool(ours.fullmatch(text)) == bool(re.fullmatch(theirs, text)), text
