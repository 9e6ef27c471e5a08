"""Tasks: steps are what an independent reading of the text gives, and streams are reproducible."""

import random
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minits.checkpoint.tiny import LETTERS, tiny_tokenizer
from minits.methods.plain import CoT
from minits.supervision import Example, render_marked
from minits.tasks import TASKS, make_task
from minits.tasks.parity import Parity
from minits.tasks.state_tracking import StateTracking
from minits.tasks.answers import extract_answer
from minits.tasks.task import Task, table

ENDLESS = sorted(name for name, kind in TASKS.items() if issubclass(kind, StateTracking))
seeds = st.integers(0, 2**32)
operations = st.integers(0, 40)
vars_options = st.fixed_dictionaries(
    {"variables": st.integers(1, 26), "modulus": st.integers(2, 120)}
)


def draw(task, seed: int, count: int):
    """An example with exactly `count` operations."""
    return task.drawn("train", 0, seed, (count, count))


# -- independent interpreters: they see the prompt's text and nothing else -------------------------


def replay_parity(text: str) -> list[str]:
    """The coin's state after each sentence."""
    first, *rest = text.split(".")[:-1]
    states = [first.split()[-1]]
    for sentence in rest:
        other = {"heads": "tails", "tails": "heads"}[states[-1]]
        states.append(states[-1] if "doesn't" in sentence else other)
    return states


def replay_vars(text: str, modulus: int) -> tuple[list[str], dict[str, int]]:
    """(each assignment's result, the final values)."""
    values = {name: int(number) for name, number in re.findall(r"([a-z])=(\d+)(?:;| |$)", text)}
    results = []
    for target, left, right in re.findall(r" ([a-z])=([a-z])\+(\w+)", text):
        term = int(right) if right.isdigit() else values[right]
        values[target] = (values[left] + term) % modulus
        results.append(f"{target}={values[target]}")
    return results, values


# -- steps and answers -----------------------------------------------------------------------------


@given(seed=seeds, count=operations)
def test_parity_steps_are_the_states_that_the_text_gives(seed, count):
    example = draw(make_task("parity"), seed, count)
    assert [step.text for step in example.steps] == replay_parity(example.prompt)


@given(seed=seeds, count=operations)
def test_the_parity_answer_is_the_state_that_the_text_ends_in(seed, count):
    example = draw(make_task("parity"), seed, count)
    assert example.answer == f"The final state of the coin is {replay_parity(example.prompt)[-1]}."


