"""JSON and text as files hold them: marks of byte order, other encodings, damage of every kind."""

import json

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import DEEPEST, parse_json, read_json, read_jsonl, read_text
from tests.refusals import refuses

MARK = "\ufeff"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree" + MARK.encode())
    assert read_text(path) == "one\ntwo\nthree" + MARK  # inside it is a character of the text
    path.write_text(MARK + '{"a": 1}', "utf-8")
    assert read_json(path) == {"a": 1}
    path.write_text(MARK + '{"a": 1}\n\n' + MARK + '{"a": 2}\n', "utf-8")  # `cat a b`
    assert [*read_jsonl(path)] == [(1, {"a": 1}), (3, {"a": 2})]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_named(tmp_path, encoding):
    path = tmp_path / "text"
    path.write_bytes('{"a": 1}'.encode(encoding))
    name = encoding[:6].upper()
    refuses(rf"text: .*{name} text.* as UTF-8", read_json, path)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("9" * 4301, r"line 2, column 7: an integer of more than 4,300 digits; shorten it"),
        ("-" + "9" * 5000, r"line 2, column 7: an integer of more than 4,300 digits; shorten it"),
        (nested(DEEPEST), r"line 2, column 106: .*nested more than 100 deep; shorten it"),
        (nested(100_000), r"line 2, column 106: .*nested more than 100 deep; shorten it"),
        ('{"a":' * 100_000, r"line 2, column 502: .*nested more than 100 deep; shorten it"),
        (r'"\\ \u0041 \ud83d\ude00 \uD83D"', r"line 2, column 31: holds '\\ud83d', half of a"),
        (r'"\ude00\ud83d"', r"line 2, column 8: holds '\\ude00', half of a character; write it"),
        ("{oops", r"line 2, column 8: not valid JSON \(Expecting property name"),
        ("", r"line 3, column 1: not valid JSON"),
    ],
)
def test_damage_is_refused_with_its_line(tmp_path, damaged, message):
    path = tmp_path / "data.json"
    path.write_text('{"b": ["]", 1],\n"a" : ' + damaged + "\n}")
    refuses(r"data\.json, " + message, read_json, path)
    path.write_text('{"fine": 1}\n{"a" : ' + damaged + "}")
    with pytest.raises(UserError, match=r"data\.json, line 2: "):
        [*read_jsonl(path)]


def test_what_is_no_damage_is_read():
    for text in (
        nested(DEEPEST),
        "9" * 4300,
        "[" + "[1]," * 500 + "[]]",
        f'"{"[" * 200}"',
        '"\\ud83d\\ude00"',
    ):
        assert parse_json(text, "reply") == json.loads(text)
    assert parse_json(r'"a \\ud83d is named"', "reply") == r"a \ud83d is named"
    assert parse_json(MARK.encode() + b" 1e400", "reply") == float("inf")


def test_a_place_that_is_no_file_has_no_line():
    with pytest.raises(UserError, match=r"^the reply: not valid JSON .*; ask again\.$"):
        parse_json("1 2", "the reply", remedy="ask again")
    with pytest.raises(UserError, match=r"^the reply: not UTF-8 text \(byte 1\); ask again\.$"):
        parse_json(b'"\xff"', "the reply", remedy="ask again")
    with pytest.raises(UserError, match="key 'a' appears twice in one object; remove one"):
        parse_json('[{"b": 1, "a": 1, "a": 2}]', "the reply", unique_keys=True)
