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
from minits.checkpoint.tokenizer import TextDecoder, Tokenizer
from minits.methods import make_method
from minits.supervision import Example, Step, encode_example, encode_prompt, encode_rest
from minits.thinking import ThinkingConfig
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


def with_template(tokenizer: Tokenizer, wrap=lambda template: template) -> Tokenizer:
    """The tokenizer with a template that asks for a start token, and one at the end."""
    raw = json.loads(tokenizer.definition)
    name = "<|endoftext|>"
    control = {"SpecialToken": {"id": name, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [control, {"Sequence": {"id": "A", "type_id": 0}}, control],
        "pair": [],
        "special_tokens": {name: {"id": name, "ids": [EOS], "tokens": [name]}},
    }
    raw["post_processor"] = wrap(template)
    return Tokenizer(json.dumps(raw), (EOS,), EOS)


def in_a_sequence(template: dict) -> dict:
    """As distilled checkpoints have it: after the byte-level part."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {"type": "Sequence", "processors": [byte_level, template]}


@pytest.mark.parametrize("wrap", [lambda template: template, in_a_sequence])
def test_the_start_token_of_the_template_begins_prompts_and_nothing_else(tokenizer, wrap):
    started = with_template(tokenizer, wrap)
    assert encode_prompt(started, "hello") == [EOS, *tokenizer.encode("hello")]
    assert started.encode("hello") == tokenizer.encode("hello")
    assert encode_rest(started, "hello") == encode_rest(tokenizer, "hello")
    assert started.encode_with_offsets(" a", start=True)[1] == [(0, 0), (0, 1), (1, 2)]
    assert encode_prompt(tokenizer, "hello") == tokenizer.encode("hello")


def test_training_and_inference_begin_a_row_alike_and_steps_stay_at_their_words(tokenizer):
    """The start token takes a place in the chunks; a step keeps the token that it belongs to."""
    config = ThinkingConfig(4, 1, 2, eos_ids=(EOS,), pad_id=EOS)
    text, steps = "abcdefgh", (Step(0, "x"), Step(3, "y"), Step(4, "z"))
    made = Example(text, steps, "no")
    started = with_template(tokenizer)
    row, plain = (encode_example(made, each, config) for each in (started, tokenizer))
    assert row.ids[: row.prompt_length] == encode_prompt(started, text)
    assert row.ids == [EOS, *plain.ids]
    # <start> a b c | d e f g | h …: "c" ends the first chunk, "d" begins the second.
    said = [tokenizer.decode(thought[:-1]) for thought in row.thoughts]
    assert said == [" x y", " z", ""]


def test_one_step_a_chunk_counts_the_start_token(tokenizer):
    """<start> a b c | d e f g | h …: steps after d and e share a chunk, so the second moves on."""
    config = ThinkingConfig(4, 1, 2, eos_ids=(EOS,), pad_id=EOS)
    made = Example("abcdefgh", (Step(4, "y"), Step(5, "z")), "no")
    method = make_method("thinking", one_per_chunk=True)
    row = method.encode(made, with_template(tokenizer), config)
    assert [chunk for chunk, _ in row.ends] == [1, 2]


def test_the_template_of_transformers_begins_prompts_as_it_does_there(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    started = with_template(tokenizer, in_a_sequence)
    (tmp_path / "tokenizer.json").write_text(started.definition)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs("Hi you")["input_ids"][:-1] == encode_prompt(started, "Hi you")


def edited(tokenizer: Tokenizer, **keys) -> Tokenizer:
    """The tokenizer with other top-level keys in its file."""
    return Tokenizer(json.dumps(json.loads(tokenizer.definition) | keys), (EOS,), EOS)


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 16},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": EOS,
    "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}


@pytest.mark.parametrize("keys", [{"truncation": TRUNCATION}, {"padding": PADDING}])
def test_a_truncation_or_padding_left_in_the_file_is_not_obeyed(tokenizer, keys):
    changed = edited(tokenizer, **keys)
    for text in ("many more than four tokens", "a"):
        assert changed.encode_with_offsets(text) == tokenizer.encode_with_offsets(text)
    assert json.loads(changed.definition) != json.loads(tokenizer.definition)


def added(number: int, content: str, special: bool) -> dict:
    strip = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **strip}


def test_ordinary_added_words_are_one_id_and_special_ones_stay_text(tokenizer):
    """The special one stands first, so that a copy without it would shift the other's id."""
    words = [added(256, "<|endoftext|>", True), added(257, "<gap>", True)]
    words += [added(258, "<tool_call>", False), added(259, "<|fim_prefix|>", False)]
    changed = edited(tokenizer, added_tokens=words)
    text = "a<tool_call>b<gap><|fim_prefix|><|endoftext|>"
    ids, offsets = changed.encode_with_offsets(text)
    plain = tokenizer.encode
    expected = [*plain("a"), 258, *plain("b<gap>"), 259, *plain("<|endoftext|>")]
    assert ids == expected
    assert offsets[1] == (1, 12)
    assert changed.decode(ids) == text


def test_the_same_text_has_the_same_ids_at_every_call_where_the_file_asks_for_chance(tokenizer):
    raw = json.loads(tokenizer.definition)
    raw["model"] |= {"merges": [["a", "b"]], "dropout": 1.0}
    raw["model"]["vocab"]["ab"] = 256
    raw["added_tokens"] = []
    changed = Tokenizer(json.dumps(raw), (EOS,), EOS)
    assert changed.encode("ab" * 50) == [256] * 50


BAD_FILES = [
    ({"added_tokens": [added(5, "<|endoftext|>", True)]}, "added_tokens"),
    ({"truncation": {"max_length": "4"}}, "truncation: "),
    ({"normalizer": 5}, "normalizer: "),
    ({"pre_tokenizer": {"type": "None"}}, "pre_tokenizer: "),
    ({"post_processor": []}, "post_processor: "),
    ({"decoder": "ByteLevel"}, "decoder: "),
    ({"model": None}, "model: "),
    ({"model": {"type": "WordLevel", "vocab": {"a": 1, "b": 1}, "unk_token": "a"}}, "vocab"),
    ({"model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "b"}}, "unk_token"),
]


@pytest.mark.parametrize("keys, named", BAD_FILES)
def test_an_error_of_the_file_names_the_key(tokenizer, tmp_path, keys, named):
    raw = json.loads(tokenizer.definition) | {"added_tokens": []} | keys
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"tokenizer.json is not a readable tokenizer: .*{named}"):
        Tokenizer.from_folder(tmp_path, (EOS,), EOS)


@pytest.mark.parametrize("text", ["x" * 200_000, "The\x1b[2J", "\udce9" * 100_000])
def test_a_word_is_told_shortened_and_without_control_characters(text):
    with pytest.raises(ValueError) as error:
        tiny_tokenizer().encode(text)
    assert len(str(error.value)) < 1200 and str(error.value).isprintable()


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
    stream = TextDecoder(tokenizer)
    assert "".join(stream.put(i) for i in ids) + stream.end() == tokenizer.decode(ids)
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)


@given(text=texts.filter(lambda text: UNFINISHED not in text))
@example("x\u0302 👍🏽 é")
def test_no_streamed_piece_holds_half_a_character(tokenizer, text):
    stream = TextDecoder(tokenizer)
    pieces = [stream.put(i) for i in tokenizer.encode(text)]
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) == nfc(text)


def test_a_stream_gives_each_word_as_soon_as_it_is_whole():
    tokenizer = tiny_tokenizer()
    stream = TextDecoder(tokenizer)
    pieces = [stream.put(i) for i in tokenizer.encode("The coin starts")]
    assert pieces == ["The", " coin", " starts"]


def test_a_broken_character_does_not_hold_back_what_follows(tokenizer):
    stream, half = TextDecoder(tokenizer), tokenizer.encode("é")[0]
    assert [stream.put(i) for i in [half, *tokenizer.encode("ab")]] == ["", UNFINISHED + "a", "b"]


def test_a_stream_that_ends_inside_a_character_shows_what_is_left(tokenizer):
    stream = TextDecoder(tokenizer)
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
    "content",
    ["", "{", "[]", "{}", "[" * 100_000, "version https://git-lfs.github.com/spec/v1\n"],
    ids=range(6),
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
