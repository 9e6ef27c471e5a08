"""Chunk-level supervision: markers, tokens, chunks, what has no target, and what comes too late."""

import re
import unicodedata
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minits.checkpoint.tiny import tiny_tokenizer
from minits.checkpoint.tokenizer import Tokenizer
from minits.generation import generate
from minits.methods.thinking import one_step_a_chunk
from minits.supervision import (
    MARKER,
    OVERFLOW_SEPARATOR,
    Example,
    Row,
    Step,
    encode_example,
    parse_marked,
    render_marked,
    steps_to_tokens,
)
from minits.tasks import make_task
from minits.thinking import ThinkingConfig
from minits.training.late import is_late
from strategies import Shape, build, write_tokenizer

EOS = 256


def chunks_of(c: int, eos: int = EOS) -> ThinkingConfig:
    return ThinkingConfig(c, 1, 1, eos_ids=(eos,), pad_id=eos)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """One token for each UTF-8 byte of the normalised text, so that places can be counted by hand."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder / "tokenizer.json", 257)
    return Tokenizer.from_folder(folder, (EOS,), EOS)


# Text that is its own normal form, so that byte t of it is token t.
plain_texts = st.text(alphabet="ab .é😀한<T>", min_size=1, max_size=24)


@st.composite
def examples(draw, prompts=plain_texts) -> Example:
    """Any prompt with up to 8 numbered steps, several at one place more often than not."""
    prompt = draw(prompts)
    places = sorted(draw(st.lists(st.integers(0, len(prompt)), max_size=8)))
    if places and draw(st.booleans()):
        places = sorted(places + [draw(st.sampled_from(places))] * draw(st.integers(1, 3)))
    steps = tuple(Step(place, f"#{i}#") for i, place in enumerate(places))
    return Example(prompt, steps, draw(st.text(alphabet="xyz", min_size=1, max_size=6)))


def token_of_each_step(example: Example) -> list[int]:
    """By the definition: the token (here: the byte) before the marker, or that of the step before if it is further on;
    of further steps at one place, each one further than the step before.

    May lie past the prompt's last token.
    """
    homes: list[int] = []
    last = len(example.prompt.encode()) - 1
    for number, step in enumerate(example.steps):
        before = len(example.prompt[: step.position].encode())
        at_least = [0, before - 1, *(min(home, last) for home in homes)]
        together = number and example.steps[number - 1].position == step.position
        homes.append(homes[-1] + 1 if together else max(at_least))
    return homes


def text_of_each_chunk(example: Example, c: int) -> list[str]:
    """The thought text of every chunk of the prompt, by the definition: token after token."""
    size = len(example.prompt.encode())
    tokens = [""] * size
    for home, step in zip(token_of_each_step(example), example.steps):
        tokens[min(home, size - 1)] += ("; " if home >= size else " ") + step.text
    return ["".join(tokens[start : start + c]) for start in range(0, size, c)]


# -- marked text -------------------------------------------------------------------------------------------------------


@given(example=examples())
@example(Example("T><T", (Step(0, "a"), Step(2, "b"), Step(4, "c")), "x"))
def test_parsing_takes_out_what_rendering_put_in(example):
    assume(MARKER not in example.prompt)
    marked = render_marked(example.prompt, example.steps)
    assert parse_marked(marked, [step.text for step in example.steps]) == (
        example.prompt,
        example.steps,
    )


@given(marked=st.text(alphabet="ab<T>", max_size=20))
def test_rendering_puts_in_what_parsing_took_out(marked):
    plain, steps = parse_marked(marked, ["s"] * marked.count(MARKER))
    assert render_marked(plain, steps) == marked


def test_the_papers_example_parses_to_its_plain_text():
    plain, steps = parse_marked(
        "A coin's state is heads.<T> Alice flips,<T> then Bob flips.<T> What's the state?",
        ["heads", "tails", "heads"],
    )
    assert plain == "A coin's state is heads. Alice flips, then Bob flips. What's the state?"
    assert [(plain[: step.position][-6:], step.text) for step in steps] == [
        ("heads.", "heads"),
        ("flips,", "tails"),
        ("flips.", "heads"),
    ]


@pytest.mark.parametrize("steps", [[], ["a"], ["a", "b", "c"]])
def test_more_or_fewer_steps_than_markers_are_an_error_with_both_numbers(steps):
    with pytest.raises(ValueError, match=f"2 markers '<T>' for {len(steps)} steps"):
        parse_marked("one<T> two<T>", steps)


# -- steps to tokens ---------------------------------------------------------------------------------------------------


LETTERS = [(0, 1), (1, 2), (2, 3), (3, 4)]  # a prompt of four letters, each a token


def test_a_step_belongs_to_the_token_before_its_marker():
    assert steps_to_tokens(LETTERS, [Step(2, "x")]) == [(1, " x")]


def test_a_marker_inside_a_token_belongs_to_that_token():
    assert steps_to_tokens([(0, 3), (3, 6)], [Step(4, "x")]) == [(1, " x")]


def test_a_marker_at_character_0_belongs_to_token_0():
    assert steps_to_tokens(LETTERS, [Step(0, "x")]) == [(0, " x")]


def test_markers_at_one_place_go_to_consecutive_tokens():
    assert steps_to_tokens(LETTERS, [Step(2, "x"), Step(2, "y"), Step(2, "z")]) == [
        (1, " x"),
        (2, " y"),
        (3, " z"),
    ]


def test_steps_that_come_to_share_a_token_keep_their_order():
    assert steps_to_tokens(LETTERS, [Step(1, "x"), Step(1, "y"), Step(2, "z")]) == [
        (0, " x"),
        (1, " y"),
        (1, " z"),
    ]


def test_a_step_stays_behind_those_that_came_past_its_own_token():
    steps = [Step(2, "s0"), Step(2, "s1"), Step(2, "s2"), Step(3, "s3")]
    found = steps_to_tokens([(i, i + 1) for i in range(8)], steps)
    assert found == [(1, " s0"), (2, " s1"), (3, " s2"), (3, " s3")]


@given(example=examples())
def test_the_thoughts_of_a_row_say_its_steps_in_the_order_given(tokenizer, example):
    row = encode_example(example, tokenizer, chunks_of(3))
    whole = "".join(tokenizer.decode(thought[:-1]) for thought in row.thoughts)
    said = re.findall(r"#\d+#", whole)
    assert said == [step.text for step in example.steps][: len(said)]
    assert len(said) == len(example.steps) - row.without_target


def test_steps_left_over_at_the_end_are_joined_there_with_the_separator():
    steps = [Step(4, "x"), Step(4, "y"), Step(4, "z")]
    assert steps_to_tokens(LETTERS, steps) == [
        (3, " x"),
        (3, f"{OVERFLOW_SEPARATOR} y"),
        (3, f"{OVERFLOW_SEPARATOR} z"),
    ]


def test_a_step_after_a_character_of_several_tokens_waits_for_the_last_of_them():
    assert steps_to_tokens([(0, 1), (0, 1), (0, 1), (1, 2)], [Step(1, "x")]) == [(2, " x")]


@pytest.mark.parametrize("positions", [[3, 2], [0, 4, 1], [-1]])
def test_steps_out_of_order_are_an_error_that_names_the_step(positions):
    steps = [Step(at, f"step{i}") for i, at in enumerate(positions)]
    with pytest.raises(
        ValueError, match=f"'step{len(steps) - 1}'.*character {positions[-1]}.*order"
    ):
        steps_to_tokens(LETTERS, steps)


def test_a_step_may_stand_behind_a_last_blank_and_no_further():
    offsets = [(0, 1), (1, 2)]  # a last blank may be part of no token
    assert steps_to_tokens(offsets, [Step(3, "x")]) == [(1, " x")]
    with pytest.raises(ValueError, match="'x' stands at character 4, past the end"):
        steps_to_tokens(offsets, [Step(4, "x")])


def test_steps_of_a_prompt_without_tokens_are_an_error():
    with pytest.raises(ValueError, match="no tokens"):
        steps_to_tokens([], [Step(0, "x")])


@given(example=examples(), c=st.integers(1, 9))
@example(Example("ab", (Step(1, "a"), Step(1, "b"), Step(2, "c")), "x"), 1)
def test_one_step_a_chunk_moves_each_step_to_the_first_chunk_that_is_free(tokenizer, example, c):
    _, offsets = tokenizer.encode_with_offsets(example.prompt)
    moved = one_step_a_chunk(example, offsets, c)
    assert [step.text for step in moved.steps] == [step.text for step in example.steps]
    before = [home // c for home, _ in steps_to_tokens(offsets, example.steps)]
    after = [home // c for home, _ in steps_to_tokens(offsets, moved.steps)]
    last, free = (len(offsets) - 1) // c, 0
    for own, found in zip(before, after):
        assert found >= min(max(own, free), last) and (
            found > own or found == own >= min(free, last)
        )
        if found > max(own, free):  # a character of several tokens ends there
            first, end = offsets[max(own, free) * c], offsets[found * c]
            assert first == end
        free = found + 1
    earlier = [chunk for chunk in after if chunk != last]
    assert len(set(earlier)) == len(earlier)


# -- whole examples ----------------------------------------------------------------------------------------------------


@given(example=examples(), c=st.integers(1, 9))
def test_ids_are_those_of_the_plain_text(tokenizer, example, c):
    row = encode_example(example, tokenizer, chunks_of(c))
    prompt, answer = tokenizer.encode(example.prompt), tokenizer.encode(" " + example.answer)
    assert row.ids == [*prompt, *answer, EOS]
    assert row.prompt_length == len(prompt)


@given(example=examples(), c=st.integers(1, 9))
def test_every_step_lands_in_exactly_one_thought_or_in_the_count_without_target(
    tokenizer, example, c
):
    row = encode_example(example, tokenizer, chunks_of(c))
    thoughts = [tokenizer.decode(thought[:-1]) for thought in row.thoughts]
    found = [sum(thought.count(step.text) for thought in thoughts) for step in example.steps]
    assert set(found) <= {0, 1}
    assert found.count(0) == row.without_target


@given(example=examples(), c=st.integers(1, 9))
def test_thoughts_are_those_of_the_definition(tokenizer, example, c):
    row = encode_example(example, tokenizer, chunks_of(c))
    expected = text_of_each_chunk(example, c)
    expected += [""] * (len(row.thoughts) - len(expected))  # chunks of the answer
    assert [tokenizer.decode(thought[:-1]) for thought in row.thoughts] == expected[
        : len(row.thoughts)
    ]


@given(example=examples(), c=st.integers(1, 9))
def test_there_is_a_thought_for_each_chunk_that_is_complete_before_the_last_token(
    tokenizer, example, c
):
    row = encode_example(example, tokenizer, chunks_of(c))
    assert len(row.thoughts) == (len(row.ids) - 1) // c


@given(example=examples(), c=st.integers(1, 9))
def test_every_thought_ends_in_the_only_eos_it_has(tokenizer, example, c):
    for thought in encode_example(example, tokenizer, chunks_of(c)).thoughts:
        assert thought.index(EOS) == len(thought) - 1


@given(noise=st.text(alphabet="e\u0301a\u0323\u1100\u1161 ", max_size=12))
@example("Cafe\u0301 cre\u0300me ")
def test_characters_that_normalisation_joins_do_not_move_a_step(tokenizer, noise):
    """The step stands after "yes": the tokens up to its own are the text up to there, in normal form."""
    prompt, (step,) = parse_marked(noise + "yes<T> no", ["x"])
    _, offsets = tokenizer.encode_with_offsets(prompt)
    ((home, _),) = steps_to_tokens(offsets, [step])
    assert tokenizer.decode(tokenizer.encode(prompt)[: home + 1]) == unicodedata.normalize(
        "NFC", noise + "yes"
    )


def test_the_papers_example_gives_the_papers_targets():
    """Appendix A.4; chunks of 5 tokens here, in words: each holds one sentence's end, but for the first two."""
    tokenizer = tiny_tokenizer()
    prompt, steps = parse_marked(
        "The coin starts at state heads.<T> Alice doesn't flip the coin.<T> Bob flips the coin.<T> "
        "Alice flips the coin.<T>",
        ["heads", "heads", "tails", "heads"],
    )
    row = encode_example(
        Example(prompt, steps, "The final state of the coin is heads."), tokenizer, chunks_of(5, 0)
    )
    assert [tokenizer.decode(thought) for thought in row.thoughts] == [
        "<eos>",
        " heads<eos>",
        " heads<eos>",
        " tails<eos>",
        " heads<eos>",
        "<eos>",
    ]


