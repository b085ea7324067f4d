"""Wikipedia's published files as sources: each format, what is left out, what is broken."""

import bz2
import gzip
import json
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from mmqa_jax.cli import main
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.articles import Article, PassageOptions, Section, sources_of
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.wikipedia import streams
from mmqa_jax.data.wikipedia.streams import InputFile, PageReader, json_entries
from mmqa_jax.runs.corpora import prepare
from mmqa_jax.runs.parts import KnowledgeSpec, open_knowledge
from mmqa_jax.runs.verbs.region_features import open_pictures
from tests.refusals import refuses

# Two pages in the format of KILT's README, with headings and items of lists as its files have them.
KILT = [
    {
        "wikipedia_title": "Email marketing",
        "wikipedia_id": "1101759",
        "text": [
            "Email marketing\n",
            "Email marketing is the act of sending a message.\n",
            "Section::::Types.\n",
            "Section::::Types.:Transactional emails.\n",
            "Transactional emails are triggered.\n",
            "BULLET::::- First item\n",
        ],
        "anchors": [
            {"text": "message", "href": "Message", "paragraph_id": 1, "start": 1, "end": 2}
        ],
        "categories": "Advertising",
        "history": {"url": "https://en.wikipedia.org/w/index.php?title=Email%20marketing&oldid=1"},
        "wikidata_info": {"wikidata_id": "Q1"},
    },
    {"wikipedia_title": "No text", "wikipedia_id": 7, "text": ["No text\n"], "anchors": []},
]

WIKI6M = [
    {
        "wikidata_id": "Q806563",
        "wikipedia_title": "Banded demoiselle",
        "wikipedia_content": "The banded demoiselle is a damselfly.",
        "wikipedia_summary": "A damselfly.",
        "wikipedia_image_url": "https://upload.wikimedia.org/a/Calopteryx.jpg",
    },
    {
        "wikidata_id": "Q42",
        "wikipedia_title": "Douglas Adams",
        "wikipedia_summary": "An author.",
        "wikipedia_image_url": None,
    },
]

URL = "https://en.wikipedia.org/wiki/Golden_eagle"
EVQA = {
    URL: {
        "title": "Golden eagle",
        "section_titles": ["Golden eagle", "Diet", "Empty"],
        "section_texts": ["It is a bird of prey.", "It eats hares { and } foxes.", ""],
        "image_urls": [
            "https://upload.wikimedia.org/a/Adler_%C3%BC.jpg",
            "https://upload.wikimedia.org/a/Missing.png",
        ],
        "image_reference_descriptions": ["An eagle in Tirol", ""],
        "image_section_indices": [1, 0],
        "url": URL,
    },
    "https://en.wikipedia.org/wiki/Ghost": {
        **{"title": "Ghost", "section_titles": ["Ghost"], "section_texts": ['A "é" ghost.']},
        **{"image_urls": [], "image_reference_descriptions": [], "image_section_indices": []},
        "url": "https://en.wikipedia.org/wiki/Ghost",
    },
}

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de">
  <siteinfo><base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>
    <namespaces><namespace key="0"/><namespace key="6">Datei</namespace>
      <namespace key="14">Kategorie</namespace></namespaces></siteinfo>
  <page><title>Ada Lovelace</title><ns>0</ns><id>7</id><revision><id>9</id>
    <contributor><username>X</username><id>4</id></contributor><model>wikitext</model>
    <text bytes="3">{{Infobox|a=b}} '''Ada [[Augusta|Lovelace]]'''&lt;ref name="a"&gt;x&lt;/ref&gt; was
an [[Mathematik|mathematician]].&lt;!-- no --&gt; [[Datei:x.jpg|thumb|A [[b]] c]]
== Life and ''work'' ==
She wrote &amp;amp; computed&amp;nbsp;notes.&lt;math&gt;x^2&lt;/math&gt; &lt;small&gt;1843&lt;ref&gt;y&lt;/ref&gt;&lt;/small&gt;
* one
* two
{| class=x
|a||b
|}
[[Kategorie:Frau]]</text></revision></page>
  <page><title>AL</title><ns>0</ns><id>8</id><redirect title="Ada Lovelace"/>
    <revision><id>1</id><text>#REDIRECT [[Ada Lovelace]]</text></revision></page>
  <page><title>Datei:x.jpg</title><ns>6</ns><id>9</id><revision><id>1</id><text>p</text></revision></page>
