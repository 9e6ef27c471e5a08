"""What all commands share: their help, their last line of JSON, their way out of an error."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Optional

import pytest
import run
from cli_helpers import INFER, PROMPT, ROOT, call

from minits.cli import bench, data, eval, infer, report, train
from minits.cli.main import COMMANDS, make_parser, one_line, with_flags
from minits.cli.models import trained_method, trained_task
from minits.generation import GenerationConfig
from minits.methods import METHODS, make_method
from minits.methods.method import Method
from minits.methods.plain import NoCoT
from minits.settings import setting
from minits.tasks import TASKS
from minits.tasks.parity import Parity
from minits.tasks.task import Task
from minits.training.recipe import TrainSettings

# The dataclasses whose fields are the flags of a command.
SETTINGS = {
    "train": (TrainSettings, train.TrainFlags, *TASKS.values(), *METHODS.values()),
    "infer": (infer.InferFlags, GenerationConfig),
    "eval": (eval.EvalFlags, GenerationConfig, *TASKS.values()),
    "bench": (bench.BenchFlags,),
    "report": (report.ReportFlags,),
    "data": (data.DataFlags, *TASKS.values()),
}


def test_every_command_has_its_settings():
    assert list(SETTINGS) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_exits_0_and_explains_every_flag(command, empty):
    status, out, err = call(command, "--help")
    assert status == 0 and err == "" and out.startswith(f"usage: run.py {command}")
    shown = "".join(out.split())  # argparse wraps lines, at hyphens too
    for field in (field for kind in SETTINGS[command] for field in fields(kind)):
        if "text" not in field.metadata or (command == "eval" and field.name in eval.OWN):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.metadata.get("positional"):
            flag = field.name
        assert flag.lower() in shown.lower()
        assert "".join(field.metadata["text"].split()) in shown, field.name
        assert [choice for choice in field.metadata.get("choices", ()) if choice not in shown] == []


def test_help_without_a_command_lists_the_commands(empty):
    status, out, _ = call("--help")
    assert status == 0 and all(f"  {name} " in out for name in COMMANDS)


def test_help_shows_no_name_of_older_versions(empty):
    out = call("infer", "--help")[1]
    assert "--lookahead" in out and "--window" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--traceback", "infer", PROMPT, "--run", "nope"],
        ["infer", PROMPT, "--run", "nope", "--traceback"],
    ],
)
def test_traceback_flag_lets_the_error_through_before_or_after_the_command(arguments, inside):
    with pytest.raises(FileNotFoundError, match="--run nope"):
        call(*arguments)


def test_a_real_process_prints_one_line_and_no_traceback(inside):
    command = [sys.executable, ROOT / "run.py", "train", "pairty"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    tasks = ", ".join(TASKS)
    assert done.stderr == f"run.py train: task 'pairty' is not known; the tasks are: {tasks}.\n"


def test_a_reader_that_leaves_before_the_json_line_is_no_error(empty):
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("{"):
                raise BrokenPipeError
            return super().write(text)

    with contextlib.redirect_stdout(Pipe()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert run.main(["report", "--json"]) == 141
    assert "| run | paper |" in out.getvalue()


def test_ctrl_c_exits_130_without_a_traceback(inside, monkeypatch):
    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(infer, "decode", press)
    status, _, err = call(*INFER, PROMPT)
    assert status == 130 and err.splitlines()[-1] == "run.py infer: interrupted"


@pytest.mark.parametrize(
    "error", [MemoryError("8 GB"), RuntimeError("can't allocate memory: 8 bytes")]
)
def test_a_lack_of_memory_is_told_in_one_line(error, inside, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(infer, "decode", fail)
    status, _, err = call(*INFER, PROMPT)
    assert status == 2 and f"no memory left ({error}). Shorter prompts" in err.splitlines()[-1]


def test_a_reader_that_takes_one_line_is_no_error(empty):
    command = [sys.executable, ROOT / "run.py", "report"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_character_that_the_terminal_lacks_is_shown_as_another(monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams):
        monkeypatch.setattr(sys, name, stream)
    assert run.main(["infer", "--run", "./Zürich"]) == 2
    assert run.main(["report"]) == 0
    told = [stream.buffer.getvalue().decode("ascii") for stream in streams if not stream.flush()]
    assert "| run | paper |" in told[0] and "?" in told[0]
    assert "--run ./Z?rich: no such folder" in told[1]


def test_notes_stay_out_of_stdout_where_stderr_is_closed(inside, monkeypatch):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        monkeypatch.setattr(sys, "stderr", None)
        assert run.main([*INFER, PROMPT, "--json"]) == 0
    assert out.getvalue().startswith("{") and out.getvalue().count("\n") == 1


def test_ctrl_c_while_the_flags_are_made_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("minits.cli.main.make_parser", interrupted)
    status, _, err = call("infer")
    assert (status, err) == (130, "run.py (starting): interrupted\n")


MESSAGES = {
    "lower max_new_tokens to 3": "lower --max-new-tokens to 3",
    "max_thought_tokens = 4. Raise it": "--max-thought-tokens = 4. Raise it",
    "raise max_thought_tokens.": "raise --max-thought-tokens.",
    # No flags: a setting of models, parts of paths, keys of files of ours.
    "has 64 (max_position_embeddings)": "has 64 (max_position_embeddings)",
    "/data/chunk_size/x": "/data/chunk_size/x",
    "my.chunk_size.txt": "my.chunk_size.txt",
    "x/thinking.json: chunk_size is 0": "x/thinking.json: chunk_size is 0",
    "of\n  several\tlines": "of several lines",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_spell_settings_as_flags(message):
    assert with_flags(message, make_parser().parse_args(["infer"]).parser) == MESSAGES[message]


def test_a_flag_that_a_command_lacks_is_not_named():
    parser = make_parser().parse_args(["eval"]).parser
    assert with_flags("lower max_new_tokens", parser) == "lower max_new_tokens"


def test_a_long_message_keeps_its_two_ends():
    assert one_line("a" * 1000) == "a" * 1000
    assert one_line("a" * 900 + "b" * 900) == "a" * 500 + " … 800 characters … " + "b" * 500


def test_a_task_whose_answers_lack_its_opening_trains_nobody(monkeypatch, tmp_path):
    @dataclass(frozen=True)
    class Bare(Parity):
        name, opening = "bare", "Answer:"

        def draw(self, rng, operations):
            return replace(super().draw(rng, operations), answer="heads.")

    monkeypatch.setitem(TASKS, "bare", Bare)
    status, _, err = call("train", "bare", "--steps", 1, "--out", tmp_path / "run")
    assert status == 2 and "the answer 'heads.' does not begin with the task's opening" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "data", "eval"])
def test_a_task_that_is_no_dataclass_yet_is_told_in_one_line_and_stops_no_other(
    command, monkeypatch
):
    class Plain(Task):
        name, splits = "plain", ("train", "test")

    monkeypatch.setitem(TASKS, "plain", Plain)
    status, _, err = call(command, "plain")
    assert status == 2 and err.startswith(f"run.py {command}: task plain: Plain is no dataclass")
    assert len(err.splitlines()) == 1
    assert call("data", "parity")[0] == 0
    with pytest.raises(ValueError, match="Plain is no dataclass"):  # trained before, alone
        trained_task(Path("checkpoint"), {"task": "plain"})


def test_a_method_that_is_no_dataclass_yet_stops_no_other(monkeypatch):
    class Plain(Method):
        name, title, thinks = "plain", "Plain", False

    monkeypatch.setitem(METHODS, "plain", Plain)
    assert train.chosen({"task": "parity"}).method == make_method("thinking")
    with pytest.raises(ValueError, match="Plain is no dataclass"):  # trained before, alone
        trained_method(Path("checkpoint"), {"method": "plain"})


def test_a_method_that_is_no_dataclass_is_refused_for_its_options_would_all_be_true(monkeypatch):
    class Mine(NoCoT):
        shuffles: bool = setting(False, "an option, but not before the class is a dataclass")

    monkeypatch.setitem(METHODS, "no-cot", Mine)
    status, _, err = call("train", "parity", "--method", "no-cot")
    assert status == 2 and "method no-cot: Mine is no dataclass; put @dataclass(frozen=True)" in err
    with pytest.raises(ValueError, match="Mine is no dataclass"):
        make_method("no-cot")


def test_options_that_share_a_name_may_have_other_defaults_and_those_without_a_flag_any_type(
    monkeypatch,
):
    @dataclass(frozen=True)
    class Mine(Parity):
        name: ClassVar = "mine"
        modulus: int | None = setting(None, "for vars always a number")
        table: dict | None = None  # no setting, so no flag

    @dataclass(frozen=True)
    class Other(Parity):
        name: ClassVar = "other"
        table: tuple = ()

    monkeypatch.setitem(TASKS, "mine", Mine)
    monkeypatch.setitem(TASKS, "other", Other)
    flags = make_parser().parse_args(["train", "mine", "--modulus", "7"])
    assert flags.modulus == 7


@pytest.mark.parametrize(
    "options, what",
    [
        ({"steps": (int, setting(1, "of the training, too"))}, "argument --steps: conflicting"),
        ({"modulus": (str, setting("a", "a number for vars"))}, "its option modulus takes other"),
    ],
)
def test_an_option_of_ones_own_that_is_called_as_another_flag_is_told(options, what, monkeypatch):
    members = {name: value for name, (_, value) in options.items()}
    members["__annotations__"] = {name: kind for name, (kind, _) in options.items()}
    mine = dataclass(frozen=True)(type("Mine", (Parity,), members | {"name": "mine"}))
    monkeypatch.setitem(TASKS, "mine", mine)
    with pytest.raises(TypeError, match=f"^task mine: {what}.*rename"):
        make_parser()


@pytest.mark.parametrize(
    "hint, default",
    [
        (bool, setting(True, "given or not, it is true")),
        (tuple[int, ...], setting((1, 2), "a flag gives an int")),
        (Literal["a", "b"], setting("a", "choices name them")),
        (int, setting(text="must be given")),
    ],
)
def test_an_option_of_ones_own_that_no_flag_can_set_is_told(hint, default, monkeypatch):
    members = {"name": "mine", "__annotations__": {"own": hint}, "own": default}
    mine = dataclass(frozen=True, kw_only=True)(type("Mine", (Parity,), members))
    monkeypatch.setitem(TASKS, "mine", mine)
    with pytest.raises(TypeError, match="^task mine: no flag can set its option own, .*Change it"):
        make_parser()


def test_options_of_all_types_that_a_flag_can_set_are_taken(monkeypatch):
    @dataclass(frozen=True)
    class Mine(Parity):
        name: ClassVar = "mine"
        one: Optional[int] = setting(None, "as older code writes it")
        two: float | None = setting(1, "an int as a default")
        three: str = setting("", "a text", empty=True)

    monkeypatch.setitem(TASKS, "mine", Mine)
    flags = make_parser().parse_args("train mine --one 1 --two 2.5 --three x".split())
    assert (flags.one, flags.two, flags.three) == (1, 2.5, "x")
