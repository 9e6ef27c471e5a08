"""Tables of made-up records: means over seeds, differences, speed-ups, what is missing."""

from __future__ import annotations

import time

import pytest
from made_up import N, answered, costs, evaluation, trained

from minits.lab.paired import difference
from minits.lab.presets import PRESETS
from minits.lab.records import Book, belongs, read_book, weights_of
from minits.lab.tables import tables


def line(table: str, *words: str) -> dict[str, str]:
    """The one line of a table that holds `words`, by column."""
    head, _, *lines = [each for each in table.splitlines() if each.startswith("|")]
    (found,) = [each for each in lines if all(word in each for word in words)]
    return dict(zip(split(head), split(found)))


def split(text: str) -> list[str]:
    return [part.strip() for part in text.strip("| ").split(" | ")]


def percent(found: tuple[float, float, float], sign: str = "") -> str:
    """A mean and its interval as tables write them."""
    mean, low, high = (100 * each for each in found)
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def test_a_run_belongs_to_the_preset_that_it_names_else_to_the_cell_that_it_is_one_of():
    name, other = "gsm/0.5b-thinking", "gsm/0.5b-cot"
    named, unnamed = trained(name, 0.5), trained(name, 0.5, named=False)
    for run in (named, unnamed):
        assert belongs(run, name) and not belongs(run, other)
    for ablation in ("ablation/gsm-chunk-4-one", "gsm/0.5b-as-written", "gsm/1.5b-thinking"):
        assert not belongs(unnamed, ablation)
        assert not belongs(trained(ablation, 0.5), name)
    assert not belongs({"lines": []}, name)
    for change in ({"resample": 0.5}, {"one_per_chunk": False}, {"chunk_size": 8}, {"suffix": ""}):
        changed = unnamed | {"settings": unnamed["settings"] | change}
        assert not belongs(changed, name)
    idle = unnamed | {"settings": unnamed["settings"] | {"knowledge": None}}
    assert belongs(idle, name)


def test_coconut_and_icot_are_told_apart_by_their_options():
    for name in ("gsm/0.5b-coconut-9", "gsm/0.5b-coconut", "gsm/0.5b-icot", "gsm/0.5b-icot-steps"):
        run = trained(name, 0.5, named=False)
        assert [each for each in PRESETS if belongs(run, each)] == [name]


def test_the_size_of_a_model_is_told_by_its_width_or_its_name():
    assert weights_of({"hidden_size": 1536, "settings": {"model": "runs/cot"}}) == "1.5B"
    assert weights_of({"settings": {"model": "Qwen2.5-Coder-0.5B-Instruct"}}) == "0.5B"
    assert weights_of({"hidden_size": 64, "settings": {"model": "tiny"}}) == "tiny"


def test_a_cell_is_the_mean_over_seeds_with_the_papers_figure_beside_it():
    runs = [trained("gsm/0.5b-thinking", 0.4, seed) for seed in (1, 2)]
    rights = [run["test"]["right"] for run in runs]
    found = line(tables(Book(runs))["methods"], "`gsm/0.5b-thinking`")
    assert found["GSM, %"] == f"{percent(difference(rights, ['0' * N]))} (42.22)"
    assert found["GSM, training"] == "102 s, 1k samples, 2 seeds"
    assert found["2-hop FK, %"] == "not run (54.91)" and found["2-hop PK, speed-up"] == "– (1.23×)"
    alone = line(tables(Book(runs[:1]))["methods"], "`gsm/0.5b-thinking`")["GSM, %"]
    test = runs[0]["test"]
    assert alone == f"{percent((test['accuracy'], *test['interval']))} (42.22)"


@pytest.mark.parametrize("named", [True, False])
def test_of_runs_with_one_seed_the_best_on_valid_fills_the_cell(named):
    name = "gsm/0.5b-thinking"
    runs = [trained(name, share, named=named) for share in (0.3, 0.6, 0.2)]
    for rate, run in enumerate(runs, 1):
        run["settings"] = run["settings"] | {"lr": rate * 1e-5}
    runs.insert(0, trained(name, 0.1, 2, named))
    book = Book(runs)
    assert book.cell(name).runs == [runs[2], runs[0]]  # by seed
    lines = [each for each in tables(book)["gsm"].splitlines() if "| Thinking States" in each]
    assert len(lines) == 4 and sum(name in each for each in lines) == (4 if named else 2)
    assert sum("not run" in each for each in lines) == 0


