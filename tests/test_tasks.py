"""Tasks: their steps are what an independent reading of the prompt's text gives, and their streams are reproducible."""
import random
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minits.supervision import Example, render_marked
from minits.tasks import TASKS, draw_example, extract_answer, make_task
from minits.checkpoint.tiny import LETTERS, tiny_tokenizer

seeds = st.integers(0, 2**32)
operations = st.integers(0, 40)
vars_options = st.fixed_dictionaries({"variables": st.integers(1, 26), "modulus": st.integers(2, 120)})


def draw(task, seed: int, count: int):
    """An example with exactly `count` operations."""
    return draw_example(task, seed=seed, split="train", index=0, operations=(count, count))


# -- independent interpreters: they see the prompt's text and nothing else ---------------------------------------------


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
        values[target] = (values[left] + (int(right) if right.isdigit() else values[right])) % modulus
        results.append(f"{target}={values[target]}")
    return results, values


# -- steps and answers -------------------------------------------------------------------------------------------------


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
    assert [step.text for step in example.steps] == replay_vars(example.prompt, options["modulus"])[0]


@given(seed=seeds, count=operations, options=vars_options)
def test_the_vars_answer_holds_the_final_values_in_order(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    _, values = replay_vars(example.prompt, options["modulus"])
    assert len(values) == options["variables"]
    assert example.answer == "Final values: " + " ".join(f"{name}={values[name]}" for name in sorted(values))


@given(seed=seeds, count=operations)
def test_each_parity_step_can_be_inferred_from_the_text_before_its_marker(seed, count):
    example = draw(make_task("parity"), seed, count)
    assert [replay_parity(example.prompt[:step.position])[-1] for step in example.steps] == \
        [step.text for step in example.steps]
    assert all(example.prompt[step.position - 1] == "." for step in example.steps)


@given(seed=seeds, count=operations, options=vars_options)
def test_each_vars_step_can_be_inferred_from_the_text_before_its_marker(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    before = [replay_vars(example.prompt[:step.position], options["modulus"])[0] for step in example.steps]
    assert [results[-1] for results in before] == [step.text for step in example.steps]
    assert [len(results) for results in before] == list(range(1, count + 1))


@given(seed=seeds, count=operations, options=vars_options)
def test_vars_never_adds_a_variable_to_itself_nor_zero(seed, count, options):
    example = draw(make_task("vars", **options), seed, count)
    for target, left, right in re.findall(r" ([a-z])=([a-z])\+(\w+)", example.prompt):
        assert left == target != right
        assert not right.isdigit() or 1 <= int(right) < options["modulus"]


@given(seed=seeds, count=operations)
def test_the_number_of_operations_is_what_was_asked(seed, count):
    parity, numbers = draw(make_task("parity"), seed, count), draw(make_task("vars"), seed, count)
    assert parity.prompt.count("the coin.") == count == parity.size
    assert numbers.prompt.count("+") == count == numbers.size
    assert (len(parity.steps), len(numbers.steps)) == (count + 1, count)  # parity's first step is the start


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
            (variable, count - 1 - changed[::-1].index(variable)) for variable in "abc" if variable in changed]


# -- exact text --------------------------------------------------------------------------------------------------------


def test_the_text_of_a_parity_example_is_the_papers():
    example = draw(make_task("parity"), 8, 3)  # a seed that happens to draw the example of appendix A.4
    assert render_marked(example.prompt, example.steps) == (
        "The coin starts at state heads.<T> Alice doesn't flip the coin.<T> Bob flips the coin.<T> "
        "Alice flips the coin.<T>")
    assert [step.text for step in example.steps] == ["heads", "heads", "tails", "heads"]
    assert example.answer == "The final state of the coin is heads."


def test_the_text_of_a_vars_example_is_the_papers():
    example = draw(make_task("vars", variables=2), 145_874, 3)  # likewise
    assert render_marked(example.prompt, example.steps) == (
        "Track the variables values: a=1; b=2 a=a+b<T> b=b+a<T> b=b+3<T>")
    assert [step.text for step in example.steps] == ["a=3", "b=5", "b=8"]
    assert example.answer == "Final values: a=3 b=8"


# -- streams -----------------------------------------------------------------------------------------------------------


@given(name=st.sampled_from(sorted(TASKS)), seed=seeds, index=st.integers(0, 1000), other=st.integers(0, 9))
def test_an_example_is_a_function_of_its_arguments(name, seed, index, other):
    """Neither earlier draws nor the state of the global generator matter."""
    arguments = dict(seed=seed, split="train", index=index, operations=(1, 30))
    first = draw_example(make_task(name), **arguments)
    random.seed(other)
    draw_example(make_task(name), **arguments | {"index": index + 1})
    assert draw_example(make_task(name), **arguments) == first


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("change", [{"seed": 1}, {"split": "eval"}, {"index": 200}])
def test_seeds_splits_and_indices_give_other_examples(name, change):
    def stream(seed=0, split="train", index=0):
        return {draw_example(make_task(name), seed=seed, split=split, index=index + i, operations=(30, 30)).prompt
                for i in range(200)}
    assert len(stream()) == 200
    assert not stream() & stream(**change)


def chi_square(values: list, kinds: int) -> float:
    """Pearson's statistic of `values` against equal shares; about `kinds` - 1 where they are uniform."""
    counts, expected = Counter(values), len(values) / kinds
    assert len(counts) == kinds
    return sum((n - expected) ** 2 / expected for n in counts.values())


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("least, most", [(1, 10), (7, 26)])
def test_lengths_are_uniform_over_the_range_with_both_ends(name, least, most):
    sizes = [draw_example(make_task(name), seed=0, split="train", index=i, operations=(least, most)).size
             for i in range(2000)]
    assert (min(sizes), max(sizes)) == (least, most)
    assert chi_square(sizes, most - least + 1) < 3 * (most - least)  # degrees of freedom: most - least


def test_parity_starts_and_flips_evenly():
    examples = [draw(make_task("parity"), seed, 5) for seed in range(1000)]
    assert chi_square([example.steps[0].text for example in examples], 2) < 10
    assert chi_square([word for e in examples for word in re.findall(r"doesn't|flips", e.prompt)], 2) < 10


def test_people_take_turns_in_parity():
    prompt = draw(make_task("parity"), 3, 4).prompt
    assert re.findall("Alice|Bob", prompt) == ["Alice", "Bob", "Alice", "Bob"]


def test_vars_chooses_targets_terms_and_constants_evenly():
    prompts = [draw(make_task("vars"), seed, 5).prompt for seed in range(1000)]
    found = [match for prompt in prompts for match in re.findall(r" ([a-z])=[a-z]\+(\w)", prompt)]
    assert chi_square([target for target, _ in found], 3) < 14
    assert chi_square([term.isdigit() for _, term in found], 2) < 10
    assert chi_square([int(term) for _, term in found if term.isdigit()], 9) < 27
    assert chi_square([(target, term) for target, term in found if term.isalpha()], 6) < 21


# -- names, options, answers -------------------------------------------------------------------------------------------


def test_an_unknown_task_is_an_error_that_lists_the_tasks():
    with pytest.raises(ValueError, match="'pairty' is not known.*parity, vars"):
        make_task("pairty")


def test_an_option_that_a_task_lacks_is_an_error_that_names_both():
    with pytest.raises(ValueError, match="--variables: the task parity"):
        make_task("parity", variables=3)


def test_a_task_of_ones_own_must_be_a_dataclass_for_its_data_are_seeded_with_its_repr(monkeypatch):
    class Plain:
        name, opening = "plain", "is"

        def draw(self, rng, operations):
            return Example("a" * operations, (), "is a")
    monkeypatch.setitem(TASKS, "plain", Plain)
    with pytest.raises(ValueError, match="Plain is no dataclass.*frozen=True"):
        make_task("plain")
    monkeypatch.setitem(TASKS, "plain", dataclass(frozen=True)(Plain))
    assert draw(make_task("plain"), 0, 7).size == 7  # without a word of its own about it


@pytest.mark.parametrize("options", [{"variables": 0}, {"variables": 27}, {"modulus": 1}])
def test_vars_refuses_impossible_sizes_and_names_the_limits(options):
    with pytest.raises(ValueError, match="1 … 26 variables.*modulus of at least 2"):
        make_task("vars", **options)


@pytest.mark.parametrize("text, answer", [
    (" The final state of the coin is heads.", "The final state of the coin is heads."),
    (" heads tails The final state of the coin is tails.", "The final state of the coin is tails."),
    ("The final state of the coin is a The final state of the coin is b", "The final state of the coin is b"),
    (" heads. ", "heads."), ("", "")])
def test_the_answer_begins_at_the_last_opening_words(text, answer):
    assert extract_answer(text, make_task("parity").opening) == answer


@given(seed=seeds, count=operations, name=st.sampled_from(sorted(TASKS)))
def test_the_answer_is_found_again_behind_a_chain_of_thought(seed, count, name):
    task = make_task(name)
    example = draw(task, seed, count)
    chain = "".join(f" {step.text}" for step in example.steps)
    assert extract_answer(f"{chain} {example.answer}", task.opening) == example.answer


# -- the tiny vocabulary -----------------------------------------------------------------------------------------------


@given(seed=seeds, count=operations, variables=st.integers(1, len(LETTERS)), modulus=st.integers(2, 120))
def test_the_tiny_vocabulary_holds_every_word_of_the_tasks(seed, count, variables, modulus):
    tokenizer = tiny_tokenizer()
    for task in (make_task("parity"), make_task("vars", variables=variables, modulus=modulus)):
        example = draw(task, seed, count)
        for text in (example.prompt, f" {example.answer}", *(f" {step.text}" for step in example.steps)):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_more_variables_than_the_tiny_vocabulary_has_letters_are_an_error_that_names_one():
    example = draw(make_task("vars", variables=len(LETTERS) + 1), 0, 1)
    with pytest.raises(ValueError, match="' i'"):
        tiny_tokenizer().encode(example.prompt)
