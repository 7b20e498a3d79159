import io
import re
from contextlib import redirect_stderr

import pytest

from seqlab.reporting.progress import TrainingProgress, print_summary


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
    members = [{"seed": i, "metrics": {"accuracy": accuracy}} for i, accuracy in enumerate((0.5, 1.0, None))]
    measures = {
        "perplexity": {"axes": {}, "values": [2.0, 4.0, 6.0]},
        "recall": {"axes": {"gap": [1]}, "values": [[0.125]] * 3},
    }
    controls = {
        "future": {"expected": "zero", "value": 0.0, "holds": True},
        "order": {"expected": "nonzero", "value": 0.0, "holds": False},
    }
    return {"status": "finished", "members": members, "measures": measures, "controls": controls} | changes


def test_nothing_is_printed_where_nobody_watches(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI systems set it; it must not wake the bar
    with TrainingProgress(100, "accuracy") as progress:
        progress.update(50, loss=1.0, metric=0.5, tokens_per_second=1e5)
    assert capfd.readouterr() == ("", "")


def test_the_bar_shows_step_loss_metric_and_speed(capfd):
    with redirect_stderr(Terminal()) as terminal, TrainingProgress(100, "accuracy", first_step=20) as progress:
        progress.update(50, loss=1.25, metric=0.5, tokens_per_second=123456.0)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "50/100" in shown
    assert "loss 1.250  accuracy 0.500  123k tokens/s" in shown
    assert capfd.readouterr().out == ""


def test_the_summary_holds_metric_and_plain_measures_and_shouts_broken_controls(capfd):
    print_summary(results(), "accuracy")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "finished, 3 members" in captured.err
    assert "0.75 [0.5, 1]" in captured.err
    assert "4 [2, 6]" in captured.err
    assert "recall" not in captured.err
    assert "1 of 2" in captured.err
    assert re.findall("CONTROL BROKEN: (.*)", captured.err) == ["order must be nonzero and is 0.0"]


def test_a_broken_control_is_red():
    with redirect_stderr(Terminal()) as terminal:
        print_summary(results(), "accuracy")
    assert re.search(r"\x1b\[[0-9;]*41m *CONTROL BROKEN", terminal.getvalue())


def test_a_run_without_members_or_finite_numbers_has_a_summary(capfd):
    print_summary(results(status="failed", members=[], measures={}, controls={}), "accuracy")
    print_summary(results(measures={"ppl": {"axes": {}, "values": [None, None]}}), "accuracy")
    captured = capfd.readouterr()
    assert "failed, 0 members" in captured.err
    assert "nan [nan, nan]" in captured.err
