import io
import re
from contextlib import redirect_stderr

import pytest

from seqlab.reporting.progress import TrainingProgress, print_summary
from seqlab.reporting.tuning import tuned, untuned


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")


def results(**changes):
    accuracies = [0.5, 1.0, None]
    members = [
        {
            "seed": seed,
            "learning_rate": 1e-3,
            "status": "finished" if accuracy else "diverged",
            "metrics": {"accuracy": accuracy},
            "solved_at": 200 if accuracy == 1 else None,
        }
        for seed, accuracy in enumerate(accuracies)
    ]
    tuning = tuned(untuned("accuracy", True, [1e-3]), [accuracies])
    measures = {
        "accuracy": {"axes": {}, "values": accuracies},
        "perplexity": {"axes": {}, "values": [2.0, 4.0, 6.0]},
        "recall": {"axes": {"gap": [1]}, "values": [[0.125]] * 3},
    }
    controls = {
        "future": {"expected": "zero", "value": 0.0, "holds": True},
        "order": {"expected": "nonzero", "value": 0.0, "holds": False},
    }
    ceilings = {"chance": 0.0625, "bag_of_words": 0.5, "both_correct/bag_of_words": 0.0}
    parts = {"members": members, "measures": measures, "ceilings": ceilings, "controls": controls}
    config = {"train": {"solved": 0.9}}
    return {"status": "finished", "tuning": tuning, "config": config} | parts | changes


VALUES = {"train/loss": [1.0, 1.5, None], "train/accuracy": [0.25, 0.75, None]}


def test_nothing_is_printed_where_nobody_watches(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI systems set it; it must not wake the bar
    with TrainingProgress(100, "accuracy", tokens_per_step=10) as progress:
        progress.update(50, VALUES)
    assert capfd.readouterr() == ("", "")


def test_the_bar_shows_step_loss_metric_and_speed(capfd, monkeypatch):
    clock = iter((100.0, 110.0))
    monkeypatch.setattr("seqlab.reporting.progress.time.perf_counter", lambda: next(clock))
    with (
        redirect_stderr(Terminal()) as terminal,
        TrainingProgress(100, "accuracy", tokens_per_step=41152, first_step=20) as progress,
    ):
        progress.update(50, VALUES)  # 30 steps of 41152 tokens in 10 s
        progress.update(50, {"valid/loss": [1.0, 1.0, 1.0]})  # a validation moves nothing
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "50/100" in shown
    assert "loss 1.250  accuracy 0.500  123k tokens/s" in shown
    assert capfd.readouterr().out == ""


def test_the_summary_holds_metric_and_plain_measures_and_shouts_broken_controls(capfd):
    print_summary(results())
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "finished, 3 members, 1 diverged" in captured.err
    assert "chance 0.0625, bag_of_words 0.5" in captured.err and "both_correct" not in captured.err
    assert "0.75 [0.5, 1]" in captured.err
    assert "4 [2, 6]" in captured.err
    assert "1 of 3, 0.3333 [" in captured.err  # solved
    assert "valid/accuracy" not in captured.err and "widen" not in captured.err  # there was one learning rate
    assert "recall" not in captured.err
    assert "1 of 2" in captured.err
    assert re.findall("CONTROL BROKEN: (.*)", captured.err) == ["order must be nonzero and is 0.0"]


def test_a_broken_control_is_red():
    with redirect_stderr(Terminal()) as terminal:
        print_summary(results())
    assert re.search(r"\x1b\[[0-9;]*41m *CONTROL BROKEN", terminal.getvalue())


def test_a_run_without_members_or_finite_numbers_has_a_summary(capfd):
    print_summary(
        results(status="failed", members=[], measures={}, controls={}, tuning=untuned("accuracy", True, [1e-3]))
    )
    print_summary(results(measures={"ppl": {"axes": {}, "values": [None, None, None]}}))
    captured = capfd.readouterr()
    assert "failed, 0 members" in captured.err
    assert re.search(r"ppl +\S +nan ", captured.err)


def test_the_whole_grid_is_shown_and_a_best_rate_at_its_edge_is_yellow(capfd):
    run = results()
    run["members"] = [member | {"learning_rate": rate} for rate in (1e-3, 3e-3) for member in run["members"]]
    run["measures"] = {"accuracy": {"axes": {}, "values": [0.5, 1.0, None, 0.0, 0.0, 0.0]}}
    run["tuning"] = tuned(untuned("accuracy", True, [1e-3, 3e-3]), [[0.75, 0.75, 0.75], [0.5, 0.5, None]])
    with redirect_stderr(Terminal()) as terminal:
        print_summary(run)
    assert re.search(r"\x1b\[[0-9;]*33m *tuned at the edge: widen the grid", terminal.getvalue())
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"valid/accuracy at 0.001 +│ 0.75 \[0.75, 0.75\], chosen", shown)
    assert re.search(r"valid/accuracy at 0.003 +│ 0.5 \[0.5, 0.5\], 1 of 3 diverged", shown)
    assert "3 of 6 members" in shown and "0.75 [0.5, 1]" in shown


def test_a_log_gets_a_line_a_minute(capsys, monkeypatch):
    clock = iter((100.0, 130.0, 165.0, 170.0))
    monkeypatch.setattr("seqlab.reporting.progress.time.perf_counter", lambda: next(clock))
    with TrainingProgress(100, "accuracy", tokens_per_step=1000) as progress:
        for step in (10, 20, 30):
            progress.update(step, VALUES)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 20 of 100  loss ") and line.endswith("286 tokens/s")  # 10,000 tokens in 35 s