def test_facts_that_are_not_said_are_lines_of_their_own():
    ends = ("cot", "no-cot", "thinking", "cot-plain", "no-cot-plain", "thinking-plain")
    runs = [trained(f"two-hop/full-0.5b-{end}", 0.5, i, i % 2) for i, end in enumerate(ends)]
    table = tables(Book(runs))["methods"]
    found = line(table, "`two-hop/full-0.5b-thinking-plain`")
    assert found["method, weights"].startswith("Thinking States, facts not said, 0.5B")
    assert found["GSM, %"] == "–" and found["2-hop FK, %"].endswith("(54.91)")
    for one, other in ((5, 3), (5, 4), (4, 3), (2, 0), (2, 1)):
        sides = [[runs[i]["test"]["right"]] for i in (one, other)]
        less = percent(difference(*sides, runs[0]["test"]["clusters"]), "+")
        names = [PRESETS[f"two-hop/full-0.5b-{ends[i]}"].title[:-6] for i in (one, other)]
        assert f"- 2-hop FK, 0.5B: {names[0]} less {names[1]} {less} points" in table


def test_two_hop_rows_are_drawn_by_subject():
    runs = [trained("two-hop/full-0.5b-thinking", 0.5, seed) for seed in (1, 2, 3)]
    cot = [trained("two-hop/full-0.5b-cot", 0.4, seed + 9) for seed in (1, 2, 3)]
    book, clusters = Book(runs + cot), runs[0]["test"]["clusters"]
    rights = [[run["test"]["right"] for run in side] for side in (runs, cot)]
    cell = book.cell("two-hop/full-0.5b-thinking")
    assert cell.accuracy() == difference(rights[0], ["0" * N], clusters)
    assert cell.less(book.cell("two-hop/full-0.5b-cot")) == difference(*rights, clusters)
    assert cell.accuracy() != difference(rights[0], ["0" * N])
    less = percent(difference(*rights, clusters), "+")
    words = f"- 2-hop FK, 0.5B: Thinking States less CoT {less} points"
    assert words in tables(book)["methods"].splitlines()


def test_of_the_rows_right_those_that_cot_has_wrong_are_counted():
    run, cot = trained("gsm/0.5b-thinking", 0.5), trained("gsm/0.5b-cot", 0.5)
    run["test"]["right"], cot["test"]["right"] = "1111" + "0" * 56, "1110" + "1" * 56
    told = "- GSM, 0.5B: of the rows that Thinking States have right CoT has wrong 25.0% (the paper"
    assert told in tables(Book([run, cot]))["methods"]


def test_the_summary_has_both_sizes_beside_the_papers_figures():
    runs = [trained("gsm/0.5b-cot", 0.6), trained("gsm/0.5b-thinking", 0.4)]
    runs += [trained("gsm/1.5b-thinking", 0.9), trained("two-hop/full-0.5b-pause", 0.5)]
    benches = [answered("gsm/0.5b-thinking", thinking=20.0, cot=40.0)]
    summary = tables(Book(runs, benches))["summary"].split("\n\n")[-1]
    cot, small, large, pause = (f"{100 * run['test']['accuracy']:.1f}" for run in runs)
    gsm, full = line(summary, "GSM"), line(summary, "2-hop FK")
    assert gsm["CoT"] == f"{cot}, – (60.50)" and full["CoT"] == "–, – (54.79)"
    assert gsm["Thinking States"] == f"{small} at 2.00×, {large} (42.22 at 2.66×)"
    assert full["Pause tokens"] == f"{pause} (–)"
    assert "No-CoT" not in gsm and "Coconut" not in summary


def test_other_rows_are_not_compared():
    run, other = trained("gsm/0.5b-thinking", 0.5), trained("gsm/0.5b-cot", 0.5)
    other["test"]["right"] = other["test"]["right"][1:]
    assert "less" not in tables(Book([run, other]))["methods"]


