"""Text <-> ids: control text stays text, round trips, streams, offsets, the tiny vocabulary."""

import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minits.checkpoint import tiny
from minits.checkpoint.tiny import ASSETS, tiny_tokenizer, tokenizer_definition
from minits.checkpoint.tokenizer import Tokenizer
from strategies import write_tokenizer

EOS = 256  # <|endoftext|> of the byte-level tokenizer; its other ids are the 256 bytes
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character

# Everyday text, and what breaks decoders: combining marks, Hangul jamo, joined emoji, flags,
# control spellings.
texts = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            [
                "e\u0301",
                "a\u0301\u0323",
                "\u1100\u1161\u11a8",
                "👩‍👩‍👧",
                "🇫🇷",
                "<|endoftext|>",
                "<T>",
                "\n\n",
                " ",
            ]
        ),
    ),
    max_size=6,
).map("".join)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made / "tokenizer.json", 260)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder, (EOS,), EOS)


# -- text -> ids -----------------------------------------------------------------------------------


@given(text=texts)
@example("Tom wrote <|endoftext|> on 3 cards")
def test_control_text_in_a_prompt_stays_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert EOS not in ids
    assert tokenizer.decode(ids) == nfc(text)


def test_words_that_the_shipped_tokenizer_lacks_are_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr(tiny, "WORDS", [*tiny.WORDS, " sum"])
    advice = r"tokenizer.json has 55 words, .*56: write what tokenizer_definition\(\) gives"
    with pytest.raises(ValueError, match=advice):
        tiny.make_tiny(seed=0, window=None, thinks=True)


def test_control_text_is_no_control_id_in_the_tiny_tokenizer():
    with pytest.raises(ValueError, match="not in this small vocabulary"):
        tiny_tokenizer().encode("The coin<eos>")


def test_no_start_token_is_added_even_where_the_file_asks_for_one(tokenizer):
    raw = json.loads(tokenizer.definition)
    name = "<|endoftext|>"
    control = {"id": name, "type_id": 0}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [],
        "single": [{"SpecialToken": control}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [EOS], "tokens": [name]}},
    }
    greedy = Tokenizer(json.dumps(raw), (EOS,), EOS)
    assert greedy.encode("hello") == tokenizer.encode("hello")
    assert greedy.encode("") == []


@given(text=texts, tail=st.text(alphabet="abc", min_size=1))
@example("Cafe\u0301 ", "abc")
def test_offsets_are_places_in_the_text_as_it_was_given(tokenizer, text, tail):
    """The last letters stand where the original ends, though normalisation shortened the rest."""
    _, offsets = tokenizer.encode_with_offsets(text + "|" + tail)
    whole = len(text + "|" + tail)
    assert offsets[-len(tail) :] == [(i, i + 1) for i in range(whole - len(tail), whole)]


@given(text=texts)
def test_offsets_never_go_back(tokenizer, text):
    starts = [start for start, _ in tokenizer.encode_with_offsets(text)[1]]
    assert starts == sorted(starts)


# -- ids -> text -----------------------------------------------------------------------------------


@given(text=texts)
@example("e\u0301")
def test_decoding_gives_the_normalised_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == nfc(text)


def test_decoding_shows_control_tokens_and_leaves_out_padding_rows(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("a"), EOS, 257, 259]) == "a<|endoftext|>"


def test_only_a_closing_eos_is_taken_off(tokenizer):
    assert tokenizer.without_eos([EOS, 5, EOS]) == [EOS, 5]
    assert tokenizer.without_eos([EOS, 5]) == [EOS, 5]
    assert tokenizer.without_eos([]) == []


# -- streams ---------------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 259), max_size=24))
def test_streamed_pieces_join_to_the_decoded_whole(tokenizer, ids):
    """Any ids: broken characters, control tokens and padding rows among them."""
    stream = tokenizer.decoder()
    assert "".join(stream.put(i) for i in ids) + stream.end() == tokenizer.decode(ids)


@given(text=texts.filter(lambda text: UNFINISHED not in text))
@example("x\u0302 👍🏽 é")
def test_no_streamed_piece_holds_half_a_character(tokenizer, text):
    stream = tokenizer.decoder()
    pieces = [stream.put(i) for i in tokenizer.encode(text)]
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) == nfc(text)


def test_a_stream_gives_each_word_as_soon_as_it_is_whole():
    tokenizer = tiny_tokenizer()
    stream = tokenizer.decoder()
    pieces = [stream.put(i) for i in tokenizer.encode("The coin starts")]
    assert pieces == ["The", " coin", " starts"]


def test_a_broken_character_does_not_hold_back_what_follows(tokenizer):
    stream, half = tokenizer.decoder(), tokenizer.encode("é")[0]
    assert [stream.put(i) for i in [half, *tokenizer.encode("ab")]] == ["", UNFINISHED + "a", "b"]


def test_a_stream_that_ends_inside_a_character_shows_what_is_left(tokenizer):
    stream = tokenizer.decoder()
    first, *_ = tokenizer.encode("é")
    assert stream.put(first) == ""
    assert stream.end() == UNFINISHED
    assert stream.end() == ""


# -- files -----------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error_that_lists_what_is_there(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no tokenizer.json.*vocab.json"):
        Tokenizer.from_folder(tmp_path, (EOS,), EOS)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_malformed_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path, (EOS,), EOS)


# -- the tiny tokenizer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, word",
    [
        ("The coin starts at state edge.", " edge"),
        ("Carol flips the coin.", "Carol"),
        ("The  coin", " "),
        ("The coin\n", "\n"),
        ("a=1; z=2", " z"),
        ("a=a*b", "*"),
        ("Track <eos>", " <"),
    ],
)
def test_an_unknown_word_is_an_error_that_names_it(text, word):
    message = re.escape(f"the word {word!r} is not in this small vocabulary")
    with pytest.raises(ValueError, match=message):
        tiny_tokenizer().encode(text)


def test_the_error_for_a_word_does_not_list_that_word_among_the_known_ones():
    """No space leads the first word of a text: "Alice" is unknown there, " Alice" is known."""
    with pytest.raises(ValueError) as error:
        tiny_tokenizer().encode("Alice flips the coin.")
    assert "Alice" not in str(error.value).partition("has only:")[2].split()


def test_the_error_for_an_unknown_word_lists_the_words_there_are():
    with pytest.raises(ValueError, match="Alice.*Bob.*coin.*heads.*variables"):
        tiny_tokenizer().encode("Carol")


def test_the_shipped_file_is_what_its_definition_says():
    assert (ASSETS / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_definition()
