"""What a preset needs of its user: weights and files that are named, and the right ones."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from hashlib import sha256

import pytest
import run

from minits.checkpoint.tiny import ASSETS
from minits.cli.train import chosen, with_preset
from minits.lab import paper
from minits.lab.presets import CHUNKS, LAYERS, PRESETS, check_contents, find_preset
from minits.methods import METHODS
from minits.methods.curriculum import Curriculum
from minits.methods.method import Stage
from minits.tasks import make_task

NAME = "paper/gsm-1.5b"
PROBLEM = "Tom has 3 pens and buys 2 more. How many has he?||<<3+2=5>> #### 5"
OTHER = "Ann has 9 hats and loses 2. How many has she?||<<9-2=7>> #### 7"

CONFIG = paper.QWEN_1_5B | {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@pytest.fixture
def given(tmp_path):
    """Flags of a training by the paper's preset on a few rows and a model of the right shape."""
    for split, problem in {"train": PROBLEM, "valid": OTHER, "test": OTHER}.items():
        (tmp_path / f"{split}.txt").write_text(problem + "\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    files = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid", "test")}
    return {"model": str(model)} | files


def flags(given: dict[str, str]) -> list[str]:
    return [part for name, value in given.items() for part in (f"--{name}", value)]


def test_the_papers_recipe_is_the_papers():
    settings = PRESETS[NAME].settings
    assert (settings["chunk_size"], settings["suffix"]) == (8, "")
    assert "one_per_chunk" not in settings and "extract_after" not in settings
    assert PRESETS[NAME].files["train"]["rows"] == 385_620
    assert (PRESETS[NAME].paper, PRESETS[NAME].paper_speed) == (42.22, 2.66)