def test_speed_is_over_cot_by_way_of_the_thinking_run_that_answered_in_turn():
    name = "gsm/0.5b-thinking"
    benches = [answered(name, thinking=20.0, cot=40.0), answered(name, thinking=10.0, coconut=5.0)]
    book = Book([trained(name, 0.4), trained("gsm/0.5b-coconut", 0.3)], benches)
    table = tables(book)["methods"]
    assert line(table, "`gsm/0.5b-thinking`")["GSM, speed-up"] == "2.00× (2.66×)"
    assert line(table, "`gsm/0.5b-coconut`")["GSM, speed-up"] == "4.00× (3.14×)"
    assert line(table, "`gsm/0.5b-cot`")["GSM, speed-up"] == "1.00× (1.00×)"
    assert line(table, "`gsm/0.5b-no-cot`")["GSM, speed-up"] == "– (5.59×)"
    assert book.cell("gsm/0.5b-coconut").ms() == 5.0
    assert book.cell("gsm/0.5b-coconut-9").speed_up() is None
    answers = tables(book)["answers"].splitlines()
    assert len(answers) == 2 + 2
    found = ("CoT 40.0 (2.5)", "20.0"), ("Coconut 5.0 (2.5)", "10.0")
    for row, (beside, trivial) in zip(answers[2:], found):
        cells = dict(zip(answers[0].split(" | "), row.split(" | ")))
        assert cells["beside, ms (tokens)"] == beside
        ways = [cells[f"{way}, ms"] for way in ("sequential", "trivial", "carry")]
        assert ways == ["99.0", trivial, "–"] and cells["carry, lookahead 2, ms"] == "88.0"
    for bench in benches:
        bench["settings"] = bench["settings"] | {"lr": 1.0}  # of weights with no accuracy here
    assert book.cell("gsm/0.5b-thinking").speed_up() is None
    assert book.cell("gsm/0.5b-coconut").speed_up() == 4.0
    # Each of two thinking runs has its own pace: only what answered beside the same one is compared.
    other = answered(name, thinking=100.0, cot=100.0, coconut=25.0)
    other["settings"] = other["settings"] | {"lr": 2.0}
    book = Book(book.runs, [*benches, other])
    assert book.cell("gsm/0.5b-coconut").speed_up() == 4.0
    assert Book(book.runs, [other]).cell("gsm/0.5b-coconut").speed_up() == 4.0


def test_many_methods_answer_in_turn_with_one_thinking_run():
    name = "gsm/0.5b-thinking"
    bench = answered(name, thinking=10.0, cot=40.0, icot=8.0, coconut=5.0)
    bench["lines"][1]["options"] = {"removal": "steps"}
    book = Book([trained(name, 0.4), trained("gsm/0.5b-icot-steps", 0.3)], [bench])
    row = tables(book)["answers"].splitlines()[-1]
    assert "| CoT 40.0 (2.5), iCoT by steps 8.0 (2.5), Coconut 5.0 (2.5) | 99.0 | 10.0 |" in row
    assert book.cell("gsm/0.5b-icot-steps").speed_up() == 5.0
    assert book.cell("gsm/0.5b-icot").speed_up() is None


def test_runs_of_one_method_answer_as_their_mean_beside_the_thinking_run_that_is_measured():
    name = "gsm/0.5b-thinking"
    bench, other = (answered(name, thinking=ms, cot=4 * ms) for ms in (10.0, 20.0))
    bench["lines"] = [line | {"run": f"{line['run']}-2"} for line in other["lines"]] + bench[
        "lines"
    ]
    book = Book([trained(name, 0.4)], [bench])
    assert (book.cell("gsm/0.5b-cot").ms(), book.cell(name).ms()) == (60.0, 10.0)
    assert book.cell(name).speed_up() == 6.0


def test_answers_on_the_plain_path_have_lines_of_their_own_and_no_cell():
    name = "gsm/0.5b-thinking"
    fast, plain = answered(name, thinking=20.0, cot=40.0), answered(name, thinking=300.0, cot=900.0)
    plain["path"] = "plain"
    book = Book([trained(name, 0.4)], [fast, plain])
    assert book.cell(name).speed_up() == 2.0 and book.cell(name).ms() == 20.0
    assert Book(book.runs, [plain]).cell(name).speed_up() is None
    assert tables(book)["answers"].count("| plain |") == 1


def test_an_ablation_stands_beside_its_default():
    name, usual = "ablation/gsm-extract-4", "ablation/gsm-chunk-8"
    runs = [trained(name, 0.2, 3), trained(usual, 0.4, 4)]
    book = Book(runs, [answered(name, thinking=10.0, cot=30.0)])
    table = tables(book)["layers"].split("\n\n")[1]
    rights = [[run["test"]["right"]] for run in runs]
    found = line(table, f"`{name}`")
    less = "less that of `chunk-8`, points"
    assert found[less] == percent(difference(*rights), "+")
    assert found["speed-up over CoT"] == "3.00×" and found["n"] == str(N)
    assert found["late rows, %"] == "12.5"
    assert line(table, f"`{usual}`")[less] == "–"
    assert line(table, "`ablation/gsm-extract-20`")["test, %"] == "not run"
    assert sum("(`ablation/" in each for each in table.splitlines()) == 7
    assert tables(book)["gsm"].count(name) == 0


