import numpy as np
import pytest

from seqlab.compare import competitors, main
from seqlab.reporting.results import read_results, write_results
from seqlab.reporting.tuning import tuned, untuned


def write_run(
    directory,
    metric="accuracy",
    measures=None,
    holds=True,
    values=(0.25, 0.75),
    task="mqar",
    higher_is_better=True,
    validation=None,
    solved_at=None,
):
    """A run of two seeds for each row of `validation`, with the values of all of them on the test split."""
    directory.mkdir(parents=True)
    validation = validation or [list(values)]
    rates = [1e-3 * 2**i for i in range(len(validation))]
    members = [
        {
            "seed": index,
            "learning_rate": rates[index * len(rates) // len(values)],
            "status": "finished" if value is not None and np.isfinite(value) else "diverged",
            "metrics": {metric: value, "loss": 9.0},
            "validation": None,
            "solved_at": solved_at[index] if solved_at else None,
        }
        for index, value in enumerate(values)
    ]
    write_results(
        directory,
        {
            "status": "finished",
            "command": "python -m seqlab.run",
            "config": {"task": {"name": task}, "train": {"solved": 0.9}},
            "versions": {},
            "device": "cpu",
            "members": members,
            "tuning": tuned(untuned(metric, higher_is_better, rates), validation),
            "match": None,
            "measures": measures or {},
            "ceilings": {"chance": 0.125, "oracle": 1.0},
            "controls": {"future": {"expected": "zero", "value": 0.1, "holds": holds}},
            "cost": {
                "parameters": 12345,
                "state_bytes": 256,
                "flops_per_token": 67890.4,
                "tokens_per_second": None,
            },
        },
    )


def rows(out):
    """The cells of each line of the tables by the first."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {cells[0]: cells[1:] for cells in lines}


def test_the_table_has_a_row_a_run(tmp_path, capsys):
    write_run(tmp_path / "ssm" / "default")
    write_run(tmp_path / "rnn" / "model.width=64", metric="bits_per_character", holds=False, task="text")
    assert main([str(tmp_path)]) == 0
    shown = rows(capsys.readouterr().out)
    assert {"ssm/default", "rnn/model.width=64"} <= set(shown)
    assert "accuracy 0.5 [0.25, 0.75]" in shown["ssm/default"]
    assert {"12,345", "256", "67,890", "-"} < set(shown["ssm/default"]) and "future" not in shown["ssm/default"]
    assert "bits per character 0.5 [0.25, 0.75]" in shown["rnn/model.width=64"]
    assert "future" in shown["rnn/model.width=64"]


def test_a_run_is_shown_by_its_chosen_rate_alone(tmp_path, capsys):
    write_run(
        tmp_path / "ssm",
        values=(1.0, 1.0, 0.5, 0.75),
        validation=[[0.25, 0.25], [0.5, 0.5]],
        solved_at=(100, 100, 400, None),
    )
    assert main([str(tmp_path)]) == 0
    status, members, metric, diverged, solved, steps, rate, *_ = rows(capsys.readouterr().out)["ssm"]
    assert (status, members, metric) == ("finished", "2 of 4", "accuracy 0.625 [0.5, 0.75]")
    assert (diverged, steps) == ("0 of 2", "-")
    assert solved.startswith("1 of 2, 0.5 [0.01258,")
    assert rate.startswith("0.002, tuned at the")


def test_members_that_diverged_are_counted_and_lose(tmp_path, capsys):
    write_run(tmp_path / "gru", values=(0.5, 0.5))
    write_run(tmp_path / "ssm", values=(0.9, None))
    assert main([str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ ssm")]
    assert "accuracy 0.9 " in lines[0] and "1 of 2" in lines[0]
    assert "0.5 [0, 1]" in lines[1]  # one wins, one loses


def test_the_row_beats_the_column(tmp_path, capsys):
    write_run(tmp_path / "gru", values=(0.1, 0.2))
    write_run(tmp_path / "ssm", values=(0.3, 0.15))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    table = rows(out[out.index("controls broken") :].split("┏")[1])
    assert table["ssm"][0].startswith("0.75 [")  # three of the four pairs
    assert table["gru"][1].startswith("0.25 [")


def test_less_may_be_better(tmp_path, capsys):
    write_run(tmp_path / "gru", "bits_per_character", values=(2.0, 2.1), higher_is_better=False)
    write_run(tmp_path / "ssm", "bits_per_character", values=(1.0, 1.1), higher_is_better=False)
    assert main([str(tmp_path)]) == 0
    assert rows(capsys.readouterr().out)["ssm"] == ["1 [1, 1]", ""]


def test_runs_of_several_tasks_compete_over_those_that_both_ran(tmp_path, capsys):
    for name, task, values in (
        ("mqar/ssm/task.pairs=4,train.steps=9", "mqar", (0.5, 0.5)),
        ("roles/ssm/train.steps=9", "roles", (0.5, 0.5)),
        ("mqar/gru/task.pairs=4,train.steps=9", "mqar", (0.25, 0.25)),
        ("roles/gru/train.steps=9", "roles", (0.75, 0.75)),
        ("roles/rnn/defaults", "roles", (0.25, 0.25)),
    ):
        write_run(tmp_path / name, values=values, task=task)
    assert main([str(tmp_path)]) == 0
    table = rows(capsys.readouterr().out)
    # in the order of the paths: gru, ssm, rnn; then the mean over both tasks
    assert table["ssm steps=9"] == ["0.5 [0.5, 0.5]", "", "1 [1, 1]", "0.5 [0.5, 0.5]"]
    # each task is resampled on its own, and within each its members are the same
    assert table["gru steps=9"] == ["", "0.5 [0.5, 0.5]", "1 [1, 1]", "0.5 [0.5, 0.5]"]
    assert table["rnn"] == ["0 [0, 0]", "0 [0, 0]", "", "-"]  # over roles alone


def test_other_words_of_the_same_task_are_another_task(tmp_path):
    for name, task in (("ssm/a", "easy"), ("ssm/b", "hard")):
        write_run(tmp_path / name, task=task)
    runs = {name: read_results(tmp_path / name) for name in ("ssm/a", "ssm/b")}
    assert list(competitors(runs)) == ["ssm/a", "ssm/b"]
    assert len({task for ran in competitors(runs).values() for task in ran}) == 2


def test_each_measure_over_one_axis_or_none_gets_a_figure(tmp_path, capsys):
    curve = {"axes": {"gap": [1, 2, 4]}, "values": np.ones((2, 3))}
    plain = {"axes": {}, "values": [0.5, np.nan]}
    grid = {"axes": {"gap": [1, 2], "layer": [0, 1]}, "values": np.ones((2, 2, 2))}
    write_run(tmp_path / "ssm", measures={"recall/gap": curve, "perplexity": plain, "map": grid})
    write_run(tmp_path / "rnn", measures={"recall/gap": curve}, validation=[[0.5], [0.75]])
    assert main([str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    written = {path.name: path.read_bytes()[:4] for path in (tmp_path / "figures").iterdir()}
    assert written == dict.fromkeys(("recall_gap.png", "perplexity.png", "tuning_accuracy.png"), b"\x89PNG")


def test_runs_of_several_roots_keep_their_root(tmp_path, capsys):
    write_run(tmp_path / "mqar" / "ssm")
    write_run(tmp_path / "roles" / "ssm")
    assert main([str(tmp_path / "mqar"), str(tmp_path / "roles")]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "mqar/ssm" in shown and "roles/ssm" in shown


def test_a_run_without_a_finite_member_says_nan(tmp_path, capsys):
    write_run(tmp_path / "ssm", values=(np.nan, np.inf))
    assert main([str(tmp_path)]) == 0
    assert "accuracy nan" in rows(capsys.readouterr().out)["ssm"]


@pytest.mark.parametrize(("name", "message"), [("nowhere", "is not a directory"), ("", "no results.json below")])
def test_nothing_to_compare_is_one_line_and_exit_code_2(tmp_path, capsys, name, message):
    assert main([str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1
