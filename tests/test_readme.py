"""The README tells the truth: its commands parse, its names exist, its functions run."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch

import minits
from minits import GenerationResult, ThinkingStates, load, supervision, teacher_forcing, thinking
from minits.checkpoint.tiny import ASSETS
from minits.cli.main import make_parser
from minits.prefill import DRAFTS, prefill_sequential, prefill_speculative
from minits.supervision import MARKER
from minits.tasks import TASKS, Task, make_task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "minits" / "lab" / "RESULTS.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(word: str) -> str:
    """The one Python block that holds `word`."""
    (found,) = [text for text in PYTHON if word in text]
    return found


@pytest.mark.parametrize("text", [README, RESULTS], ids=["README", "RESULTS"])
def test_every_command_parses(text):
    commands = [
        command.split("  #")[0]
        for command in re.findall(r"python run\.py ([^`\n]*)", text)
        if not re.search(r"…|COMMAND|\bN\b", command)
    ]
    assert len(commands) >= 1
    for command in commands:
        if "largest" in command:
            continue  # a task that the reader adds
        make_parser().parse_args(shlex.split(command))


def test_it_is_short():
    assert README.count("\n") < 220


def test_read_and_read_fast_read_as_the_real_ones_do():
    given: dict = {"torch": torch}
    exec(block("def read("), given)
    exec(block("def read_fast("), given)
    model, tokenizer = load(ASSETS / "parity")
    rounds = set()
    with torch.no_grad():
        for number in range(1, 13):
            task = make_task("parity", min_ops=number, max_ops=number)
            ids = tokenizer.encode(task.example("id", number, 5).prompt)
            ids = ids[: len(ids) - number % 3]
            for name, prefill in (("read", prefill_sequential), ("read_fast", prefill_speculative)):
                thoughts, out = given[name](model, ids)
                reading = prefill(model, [ids], len(ids))
                assert thoughts == [thought.ids for thought in reading.thoughts[0]]
                torch.testing.assert_close(out, reading.out[0])
            rounds |= set(reading.rounds)
    assert len(rounds) > 3


def test_the_lines_from_python_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(block("from minits import"), {})
    assert "The final state of the coin is tails." in capsys.readouterr().out


class Recording(minits.Intervention):
    """Keeps the state after each chunk; the thought after the first one is told."""

    def __init__(self, told: list[int]) -> None:
        self.told, self.states_of = told, {}

    def thought(self, row: int, chunk: int) -> list[int] | None:
        return self.told if chunk == 0 else None

    def states(self, places, states):
        self.states_of |= zip(places, states)
        return states


@torch.no_grad()
def test_the_lines_of_help_minits_give_what_generation_computed(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = re.match(r"(?:    .*\n)+", minits.__doc__.partition("any lengths.\n\n")[2])[0]
    model, tokenizer = load(ASSETS / "parity")
    texts = [make_task("parity", max_ops=6).example("id", i, 3).prompt for i in range(4)]
    hook = Recording([*tokenizer.encode(" tails"), model.config.thought_end])
    given = {name: getattr(teacher_forcing, name) for name in dir(teacher_forcing)}
    given |= {name: getattr(supervision, name) for name in dir(supervision)}
    given |= {"load": load, "prompts": texts}
    given["generate"] = lambda *arguments: minits.generate(*arguments, hook=hook)
    exec(textwrap.dedent(lines), given)
    S, H, c = given["S"], given["H"], model.config.chunk_size
    for row, (ids, result) in enumerate(zip(given["asked"], given["found"])):
        assert result.thought_ids[0] == hook.told
        # Each answer token by itself: the vector after the prompt and the tokens before it.
        whole, read = ids + result.ids, len(ids + result.ids) - 1
        prompts = [whole[:n] for n in range(len(ids), read + 1)]
        alone = {"hook": Recording(hook.told)}
        readings = [prefill_sequential(model, [ids], len(ids), **alone) for ids in prompts]
        logs = [model.backbone.lm_head(each.out[0]).log_softmax(-1) for each in readings]
        torch.testing.assert_close(given["logs"][row, len(ids) - 1 : read], torch.stack(logs))
        assert given["batch"].labels[row, len(ids) - 1 : read].tolist() == result.ids
        start = (read - 1) // c * c
        torch.testing.assert_close(H[row, start:read], readings[-1].open_h[0, : read - start])
        for k in range(1, -(-read // c)):
            torch.testing.assert_close(S[row, k * c : (k + 1) * c], hook.states_of[row, k - 1])


def test_the_task_of_ones_own_is_one():
    given: dict = {"__name__": "largest"}
    exec(block("class Largest"), given)
    task = given["Largest"]()
    assert isinstance(task, tuple(TASKS.values())[0].__mro__[1])
    example = task.example("train", 3, 0)
    digits = [int(digit) for digit in re.findall(r"\d", example.prompt)]
    assert [step.text for step in example.steps] == [
        f"a={max(digits[: i + 1])}" for i in range(len(digits))
    ]
    assert task.score(" " + example.answer, example)["right"]
    assert set(task.recipes) == set(Task.recipes)


def test_every_name_of_the_symbol_table_exists():
    table = README[README.index("| paper | code |") : README.index("## Results")]
    names = [
        name
        for line in table.splitlines()[2:]
        if line.startswith("|")
        for name in re.findall(r"`([\w.]+)`", line.split("|")[2])
    ]
    holders = {
        "ThinkingStates": ThinkingStates,
        "Thought": thinking.Thought,
        "GenerationResult": GenerationResult,
        "teacher_forcing": teacher_forcing,
        "supervision": {"MARKER": MARKER},
    }
    own = {
        *thinking.ThinkingConfig.__annotations__,
        *dir(ThinkingStates),
        *dict(load(ASSETS / "parity")[0].named_children()),
    }
    assert len(names) >= 10
    for name in names:
        *holder, last = name.split(".")
        if not holder or holder == ["ThinkingStates"]:
            assert last in own, name
        else:
            found = holders[holder[0]]
            fields = found if isinstance(found, dict) else dir(found)
            assert last in fields or last in getattr(found, "__annotations__", ()), name


def test_every_file_and_folder_of_the_package_is_on_the_map():
    table = README[README.index("## The map") : README.index("| paper | code |")]
    for path in (ROOT / "minits").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            assert path.name in table, path.name
        elif path.is_dir() and path.name != "__pycache__":
            assert f"{path.name}/`" in table, path.name


def test_the_drafts_named_are_the_drafts_there_are():
    for draft in DRAFTS:
        assert f'"{draft}"' in README, draft
