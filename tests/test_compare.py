import numpy as np
import pytest

from seqlab.compare import main
from seqlab.reporting.results import write_results


def write_run(directory, metric="accuracy", measures=None, holds=True, values=(0.25, 0.75)):
    directory.mkdir(parents=True)
    members = [
        {"seed": seed, "learning_rate": 1e-3, "status": "finished", "metrics": {metric: value, "loss": 9.0}}
        for seed, value in enumerate(values)
    ]
    write_results(
        directory,
        {
            "status": "finished",
            "command": "python -m seqlab.run",
            "config": {},
            "versions": {},
            "device": "cpu",
            "members": members,
            "measures": measures or {},
            "ceilings": {"chance": 0.125, "oracle": 1.0},
            "controls": {"future": {"expected": "zero", "value": 0.1, "holds": holds}},
            "cost": {"parameters": 12345, "state_bytes": 256, "tokens_per_second": None},
        },
    )


def test_the_table_has_a_row_a_run(tmp_path, capsys):
    write_run(tmp_path / "ssm" / "default")
    write_run(tmp_path / "rnn" / "model.width=64", metric="bits_per_character", holds=False)
    assert main([str(tmp_path)]) == 0
    rows = {
        line.split("│")[1].strip(): line
        for line in capsys.readouterr().out.splitlines()
        if "default" in line or "=" in line
    }
    assert set(rows) == {"ssm/default", "rnn/model.width=64"}
    assert "accuracy 0.5 [0.25, 0.75]" in rows["ssm/default"]
    assert "12,345" in rows["ssm/default"] and "future" not in rows["ssm/default"]
    assert "bits per character 0.5 [0.25, 0.75]" in rows["rnn/model.width=64"]
    assert "future" in rows["rnn/model.width=64"]


def test_each_measure_over_one_axis_or_none_gets_a_figure(tmp_path, capsys):
    curve = {"axes": {"gap": [1, 2, 4]}, "values": np.ones((2, 3))}
    plain = {"axes": {}, "values": [0.5, np.nan]}
    grid = {"axes": {"gap": [1, 2], "layer": [0, 1]}, "values": np.ones((2, 2, 2))}
    write_run(tmp_path / "ssm", measures={"recall/gap": curve, "perplexity": plain, "map": grid})
    write_run(tmp_path / "rnn", measures={"recall/gap": curve})
    assert main([str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    written = {path.name: path.read_bytes()[:4] for path in (tmp_path / "figures").iterdir()}
    assert written == {"recall_gap.png": b"\x89PNG", "perplexity.png": b"\x89PNG"}


def test_runs_of_several_roots_keep_their_root(tmp_path, capsys):
    write_run(tmp_path / "mqar" / "ssm")
    write_run(tmp_path / "roles" / "ssm")
    assert main([str(tmp_path / "mqar"), str(tmp_path / "roles")]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "mqar/ssm" in shown and "roles/ssm" in shown


def test_a_run_without_a_finite_member_says_nan(tmp_path, capsys):
    write_run(tmp_path / "ssm", values=(np.nan, np.inf))
    assert main([str(tmp_path)]) == 0
    assert "accuracy nan [nan, nan]" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "message"), [("nowhere", "is not a directory"), ("", "no results.json below")])
def test_nothing_to_compare_is_one_line_and_exit_code_2(tmp_path, capsys, name, message):
    assert main([str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1