@given(seed=seeds, count=operations, options=vars_options)
def test_vars_steps_are_the_values_that_the_text_gives(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    results, _ = replay_vars(example.prompt, options["modulus"])
    assert [step.text for step in example.steps] == results


@given(seed=seeds, count=operations, options=vars_options)
def test_the_vars_answer_holds_the_final_values_in_order(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    _, values = replay_vars(example.prompt, options["modulus"])
    assert len(values) == options["variables"]
    final = " ".join(f"{name}={values[name]}" for name in sorted(values))
    assert example.answer == f"Final values: {final}"


@given(seed=seeds, count=operations)
def test_each_parity_step_can_be_inferred_from_the_text_before_its_marker(seed, count):
    example = draw(make_task("parity"), seed, count)
    known = [replay_parity(example.prompt[: step.position])[-1] for step in example.steps]
    assert known == [step.text for step in example.steps]
    assert all(example.prompt[step.position - 1] == "." for step in example.steps)


@given(seed=seeds, count=operations, options=vars_options)
def test_each_vars_step_can_be_inferred_from_the_text_before_its_marker(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    texts = [example.prompt[: step.position] for step in example.steps]
    before = [replay_vars(text, options["modulus"])[0] for text in texts]
    assert [results[-1] for results in before] == [step.text for step in example.steps]
    assert [len(results) for results in before] == list(range(1, count + 1))


@given(seed=seeds, count=operations, options=vars_options)
def test_vars_never_adds_a_variable_to_itself_nor_zero(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    for target, left, right in re.findall(r" ([a-z])=([a-z])\+(\w+)", example.prompt):
        assert left == target != right
        assert not right.isdigit() or 1 <= int(right) < options["modulus"]


@given(seed=seeds, count=operations, options=vars_options)
def test_vars_with_self_addition_is_replayed_alike(seed, count, options):
    example = draw(make_task("vars", **options, self_addition=True), seed, count)
    results, values = replay_vars(example.prompt, options["modulus"])
    assert [step.text for step in example.steps] == results
    final = " ".join(f"{name}={values[name]}" for name in sorted(values))
    assert example.answer == f"Final values: {final}"


def test_self_addition_is_one_term_among_the_variables():
    prompts = [draw(make_task("vars", self_addition=True), seed, 5).prompt for seed in range(1000)]
    found = [pair for prompt in prompts for pair in re.findall(r" ([a-z])=[a-z]\+([a-z])", prompt)]
    assert chi_square(found, 9) < 27


def test_the_data_key_of_vars_is_todays_unless_self_addition_is_drawn():
    key = "Vars(variables=3, modulus=10, name='vars', opening='Final values:')"
    assert make_task("vars").data_key == make_task("vars", max_ops=3).data_key == key
    assert make_task("vars", self_addition=True).data_key != key


@given(seed=seeds, count=operations)
def test_the_number_of_operations_is_what_was_asked(seed, count):
    parity, numbers = draw(make_task("parity"), seed, count), draw(make_task("vars"), seed, count)
    assert parity.prompt.count("the coin.") == count == parity.size
    assert numbers.prompt.count("+") == count == numbers.size
    # Parity's first step is the start.
    assert (len(parity.steps), len(numbers.steps)) == (count + 1, count)


@given(seed=seeds, count=operations, name=st.sampled_from(["parity", "vars"]))
def test_the_answers_values_are_those_of_the_steps_that_give_them(seed, count, name):
    example = draw(make_task(name), seed, count)
    assert example.answer.startswith(make_task(name).opening)
    for character, step in example.values:
        value = re.match(r"heads|tails|\d+", example.answer[character:])[0]
        assert example.steps[step].text in (value, f"{example.answer[character - 2]}={value}")
    if name == "parity":
        assert [step for _, step in example.values] == [count]
    else:
        changed = [step.text[0] for step in example.steps]
        assert [(example.answer[at - 2], step) for at, step in example.values] == [
            (variable, count - 1 - changed[::-1].index(variable))
            for variable in "abc"
            if variable in changed
        ]


# -- exact text ------------------------------------------------------------------------------------


def test_the_text_of_a_parity_example_is_the_papers():
    # A seed that happens to draw the example of appendix A.4.
    example = draw(make_task("parity"), 8, 3)
    assert render_marked(example.prompt, example.steps) == (
        "The coin starts at state heads.<T> Alice doesn't flip the coin.<T> Bob flips the coin.<T> "
        "Alice flips the coin.<T>"
    )
    assert [step.text for step in example.steps] == ["heads", "heads", "tails", "heads"]
    assert example.answer == "The final state of the coin is heads."


def test_the_text_of_a_vars_example_is_the_papers():
    example = draw(make_task("vars", variables=2), 145_874, 3)  # likewise
    assert render_marked(example.prompt, example.steps) == (
        "Track the variables values: a=1; b=2 a=a+b<T> b=b+a<T> b=b+3<T>"
    )
    assert [step.text for step in example.steps] == ["a=3", "b=5", "b=8"]
    assert example.answer == "Final values: a=3 b=8"


# -- streams ---------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(ENDLESS),
    seed=seeds,
    index=st.integers(0, 1000),
    other=st.integers(0, 9),
)
def test_an_example_is_a_function_of_its_arguments(name, seed, index, other):
    """Neither earlier draws nor the state of the global generator matter."""
    first = make_task(name).drawn("train", index, seed, (1, 30))
    random.seed(other)
    make_task(name).drawn("train", index + 1, seed, (1, 30))
    assert make_task(name).drawn("train", index, seed, (1, 30)) == first


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("change", [{"seed": 1}, {"word": "eval"}, {"index": 200}])
def test_seeds_splits_and_indices_give_other_examples(name, change):
    def stream(seed=0, word="train", index=0):
        task = make_task(name)
        return {task.drawn(word, index + i, seed, (30, 30)).prompt for i in range(200)}

    assert len(stream()) == 200
    assert not stream() & stream(**change)


@given(
    name=st.sampled_from(ENDLESS),
    seed=seeds,
    index=st.integers(0, 1000),
    least=st.integers(0, 10),
    most=st.integers(10, 20),
    longest=st.integers(0, 40),
)
def test_the_splits_are_streams_of_the_lengths_that_the_options_say(
    name, seed, index, least, most, longest
):
    task = make_task(name, min_ops=least, max_ops=most, eval_max_ops=longest)
    split, known, longer = (task.example(split, index, seed) for split in ("train", "id", "ood"))
    assert split == task.drawn("train", index, seed, (least, most))
    assert known == task.drawn("eval", index, seed, (least, most))
    assert longer == task.drawn("eval", index, seed, (most, max(longest, most)))
    assert all(task.size(split) is None for split in task.splits)


@given(name=st.sampled_from(ENDLESS), seed=seeds, index=st.integers(0, 1000))
def test_lengths_are_all_that_the_options_of_length_change(name, seed, index):
    """So runs that were trained on other lengths are evaluated on the same longer examples."""
    short, long = make_task(name), make_task(name, min_ops=3, max_ops=40, eval_max_ops=50)
    assert short.drawn("eval", index, seed, (7, 9)) == long.drawn("eval", index, seed, (7, 9))


def chi_square(values: list, kinds: int) -> float:
    """Pearson's statistic of `values` against equal shares; about `kinds` - 1 where uniform."""
    counts, expected = Counter(values), len(values) / kinds
    assert len(counts) == kinds
    return sum((n - expected) ** 2 / expected for n in counts.values())


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("least, most", [(1, 10), (7, 26)])
def test_lengths_are_uniform_over_the_range_with_both_ends(name, least, most):
    task = make_task(name)
    sizes = [task.drawn("train", i, 0, (least, most)).size for i in range(2000)]
    assert (min(sizes), max(sizes)) == (least, most)
    degrees_of_freedom = most - least
    assert chi_square(sizes, degrees_of_freedom + 1) < 3 * degrees_of_freedom


def test_parity_starts_and_flips_evenly():
    examples = [draw(make_task("parity"), seed, 5) for seed in range(1000)]
    assert chi_square([example.steps[0].text for example in examples], 2) < 10
    actions = [word for e in examples for word in re.findall(r"doesn't|flips", e.prompt)]
    assert chi_square(actions, 2) < 10


def test_people_take_turns_in_parity():
    prompt = draw(make_task("parity"), 3, 4).prompt
    assert re.findall("Alice|Bob", prompt) == ["Alice", "Bob", "Alice", "Bob"]


def test_vars_chooses_targets_terms_and_constants_evenly():
    prompts = [draw(make_task("vars"), seed, 5).prompt for seed in range(1000)]
    found = [pair for prompt in prompts for pair in re.findall(r" ([a-z])=[a-z]\+(\w)", prompt)]
    assert chi_square([target for target, _ in found], 3) < 14
    assert chi_square([term.isdigit() for _, term in found], 2) < 10
    assert chi_square([int(term) for _, term in found if term.isdigit()], 9) < 27
    assert chi_square([(target, term) for target, term in found if term.isalpha()], 6) < 21


# -- names, options, answers -----------------------------------------------------------------------


def test_an_unknown_task_is_an_error_that_lists_the_tasks():
    with pytest.raises(ValueError, match="'pairty' is not known.*parity, vars"):
        make_task("pairty")


def test_an_option_that_a_task_lacks_is_an_error_that_names_both():
    with pytest.raises(ValueError, match="--variables: the task parity"):
        make_task("parity", variables=3)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_option_that_no_task_has_is_told_as_the_flag_that_it_would_be(name):
    with pytest.raises(ValueError, match=f"^--no-such-thing: the task {name} has no such option"):
        make_task(name, max_ops=7, no_such_thing=3)


def test_a_task_of_ones_own_must_be_a_dataclass_for_its_data_are_seeded_with_its_repr(monkeypatch):
    class Plain(Task):
        name, splits = "plain", ("train", "test")

        def example(self, split, index, seed):
            return Example("a" * index, (), "is a", size=index)

    monkeypatch.setitem(TASKS, "plain", Plain)
    with pytest.raises(ValueError, match=r"Plain is no dataclass.*frozen=True"):
        make_task("plain")
    monkeypatch.setitem(TASKS, "plain", dataclass(frozen=True)(Plain))
    assert make_task("plain").example("train", 7, 0).size == 7

    class Derived(Parity):  # the parent's fields would pass for its own
        coins: int = 2

    monkeypatch.setitem(TASKS, "derived", Derived)
    with pytest.raises(ValueError, match=r"Derived is no dataclass.*frozen=True"):
        make_task("derived")


def test_a_copy_that_kept_the_name_does_not_replace_the_other():
    class Mine(Parity):
        pass

    with pytest.raises(TypeError, match="^Parity and Mine are both named 'parity'; give"):
        table(Parity, Mine)


def test_a_state_tracking_task_of_ones_own_only_draws(monkeypatch):
    @dataclass(frozen=True)
    class Repeat(StateTracking):
        name, opening = "repeat", "is"

        def draw(self, rng, operations):
            return Example("a" * operations, (), "is a")

    monkeypatch.setitem(TASKS, "repeat", Repeat)
    task = make_task("repeat", max_ops=3)
    assert draw(task, 0, 7).size == 7  # without a word of its own about it
    assert {task.example("train", i, 0).size for i in range(50)} == {1, 2, 3}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"variables": 0}, "--variables 0: must be at least 1"),
        ({"variables": 27}, "--variables 27: must be at most 26"),
        ({"modulus": 1}, "--modulus 1: must be at least 2"),
    ],
)
def test_vars_refuses_impossible_sizes_and_names_the_limits(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("vars", **options)


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_ops": 0}, "--max-ops 0: must be at least 1"),
        ({"min_ops": -1}, "--min-ops -1: must be at least 0"),
        ({"eval_max_ops": -1}, "--eval-max-ops -1: must be at least 0"),
        ({"min_ops": 5, "max_ops": 4}, "--min-ops 5 is more than --max-ops 4; exchange them"),
    ],
)
def test_impossible_lengths_are_refused_with_their_limits(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


@pytest.mark.parametrize(
    "text, answer",
    [
        (" The final state of the coin is heads.", "The final state of the coin is heads."),
        (
            " heads tails The final state of the coin is tails.",
            "The final state of the coin is tails.",
        ),
        (
            "The final state of the coin is a The final state of the coin is b",
            "The final state of the coin is b",
        ),
        (" heads. ", "heads."),
        ("", ""),
    ],
)
def test_the_answer_begins_at_the_last_opening_words(text, answer):
    assert extract_answer(text, make_task("parity").opening) == answer


@given(seed=seeds, count=operations, name=st.sampled_from(ENDLESS))
def test_the_answer_is_found_again_behind_a_chain_of_thought(seed, count, name):
    task = make_task(name)
    example = draw(task, seed, count)
    chain = "".join(f" {step.text}" for step in example.steps)
    assert extract_answer(f"{chain} {example.answer}", task.opening) == example.answer


@given(name=st.sampled_from(ENDLESS), seed=seeds, index=st.integers(0, 1000))
def test_gold_answers_score_right_alone_and_behind_a_chain_and_others_do_not(name, seed, index):
    task = make_task(name)
    for split in task.splits:
        example = task.example(split, index, seed)
        score = task.score(" " + example.answer, example)
        assert score == {"answer": example.answer, "right": True}
        chain = "".join(f" {step.text}" for step in example.steps)
        assert task.score(f"{chain} {example.answer}", example)["right"]
        for wrong in ("", example.answer[:-1], example.answer + "1"):
            assert not task.score(" " + wrong, example)["right"]
        other = task.example(split, index + 1, seed)
        right = task.score(" " + other.answer, example)["right"]
        assert right == (other.answer == example.answer)


# -- the tiny vocabulary ---------------------------------------------------------------------------


@given(
    seed=seeds,
    count=operations,
    variables=st.integers(1, len(LETTERS)),
    modulus=st.integers(2, 120),
)
def test_the_tiny_vocabulary_holds_every_word_of_the_tasks(seed, count, variables, modulus):
    tokenizer = tiny_tokenizer()
    for task in (make_task("parity"), make_task("vars", variables=variables, modulus=modulus)):
        example = draw(task, seed, count)
        steps = [f" {step.text}" for step in example.steps]
        for text in (example.prompt, f" {example.answer}", *steps):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_more_variables_than_the_tiny_vocabulary_has_letters_are_an_error_that_names_one():
    example = draw(make_task("vars", variables=len(LETTERS) + 1), 0, 1)
    with pytest.raises(ValueError, match="' i'"):
        tiny_tokenizer().encode(example.prompt)


def test_cot_tells_a_task_of_ones_own_where_its_opening_goes():
    class Wordless(Parity):
        opening = ""

    with pytest.raises(ValueError, match="a task of one's own has it as `opening`"):
        CoT().check(Wordless())