@pytest.mark.parametrize("name", ["table1/parity-10-thinking", "beyond/vars-10-long-rows"])
def test_a_cell_of_table_1_is_one_of_its_weights(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run.main(["train", "--preset", name, "--model", str(ASSETS / "parity")]) == 2
    assert "config.json: hidden_size 64, not 896" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_preset_lacks_is_said_at_once(capsys):
    assert run.main(["train", "--preset", NAME]) == 2
    error = capsys.readouterr().err
    assert "(Qwen2.5-1.5B base, hidden_size 1536" in error and "(GSM8K-Aug, " in error
    for word in ("--model", "--train FILE", "rows 385620, sha256 0a3909a9e7d8"):
        assert word in error
    assert "--valid FILE" in error and "--test FILE" in error and error.count("\n") == 1


def test_other_weights_and_rows_are_told_with_what_was_found(given, tmp_path, capsys):
    other = CONFIG | {"hidden_size": 896, "num_attention_heads": 14, "eos_token_id": 151645}
    (tmp_path / "model" / "config.json").write_text(json.dumps(other))
    out = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    assert run.main(["train", "--preset", NAME, *flags(given), *out]) == 2
    error = capsys.readouterr().err
    assert "eos_token_id 151645, not 151643" in error
    for word in ("hidden_size 896, not 1536", "train.txt: rows 1, not 385620", "sha256"):
        assert word in error
    assert not (tmp_path / "run").exists()


def test_the_right_weights_and_rows_are_taken(given, monkeypatch):
    content = sha256((PROBLEM + "\n").encode()).hexdigest()
    files = {"train": {"rows": 1, "sha256": content}, "valid": {}, "test": {}}
    monkeypatch.setitem(PRESETS, NAME, replace(PRESETS[NAME], files=files))
    settings, task, _ = chosen({"preset": NAME, "device": "cpu"} | given)
    check_contents(NAME, settings.model, None, task)
    assert settings.steps == PRESETS[NAME].settings["steps"]
    wrong = files | {"train": {"rows": 2}}
    monkeypatch.setitem(PRESETS, NAME, replace(PRESETS[NAME], files=wrong))
    with pytest.raises(ValueError, match="rows 1, not 2"):
        check_contents(NAME, settings.model, None, task)


def test_rows_that_were_passed_over_count(given, tmp_path, monkeypatch):
    (tmp_path / "train.txt").write_text(f"{PROBLEM}\nno row\n")
    files = {"train": {"rows": 2}}
    monkeypatch.setitem(PRESETS, NAME, replace(PRESETS[NAME], files=files))
    task = make_task("gsm", skip_bad=True, train=given["train"])
    check_contents(NAME, given["model"], None, task)


@pytest.mark.parametrize("change", [{"steps": 5}, {"suffix": "Go."}, {"resample": 0.5}])
def test_data_are_free_beside_a_preset_and_what_makes_the_run_is_not(change, given):
    chosen({"preset": NAME, "device": "cpu"} | given)
    with pytest.raises(ValueError, match="has its own settings"):
        chosen({"preset": NAME, "device": "cpu"} | given | change)


@pytest.mark.parametrize(
    "name, more", [("parametric-0.5b-cot-plain", "facts"), ("full-0.5b-cot", "valid")]
)
def test_a_file_that_a_preset_does_not_name_makes_another_run(name, more):
    """Facts to train on where there are none; all rows of --train instead of a share of them."""
    name = f"two-hop/{name}"
    given = {"preset": name, "model": "folder"} | {each: "x" for each in PRESETS[name].files}
    with_preset(given)
    with pytest.raises(ValueError, match=f"has its own settings, but --{more} y"):
        with_preset(given | {more: "y"})


@pytest.mark.parametrize("accumulate", [1, 16])
def test_a_step_is_taken_in_as_many_parts_as_the_machine_needs(accumulate, given):
    name = "gsm/0.5b-coconut"
    usual = PRESETS[name].settings["accumulate"]
    for more, parts in (({}, usual), ({"accumulate": accumulate}, accumulate)):
        settings = chosen({"preset": name, "device": "cpu"} | given | more).settings
        assert settings.accumulate == parts and settings.batch_size == 128
    assert PRESETS[name].settings["accumulate"] == usual


def test_a_preset_of_tiny_runs_takes_no_weights_and_no_files():
    with pytest.raises(ValueError, match="Leave --model out"):
        chosen({"preset": "tiny/parity-cot", "model": "folder"})
    with pytest.raises(ValueError, match="--train x"):
        chosen({"preset": "tiny/parity-cot", "train": "x"})


def test_an_unknown_name_brings_its_family_or_all_families():
    with pytest.raises(ValueError, match="gsm/0.5b-cot, gsm/0.5b-no-cot"):
        find_preset("gsm/none")
    with pytest.raises(ValueError, match="tiny/…, table1/…, .*run.py report") as error:
        find_preset("none")
    assert len(str(error.value)) < 250


def test_an_ablation_changes_one_thing():
    for task in ("gsm", "two-hop"):
        usual = PRESETS[f"ablation/{task}-chunk-8"].settings
        names = [f"extract-{n}" for n in LAYERS] + [f"chunk-{c}" for c in CHUNKS] + ["lm-loss-all"]
        names += [f"chunk-{c}-one" for c in CHUNKS if task == "gsm"]
        assert sum(name.startswith(f"ablation/{task}-") for name in PRESETS) == len(names)
        for name in names:
            other = PRESETS[f"ablation/{task}-{name}"].settings
            changed = {key for key in usual | other if usual.get(key) != other.get(key)}
            assert len(changed) == 1 + ("-one" in name) - (name in ("chunk-8", "chunk-8-one"))
    assert len(LAYERS) >= 6 and CHUNKS == (2, 4, 8, 16, 32)


def test_the_largest_chunk_of_an_ablation_ends_in_the_text_after_the_question():
    """Else its last thought comes too late for the answer, whatever a state can hold."""
    found = {name: each.settings for name, each in PRESETS.items() if name.startswith("ablation/")}
    assert len(found) == 29
    assert all(len(each["suffix"].split()) >= max(CHUNKS) for each in found.values())


def test_every_cell_of_the_papers_other_tables_has_its_preset():
    for benchmark, methods in paper.REASONING.items():
        beginning = "gsm/0.5b-" if benchmark == "gsm" else f"two-hop/{benchmark}-0.5b-"
        for method, cell in methods.items():
            preset = PRESETS[f"{beginning}{method}"]
            assert (preset.paper, preset.paper_speed) == cell
            assert preset.settings["method"] == method
    for latents, cell in paper.COCONUT.items():
        preset = PRESETS[f"gsm/0.5b-coconut-{latents}" if latents != 6 else "gsm/0.5b-coconut"]
        assert (preset.paper, preset.paper_speed) == cell
        assert preset.settings["latents"] == latents


def curricula() -> dict[str, tuple[dict, tuple[Stage, ...]]]:
    """The presets whose trainings have stages: settings, stages."""
    found = {}
    for name, preset in PRESETS.items():
        settings = preset.settings
        kind = METHODS[settings["method"]]
        if issubclass(kind, Curriculum):
            names = {each.name for each in fields(kind)}
            method = kind(**{key: settings[key] for key in names & settings.keys()})
            found[name] = settings, method.stages(settings["steps"], settings["batch_size"])
    assert len(found) >= 19
    return found


def test_of_a_curriculum_the_best_are_chosen_among_several():
    for name, (settings, stages) in curricula().items():
        before = sum(stage.steps for stage in stages[:-1])
        evaluated = range(settings["eval_every"], settings["steps"] + 1, settings["eval_every"])
        assert sum(step > before for step in evaluated) >= 2, name


def test_removal_keeps_to_the_chains_that_there_are():
    """Where nothing is left to remove, the optimizer is not to begin anew (the public code).

    The longest chain of a two-hop row has 19 tokens (Qwen's); an epoch with all facts 11,129 rows.
    """
    for name, (settings, stages) in curricula().items():
        if name.startswith("two-hop/") and settings.get("removal") == "tokens":
            assert len(stages) - 1 == 20
            assert stages[0].steps * settings["batch_size"] == pytest.approx(11_129 / 8, abs=64)


def test_methods_on_a_task_share_what_makes_them_comparable():
    shared = ("suffix", "eval_samples", "knowledge", "resample")
    for beginning in ("gsm/0.5b-", "two-hop/full-0.5b-", "two-hop/parametric-0.5b-"):
        found = [preset.settings for name, preset in PRESETS.items() if name.startswith(beginning)]
        found = [each for each in found if each["suffix"]]
        assert len(found) >= 7
        assert len({tuple(each.get(key) for key in shared) for each in found}) == 1