def test_a_step_whose_chunk_never_completes_is_counted_not_trained(tokenizer):
    row = encode_example(
        Example("abcd", (Step(2, "x"), Step(4, "y")), "z"), tokenizer, chunks_of(8)
    )
    assert (row.thoughts, row.without_target) == ([], 2)


def test_prompt_and_answer_are_encoded_apart():
    """The tokenizer would join "y" and the space after it into one token, were they encoded together."""
    backend = Backend(
        models.BPE(vocab={"x": 0, "y": 1, "z": 2, "Ġ": 3, "yĠ": 4}, merges=[("y", "Ġ")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    joining = Tokenizer(backend.to_str(), (0,), 0)
    assert joining.encode("xy z") == [0, 4, 2]
    row = encode_example(Example("xy", (), "z"), joining, chunks_of(2, 0))
    assert (row.ids, row.prompt_length) == ([0, 1, 3, 2, 0], 2)


def test_generation_reads_the_same_prompt_ids_as_training(tokenizer, monkeypatch):
    example = Example("e\u0301 <|endoftext|> ", (), "x")
    row = encode_example(example, tokenizer, chunks_of(4))
    seen = []
    module = import_module(
        "minits.generation"
    )  # the package's attribute of that name is the function
    monkeypatch.setattr(
        module, "generate_ids", lambda _engine, ids, **_options: seen.extend(ids) or []
    )
    generate(build(Shape()), tokenizer, [example.prompt])
    assert seen == [row.ids[: row.prompt_length]]


# -- length of thoughts ------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 20), limit=st.integers(1, 20))
def test_a_gold_thought_past_the_limit_is_an_error_that_names_the_row(tokenizer, size, limit):
    """The closing EOS does not count; the leading space does."""
    example = Example("abcdefgh", (Step(8, "x" * (size - 1)),), "z")
    config = replace(chunks_of(4), max_thought_tokens=limit)
    if size <= limit:
        row = encode_example(example, tokenizer, config, name="row 17")
        assert len(row.thoughts[1]) == size + 1
    else:
        with pytest.raises(
            ValueError, match=f"row 17: .*chunk 1 has {size} tokens.*max_thought_tokens = {limit}"
        ):
            encode_example(example, tokenizer, config, name="row 17")


# -- late thoughts -----------------------------------------------------------------------------------------------------


def by_definition(
    example: Example,
    row: Row,
    offsets: list[tuple[int, int]],
    homes: list[int],
    thoughts: list[list[str]],
    c: int,
) -> bool:
    """By the definition: up to the position that predicts a value no position's state, nor one before it, has read the
    whole step that gives it. `offsets`: of the answer with its leading space; `thoughts`: of every chunk, as tokens.
    """
    for character, step in example.values:
        value = next(t for t, (_, end) in enumerate(offsets) if end > character + 1)
        chunk, text = homes[step] // c, example.steps[step].text
        thought = "".join(thoughts[chunk])
        whole = thought[
            : thought.rindex(text) + len(text)
        ]  # the last of several steps with one text gives the value
        end = next(
            t
            for t in range(len(thoughts[chunk]))
            if len("".join(thoughts[chunk][: t + 1])) >= len(whole)
        )
        length = len(thoughts[chunk]) + 1  # with EOS
        state = range(max(length, c))[-c:]  # the last token that each vector has read
        reads = [
            q
            for q in range(row.prompt_length + value)
            if q // c == chunk + 1 and state[q % c] >= end
        ]
        if not reads:
            return True
    return False


@given(
    example=examples(),
    opening=st.text(alphabet="opening ", min_size=1, max_size=12).filter(lambda t: t[-1] != " "),
    c=st.integers(1, 12),
    data=st.data(),
)
def test_late_is_what_the_definition_says(tokenizer, example, opening, c, data):
    answer, values = opening, []
    for step in range(len(example.steps)):
        if data.draw(st.booleans()):
            values.append((len(answer), step))
            answer += data.draw(st.sampled_from(["7", "42", "1,"]))
    whole = Example(example.prompt, example.steps, answer, tuple(values))
    row = encode_example(whole, tokenizer, chunks_of(c))
    _, offsets = tokenizer.encode_with_offsets(" " + whole.answer)
    homes = [min(home, row.prompt_length - 1) for home in token_of_each_step(whole)]
    thoughts = [[*text] for text in text_of_each_chunk(whole, c)]
    assert is_late(whole, row, tokenizer, c) == (
        by_definition(whole, row, offsets, homes, thoughts, c) if values else None
    )


@given(
    prompt_length=st.integers(1, 12),
    opening=st.sampled_from(["", "is ", "it is "]),
    c=st.integers(1, 12),
)
def test_late_counts_the_space_before_a_value_as_its_own_token_where_it_is_one(
    tokenizer, prompt_length, opening, c
):
    """So it is for digits in Qwen2.5's tokenizer: " 72" is a space, 7 and 2."""
    whole = Example(
        "p" * prompt_length, (Step(prompt_length, "x"),), opening + "72", ((len(opening), 0),)
    )
    row = encode_example(whole, tokenizer, chunks_of(c))
    _, offsets = tokenizer.encode_with_offsets(f" {opening}72")
    thoughts = [[*text] for text in text_of_each_chunk(whole, c)]
    assert is_late(whole, row, tokenizer, c) == by_definition(
        whole, row, offsets, [prompt_length - 1], thoughts, c
    )


@given(
    name=st.sampled_from(["parity", "vars"]),
    index=st.integers(0, 200),
    operations=st.integers(0, 12),
    c=st.integers(1, 16),
)
@example(name="vars", index=11, operations=9, c=11)  # one chunk ends in b=6 b=6
def test_late_is_what_the_definition_says_for_the_tasks(name, index, operations, c):
    tokenizer = tiny_tokenizer()
    example = make_task(name).drawn("train", index, 0, (operations, operations))
    row = encode_example(example, tokenizer, chunks_of(c, 0))
    _, prompt_offsets = tokenizer.encode_with_offsets(example.prompt)
    _, offsets = tokenizer.encode_with_offsets(" " + example.answer)
    homes = [
        t
        for t, (start, end) in enumerate(prompt_offsets)
        for step in example.steps
        if start < step.position <= end
    ]
    assert len(homes) == len(example.steps)
    thoughts = [[] for _ in range(row.prompt_length)]
    for home, step in zip(homes, example.steps):
        thoughts[home // c] += [tokenizer.decode([i]) for i in tokenizer.encode(" " + step.text)]
    assert is_late(example, row, tokenizer, c) == (
        by_definition(example, row, offsets, homes, thoughts, c) if example.values else None
    )


@pytest.mark.parametrize("c, late", [(2, False), (3, True), (4, True)])
def test_a_value_due_before_its_place_in_the_state_is_late(tokenizer, c, late):
    """The thought is a space, 7 and EOS, and the space before the answer predicts its 7. That space reads the state's
    first vector: with c = 2 that of the 7 (then EOS), otherwise that of the thought's space."""
    example = Example("a" * c, (Step(c, "7"),), "7", ((0, 0),))
    row = encode_example(example, tokenizer, chunks_of(c))
    assert is_late(example, row, tokenizer, c) == late


def test_a_thought_that_only_the_answers_first_words_complete_is_in_time(tokenizer):
    """ "abc is" fills a chunk of 6; the x enters with the second token after it, "=", and that predicts the value."""
    example = Example("abc", (Step(3, "x"),), "is:=7", ((4, 0),))
    for c, late in ((6, False), (7, True)):
        row = encode_example(example, tokenizer, chunks_of(c))
        assert is_late(example, row, tokenizer, c) == late


def test_a_value_without_its_step_is_an_error_that_names_both(tokenizer):
    example = Example("abc", (Step(3, "x"),), "7", ((0, 1),))
    row = encode_example(example, tokenizer, chunks_of(6), name="row 3")
    with pytest.raises(ValueError, match="row 3: .*names step 1; there are 1"):
        is_late(example, row, tokenizer, 6)


def test_of_a_row_without_values_it_is_not_known_whether_any_is_late(tokenizer):
    example = Example("abc", (Step(3, "x"),), "z")
    row = encode_example(example, tokenizer, chunks_of(8))
    assert is_late(example, row, tokenizer, 8) is None