</mediawiki>
"""


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def prepared(name: str, raw: Path, **options) -> Corpus:
    prepare(name, raw, raw.parent / "out", **options)
    return open_corpus(raw.parent / "out")


@pytest.fixture
def raw(tmp_path) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


def shown(corpus: Corpus) -> list[tuple[str, str, str, str]]:
    return [(s.id, s.title, s.text, s.extra.get("section", "")) for s in corpus.sources]


def test_kilt(raw):
    (raw / "kilt_knowledgesource.json").write_bytes(lines(KILT))
    corpus = prepared("kilt", raw, passage_words=8)
    assert shown(corpus) == [
        ("1101759#1", "Email marketing", "Email marketing is the act of sending a", ""),
        (
            *("1101759#2", "Email marketing"),
            "message. Transactional emails are triggered. First item",
            "",
        ),
    ]
    assert dict(corpus.sources[0].extra) == {
        "article": "1101759",
        "url": "https://en.wikipedia.org/w/index.php?title=Email%20marketing&oldid=1",
        "wikidata": "Q1",
    }
    assert corpus.manifest["origin"]["left_out_items"] == {"without text": 1}
    assert corpus.manifest["origin"]["articles"] == 1


def test_only_a_first_paragraph_that_is_the_title_is_left_out(raw):
    pages = [
        {
            "wikipedia_title": "Ghost",
            "wikipedia_id": 9,
            "text": ["Ghost\n", "A spirit.\n", "Ghost"],
        },
        {"wikipedia_title": "Oak", "wikipedia_id": 10, "text": ["A tree.\n"]},
    ]
    (raw / "kilt_knowledgesource.json").write_bytes(lines(pages))
    found = [source.text for source in prepared("kilt", raw).sources]
    assert found == ["A spirit. Ghost", "A tree."]


def test_a_passage_names_the_section_of_its_first_word():
    sections = [Section("", "a b c"), Section("Life", "d e f g h"), Section("Death", "i")]
    article = Article("9", "T", "u", sections)
    whole = sources_of(article, PassageOptions(4))
    assert [(row.id, row.text, json.loads(row.extra).get("section")) for row in whole] == [
        *(("9#1", "a b c d", None), ("9#2", "e f g h", "Life"), ("9#3", "i", "Death"))
    ]
    own = sources_of(article, PassageOptions(4, across_sections=False))
    assert [row.text for row in own] == ["a b c", "d e f g", "h", "i"]
    assert [row.text for row in sources_of(article, PassageOptions(1))] == list("abcdefghi")
    words = " ".join(str(n) for n in range(1234))
    cut = sources_of(Article("1", "T", "u", [Section("", words)]), PassageOptions())
    assert [len(row.text.split()) for row in cut] == [100] * 12 + [34]
    assert " ".join(row.text for row in cut) == words
    refuses("--passage_words=0", PassageOptions, 0)


def test_infoseek(raw):
    (raw / "Wiki6M_ver_1_0.jsonl.gz").write_bytes(gzip.compress(lines(WIKI6M)))
    (raw / "images" / "Q806").mkdir(parents=True)
    Image.new("RGB", (4, 4), "red").save(raw / "images/Q806/Q806563.jpg")
    corpus = prepared("infoseek_wiki", raw)
    assert [(s.id, s.modality, s.text) for s in corpus.sources] == [
        ("Q806563#picture1", "image", "Banded demoiselle"),
        ("Q806563#1", "text", "The banded demoiselle is a damselfly."),
        ("Q42#1", "text", "An author."),
    ]
    assert corpus.picture(0) == (raw / "images/Q806/Q806563.jpg").read_bytes()
    assert corpus.picture(1) is None
    assert corpus.sources[0].extra["image_url"].endswith("Calopteryx.jpg")
    assert corpus.sources[1].extra["article"] == "Q806563"
    assert corpus.picture_count() == 1
    assert list(corpus.modality_rows("image")) == [0]
    assert list(corpus.modality_rows("text")) == [1, 2]
    pictures = open_pictures(raw.parent / "out")
    assert pictures.read("Q806/Q806563.jpg") == corpus.picture(0)
    (raw / "images/Q806/Q806563.jpg").unlink()
    refuses(r"Q806/Q806563\.jpg: is not in", pictures.read, "Q806/Q806563.jpg", error=PictureError)
    texts = corpus.of_rows(corpus.modality_rows("text"))
    assert [s.id for s in texts.sources] == list(texts.row) == ["Q806563#1", "Q42#1"]
    assert texts.row["Q42#1"] == 1
    assert "Q806563#picture1" not in texts.row
    assert not texts.image_mask().any()
    (raw / "images").rename(raw / "moved")
    refuses(r"raw/images: the corpus's pictures .*; put it", open_corpus, raw.parent / "out")


@pytest.mark.parametrize("packed", [False, True], ids=["json", "zip"])
def test_encyclopedic_vqa(raw, packed):
    data = json.dumps(EVQA, indent=1, ensure_ascii=False)
    if packed:
        with zipfile.ZipFile(raw / "encyclopedic_kb_wiki.zip", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("encyclopedic_kb_wiki.json", data)
    else:
        (raw / "encyclopedic_kb_wiki.json").write_text(data)
    (raw / "images").mkdir()
    Image.new("RGB", (4, 4)).save(raw / "images" / "Adler_%C3%BC.jpg")
    corpus = prepared("infoseek_wiki", raw, passage_words=5)
    assert shown(corpus) == [
        (f"{URL}#picture1", "Golden eagle", "An eagle in Tirol", "Diet"),
        (f"{URL}#1", "Golden eagle", "It is a bird of", "Golden eagle"),
        (f"{URL}#2", "Golden eagle", "prey.", "Golden eagle"),
        (f"{URL}#3", "Golden eagle", "It eats hares { and", "Diet"),
        (f"{URL}#4", "Golden eagle", "} foxes.", "Diet"),
        (f"{URL[:-12]}Ghost#1", "Ghost", 'A "é" ghost.', "Ghost"),
    ]
    assert [s.extra["section_index"] for s in corpus.sources] == [1, 0, 0, 1, 1, 0]
    assert corpus.picture(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"section_titles": ["Golden eagle", None, "Empty"]}, "texts title, section_titles and"),
        ({"section_titles": ""}, "texts title, section_titles and section_texts were expected"),
        ({"title": "\ud83d"}, "surrogates not allowed"),
        ({"image_section_indices": [3, 0]}, "image_section_indices of its sections were expected"),
        ({"image_reference_descriptions": [5, ""]}, "texts image_reference_descriptions were"),
    ],
)
def test_an_entry_of_another_form_is_broken(raw, change, message):
    (raw / "images").mkdir()
    Image.new("RGB", (4, 4)).save(raw / "images" / "Adler_%C3%BC.jpg")
    (raw / "encyclopedic_kb_wiki.json").write_text(json.dumps({URL: {**EVQA[URL], **change}}))
    with pytest.raises(UserError, match=rf"the first broken one: .*Golden_eagle: .*{message}"):
        prepare("infoseek_wiki", raw, raw.parent / "out")


@pytest.mark.parametrize("name", [300 * "Q", "{}/x", "../../x"])
def test_a_picture_is_looked_for_in_its_folder_alone(raw, name):
    (raw / "images").mkdir()
    Image.new("RGB", (4, 4)).save(raw.parent / "x.jpg")
    entity = {**WIKI6M[0], "wikidata_id": name.format(raw.parent)}
    (raw / "Wiki6M_ver_1_0.jsonl").write_bytes(lines([entity]))
    (source,) = prepared("infoseek_wiki", raw).sources
    assert source.modality == "text"


def test_entries_are_read_across_blocks(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(EVQA, ensure_ascii=False))
    monkeypatch.setattr(streams.InputFile.blocks, "__defaults__", (7,))
    assert dict(json_entries(InputFile(path))) == EVQA
    path.write_text(json.dumps(EVQA)[:-30])
    refuses(r"x\.json: ends within", list, json_entries(InputFile(path)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "a JSON object was expected; fetch"),
        (b'{"a": "\xff"}', "is not UTF-8; fetch"),
        (b'{"a": ' + 100_000 * b"[", r"""what follows '"a": \[\[.*' is no JSON; fetch"""),
        (b"{1: {}}", "ends within '1: {}}'; fetch"),
    ],
)
def test_files_that_are_no_json_object(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    refuses(rf"x\.json: {message} the file again", list, json_entries(InputFile(path)))


def test_dpr_lines_are_those_of_csv(raw):
    text = (
        "id\ttext\ttitle\n"
        '1\t"Aaron ( or ; ""Ahärôn"") is a prophet"\tAaron\n'
        '2\tplain words "inside"\t"A ""B"" C"\n'
        '3\t"a\ttab"\tTab\n'
        "4\t\tEmpty\n"
        '5\t"it does not end\tBroken\n'
        "6 two columns\n"
    )
    for packed, data in (
        (".gz", gzip.compress(text.encode())),
        (".bz2", bz2.compress(text.encode())),
    ):
        path = raw / f"psgs_w100.tsv{packed}"
        path.write_bytes(data)
        corpus = prepared("dpr", raw, overwrite=True)
        path.unlink()
        assert [(s.id, s.title, s.text) for s in corpus.sources] == [
            ("1", "Aaron", 'Aaron ( or ; "Ahärôn") is a prophet'),
            ("2", 'A "B" C', 'plain words "inside"'),
            ("3", "Tab", "a\ttab"),
        ]
        origin = corpus.manifest["origin"]
        assert origin["left_out_items"] == {"header": 1, "without text": 1, "broken": 2}
        assert [line.partition(":")[0] for line in origin["broken"]] == [
            f"psgs_w100.tsv{packed}, line {n}" for n in (6, 7)
        ]


def test_a_file_of_another_kind_is_refused(raw):
    (raw / "kilt_knowledgesource.json").write_text("no json\n" * 40)
    with pytest.raises(RunError, match=r"11 of 11 lines are broken, the first: .*, line 1: "):
        prepare("kilt", raw, raw.parent / "out")
    for page in ({}, {"text": "no list"}, {"text": ["T"], "wikipedia_title": 1}):
        page = {"wikipedia_id": 1, "wikipedia_title": "T", **page}
        (raw / "kilt_knowledgesource.json").write_text(json.dumps(page) + "\n")
        match = "has no KILT's knowledge source; the first broken one: "
        refuses(match, prepare, "kilt", raw, raw.parent / "out")
    assert not (raw.parent / "out").exists()


def test_files_that_are_cut_or_fill_disks_are_refused(raw, monkeypatch):
    whole = gzip.compress(lines(KILT * 50))
    path = raw / "kilt_knowledgesource.json.gz"
    path.write_bytes(whole[:-20])
    refuses(r"json\.gz: cannot be read .*fetch the file", prepare, "kilt", raw, raw.parent / "out")
    monkeypatch.setattr(streams, "_ALLOWED", 1 << 20)
    path.write_bytes(gzip.compress(b"0" * (4 << 20)))
    refuses("unpacks to more than 250 times its size", prepare, "kilt", raw, raw.parent / "out")


@pytest.mark.parametrize(
    ("names", "field", "value", "message"),
    [
        ("ab", 8, 0, "holds 2 files, one was expected; unpack it, and give the one"),
        ("a", 6, 91, r"cannot be unpacked here \(zip file version 9\.1\); unpack it"),
        ("a", 8, 1, r"cannot be unpacked here \(File .* is encrypted, .*\); unpack it"),
        # Deflate64, which Windows takes for large files.
        ("a", 10, 9, r"cannot be unpacked here \(That compression method .*\); unpack it"),
        ("a", 46, 0, r"cannot be (unpacked|read)"),
    ],
    ids=["two files", "version", "password", "method", "no name"],
)
def test_zips_that_are_not_unpacked(tmp_path, names, field, value, message):
    """`field` is a place in the first file's entry of the archive's directory."""
    path = tmp_path / "x.json.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for name in names:
            packed.writestr(name, "{}")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + field] = value
    path.write_bytes(data)
    refuses(rf"x\.json\.zip: {message}", InputFile, path)


def test_what_the_folder_must_hold(raw):
    refuses("has no file of DPR's passages", prepare, "dpr", raw, raw.parent / "out")
    for name in ("a-pages-articles1.xml", "b-pages-articles2.xml.bz2"):
        (raw / name).touch()
    refuses("has 2 files of the articles of a dump", prepare, "wikipedia", raw, raw.parent / "out")
    refuses("--passage_words", prepare, "dpr", raw, raw.parent / "out", passage_words=50)
    with pytest.raises(UserError, match="--max_broken_pictures"):
        prepare("kilt", raw, raw.parent / "out", max_broken_pictures=3)


def test_pages_of_a_dump(tmp_path):
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(bz2.compress(DUMP.encode()))
    reader = PageReader(InputFile(path))
    pages = list(reader.pages())
    assert [(p.id, p.title, p.ns, p.redirect) for p in pages] == [
        ("7", "Ada Lovelace", "0", False),
        ("8", "AL", "0", True),
        ("9", "Datei:x.jpg", "6", False),
    ]
    assert reader.base == "https://de.wikipedia.org/wiki/"
    assert {"datei", "kategorie", "file"} < set(reader.not_text)
    path = tmp_path / "cut.xml"
    path.write_text(DUMP[:-40])
    refuses(r"cut\.xml: is no XML, or is cut", list, PageReader(InputFile(path)).pages())
    path.write_text('<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>')
    refuses("declares the entity 'a'", list, PageReader(InputFile(path)).pages())


def test_an_element_of_a_dump_that_does_not_end(tmp_path, monkeypatch):
    path = tmp_path / "dump.xml"
    path.write_text(DUMP)
    monkeypatch.setattr(streams, "LONGEST_LINE", 20)
    message = r"dump\.xml: page '.*' has an element of more than 20 characters; this is no dump of"
    refuses(message, list, PageReader(InputFile(path)).pages())


def test_articles_of_a_dump(raw):
    (raw / "dewiki-pages-articles.xml").write_text(DUMP)
    corpus = prepared("wikipedia", raw, passage_words=5)
    assert shown(corpus) == [
        ("7#1", "Ada Lovelace", "Ada Lovelace was an mathematician.", ""),
        ("7#2", "Ada Lovelace", "She wrote & computed notes.", "Life and work"),
        ("7#3", "Ada Lovelace", "1843 one two", "Life and work"),
    ]
    assert corpus.sources[0].extra["url"] == "https://de.wikipedia.org/wiki/Ada_Lovelace"
    assert corpus.manifest["origin"]["left_out_items"] == {"redirect": 1, "namespace 6": 1}


def test_a_row_finds_its_knowledge_there(raw):
    (raw / "Wiki6M_ver_1_0.jsonl").write_bytes(lines(WIKI6M))
    prepare("infoseek_wiki", raw, raw.parent / "out")
    spec = KnowledgeSpec(data=str(raw.parent / "out"), modality="text")
    knowledge = open_knowledge(Corpus([]), spec)
    ((found,),) = knowledge.find(["Which damselfly is banded?"], 1)
    assert (found.id, found.title) == ("Q806563#1", "Banded demoiselle")


def test_questions_of_one_corpus_over_the_sources_of_another(raw):
    """`mmqa search --sources` and `data.sources` of a row: InfoSeek's questions over its articles."""
    (raw / "Wiki6M_ver_1_0.jsonl").write_bytes(lines(WIKI6M))
    (raw / "images").mkdir()
    Image.new("RGB", (4, 4), "red").save(raw / "images" / "Q806563.jpg")
    articles, asked, own = (raw.parent / name for name in ("articles", "asked", "questions"))
    prepare("infoseek_wiki", raw, articles)
    own.mkdir()
    Image.new("RGB", (4, 4), "blue").save(own / "asked.png")
    (own / "sources.jsonl").write_text('{"id": "own", "modality": "text", "text": "banded"}\n')
    question = {"id": "q", "split": "test", "question": "Which damselfly is banded?"}
    (own / "questions.jsonl").write_bytes(lines([{**question, "image": "asked.png"}]))
    prepare("corpus", own, asked)
    corpus = open_corpus(asked, articles)
    assert [source.id for source in corpus.sources] == ["Q806563#picture1", "Q806563#1", "Q42#1"]
    assert corpus.fingerprint == open_corpus(articles).fingerprint
    assert corpus.question_picture(corpus.questions()[0]) == (own / "asked.png").read_bytes()
    assert corpus.picture(0) == (raw / "images" / "Q806563.jpg").read_bytes()
    found = raw.parent / "found.jsonl"
    flags = [f"--data={asked}", f"--sources={articles}", "--method=bm25", f"--out={found}"]
    assert main(["search", *flags, "--top_k=1"]) == 0
    assert json.loads(found.read_text())["sources"] == ["Q806563#1"]