def test_a_run_on_word_problems_or_two_hop_questions_is_a_line_of_its_table():
    runs = [trained("gsm/0.5b-thinking", 0.4, 1), trained("two-hop/full-0.5b-cot", 0.4, 2)]
    odd = trained("gsm/0.5b-cot", 0.4, 5, named=False)
    odd["settings"] = odd["settings"] | {"suffix": "Now."}
    found = tables(Book([*runs, odd]))
    gsm = line(found["gsm"], "`gsm/0.5b-thinking`")
    assert (
        gsm["paper (1.5B)"] == "42.22"
        and gsm["seed"] == "1"
        and gsm["training"] == "10 steps, 101 s"
    )
    assert gsm["first / last result, %"] == "50.0 / 25.0" and gsm["c, text after"] == "4, 19 words"
    assert gsm["answer right if the last is, %"] == "–" and gsm["revision"] == "abc1234"
    assert gsm["machine"] == "a card, runs/some-start"
    assert line(found["gsm"], "| 5 |")["run"] == "CoT at 3e-05, 0.5B"
    hops = line(found["two-hop"], "`two-hop/full-0.5b-cot`")
    assert hops["bridge wrong / right, answer wrong / both right, %"] == "12.5 / – / –"
    assert tables(Book([]))["two-hop"].splitlines()[-1].startswith("| all | – | not run |")


def test_evaluations_with_something_changed_stand_beside_the_run():
    run = trained("gsm/0.5b-thinking", 0.5)
    record = {key: run[key] for key in ("run", "settings", "seed", "machine", "revision")}
    zero = record | evaluation(0.1, 9) | {"states": "zero"}
    hop = record | evaluation(0.7, 8) | {"ask": "first"}
    first = record | evaluation(0.5, 1)
    wrong = first["right"].count("0")
    figures = {"accuracy": 0.25, "rows_wrong_before": wrong, "of_them_right": 0.5}
    first["question_first"] = figures | {"of_the_others_right": 0.75}
    *_, table = tables(Book([run], [], [zero, hop, first]))["probes"].split("\n\n")
    found = line(table, "states zero")
    less = difference([zero["right"]], [run["test"]["right"]])
    assert found["less as it is, points"] == percent(less, "+")
    found = line(table, "the first hop alone is asked for")
    assert found["test, %"].startswith(f"{100 * hop['accuracy']:.1f} [")
    right = 100 * (1 - wrong / N)
    found = line(table, "question first where it was wrong")
    assert found["test, %"] == f"{right:.1f} to {right + 50 * wrong / N:.1f}"
    assert found["less as it is, points"] == "(on all rows 25.0 %)"
    assert line(table, "states of another row")["test, %"] == "not run"
    # An evaluation's own seed beside "runs/… (seed 2)" would be read as that of the training.
    assert "seed" not in found


def test_training_cost_is_a_table_of_steps_and_sides_and_what_it_shows():
    found = tables(Book([], [costs()]))["cost"]
    assert line(found, "| 10 |")["Coconut"] == "40.0 (40.0 + 40.0)"
    assert line(found, "| 10 |")["Thinking States"] == "2.0 (2.0 + 2.0)"
    assert "Coconut 4.00 ms a latent (R² 1.000)" in found and "20.0 times as long" in found
    assert "a card, abc1234" in found
    assert "Ours: not run." in tables(Book([]))["cost"]


def test_the_records_that_ship_are_told_within_the_time_that_torch_leaves():
    start = time.process_time()
    found = tables(read_book())
    assert time.process_time() - start < 1.5  # of the command's 3 s; torch takes about 1.2
    assert all(found.values())


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].size])
def test_no_table_is_broken_by_a_run_of_any_preset(name):
    found = tables(Book([trained(name, 0.5), trained(name, 0.4, 2)]))
    for block in "\n\n".join(found.values()).split("\n\n"):
        if block.startswith("|"):
            assert len({each.count(" | ") for each in block.splitlines()}) == 1
    assert name in str(found)
