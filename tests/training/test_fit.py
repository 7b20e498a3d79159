"""Where the loop looks up, how it stops, and that a run taken up again is the run never stopped, to the bit."""

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.tasks.mqar import MQAR
from seqlab.training.checkpoints import Checkpoints
from seqlab.training.fit import Schedule, fit
from seqlab.training.program import ALIVE, UNSOLVED
from seqlab.training.stopping import StopRequest

SCHEDULE = Schedule(chunk=3, eval_every=4, eval_batches=1, checkpoint_every=6)
BOUNDARIES = [3, 4, 6, 8]


class Session:
    """One call of `fit` on what lies in a directory; `signals` are sent to this process at the record of a step."""

    def __init__(self, program, task, directory, schedule=SCHEDULE, rates=(0.01, 0.02), signals=None):
        self.records, self.signals = {}, dict(signals or {})
        with Checkpoints(directory) as checkpoints, StopRequest() as stop:
            start = program.init(np.array([3, 5]), np.array(rates))
            restored = checkpoints.restore(start)
            states, self.seconds_before = restored or (start, 0.0)
            self.first_step = int(states.step[0])
            self.fitted = fit(program, task, states, schedule, checkpoints, self.record, stop, self.seconds_before)
        self.saved = sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())

    def record(self, step, values):
        for name, value in values.items():
            assert (step, name) not in self.records
            self.records[step, name] = value.tobytes()
        for number in self.signals.pop(step, ()):
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # it may reach another thread first, and two that wait become one

    def steps_of(self, tag):
        return [step for step, name in self.records if name == tag]


@pytest.fixture(scope="module")
def whole(program, task, tmp_path_factory):
    """The run that nothing interrupts."""
    return Session(program, task, tmp_path_factory.mktemp("whole"))


def test_the_loop_looks_up_at_every_boundary_and_at_the_end(whole):
    assert whole.steps_of("train/loss") == BOUNDARIES
    assert whole.steps_of("valid/accuracy") == [4, 8]
    assert whole.saved == [6, 8]
    assert (whole.fitted.status, whole.fitted.step, whole.fitted.signal) == ("finished", 8, None)
    assert whole.fitted.states.step.tolist() == [8, 8]
    assert whole.fitted.tokens_per_second > 0


@pytest.mark.parametrize(
    ("step", "number"), [(3, signal.SIGINT), (4, signal.SIGTERM), (6, signal.SIGINT)], ids=["3", "4", "6"]
)
def test_a_run_taken_up_again_is_the_uninterrupted_one_to_the_bit(
    program, task, whole, differences, tmp_path, step, number
):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    first = Session(program, task, tmp_path, signals={step: [number]})
    assert (first.fitted.status, first.fitted.step, first.fitted.signal) == ("interrupted", step, number)
    assert first.saved == [step]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers

    second = Session(program, task, tmp_path)
    assert second.first_step == step
    assert second.fitted.status == "finished"
    assert first.records | second.records == whole.records
    assert not first.records.keys() & second.records.keys()
    assert not differences(second.fitted.states, whole.fitted.states)
    assert second.fitted.train_seconds > second.seconds_before > 0


@pytest.mark.parametrize("part", ["key", "opt_state", "step"])
def test_a_part_left_out_of_the_checkpoint_would_be_noticed(
    program, task, whole, differences, tmp_path, monkeypatch, part
):
    """The comparison of the test above, with a checkpoint that gives zeros in the place of a part."""
    restore = Checkpoints.restore

    def forgetful(checkpoints, like):
        states, seconds = restore(checkpoints, like)
        content = jax.random.key_data(states.key) if part == "key" else getattr(states, part)
        zeros = jax.tree.map(jnp.zeros_like, content)
        return states.replace(**{part: jax.random.wrap_key_data(zeros) if part == "key" else zeros}), seconds

    first = Session(program, task, tmp_path, signals={4: [signal.SIGTERM]})
    monkeypatch.setattr(Checkpoints, "restore", forgetful)
    second = Session(program, task, tmp_path)
    assert first.records | second.records != whole.records
    assert differences(second.fitted.states, whole.fitted.states)


def test_a_signal_at_the_last_step_leaves_nothing_but_the_measuring_to_do(program, task, whole, tmp_path, differences):
    session = Session(program, task, tmp_path, signals={8: [signal.SIGINT]})
    assert (session.fitted.status, session.fitted.step, session.fitted.validation) == ("interrupted", 8, {})
    assert session.saved == [6, 8]
    again = Session(program, task, tmp_path)
    assert (again.fitted.status, again.records) == ("finished", {})
    assert not differences(again.fitted.states, whole.fitted.states)
    assert not differences(again.fitted.validation, whole.fitted.validation)


def test_a_second_signal_is_not_held_back(program, task, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Session(program, task, tmp_path, signals={3: [signal.SIGINT, signal.SIGINT]})


def test_a_finished_run_is_not_trained_further(program, task, whole, tmp_path, differences):
    Session(program, task, tmp_path)
    again = Session(program, task, tmp_path)
    assert again.records == {}
    assert (again.fitted.status, again.fitted.tokens_per_second) == ("finished", None)
    assert not differences(again.fitted.states, whole.fitted.states)


@pytest.mark.parametrize(("target", "stop"), [(0.0, 4), (1.1, 8), (None, 8)])
def test_training_stops_at_the_first_validation_past_the_target(program, task, tmp_path, target, stop):
    """An accuracy is always at least 0 and never 1.1."""
    schedule = Schedule(**{**vars(SCHEDULE), "target": target})
    session = Session(program, task, tmp_path, schedule)
    assert (session.fitted.status, session.fitted.step) == ("finished", stop)
    assert session.saved[-1] == stop
    again = Session(program, task, tmp_path, schedule)  # as after a kill before the results were written
    assert (again.fitted.status, again.fitted.step, again.records) == ("finished", stop, {})


@pytest.mark.parametrize(("target", "stop"), [(1e9, 4), (0.0, 8)])
def test_a_loss_is_past_its_target_below_it(program, task, tmp_path, monkeypatch, target, stop):
    monkeypatch.setattr(MQAR, "main_metric", "loss")
    monkeypatch.setattr(MQAR, "higher_is_better", False)
    session = Session(program, task, tmp_path, Schedule(**{**vars(SCHEDULE), "target": target}))
    assert session.fitted.step == stop


def test_a_member_has_solved_the_task_at_its_first_validation_past_the_bar(program, task, tmp_path, whole, monkeypatch):
    """The loss is below the lower of both members' at step 8, at step 8 only."""
    monkeypatch.setattr(MQAR, "main_metric", "loss")
    monkeypatch.setattr(MQAR, "higher_is_better", False)
    losses = np.array([np.frombuffer(whole.records[step, "valid/loss"], np.float32) for step in (4, 8)])
    assert (losses[1] < losses[0]).all()

    def solved_at(name, bar):
        schedule = Schedule(**{**vars(SCHEDULE), "solved": bar})
        first = Session(program, task, tmp_path / name, schedule, signals={6: [signal.SIGTERM]})
        assert first.fitted.status == "interrupted"  # what was solved before is remembered
        return Session(program, task, tmp_path / name, schedule).fitted.states.solved_at.tolist()

    assert solved_at("easy", 1e9) == [4, 4]
    assert solved_at("never", 0.0) == [UNSOLVED, UNSOLVED]
    bar = float(losses.max(axis=1)[1])  # at which step 8 is, and at step 4 whoever was there already
    expected = [4 if loss <= bar else 8 for loss in losses[0]]
    assert solved_at("between", bar) == expected
    assert 8 in expected


def test_a_target_waits_for_every_member(program, task, tmp_path, whole):
    scores = np.frombuffer(whole.records[4, "valid/loss"], np.float32)
    assert scores[0] != scores[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MQAR, "main_metric", "loss")
        patch.setattr(MQAR, "higher_is_better", False)
        between = Schedule(**{**vars(SCHEDULE), "target": float(scores.mean())})  # at step 4, for one of the two
        assert Session(program, task, tmp_path / "between", between).fitted.step == 8
        # a member that diverged at step 2 is not waited for
        met = Schedule(**{**vars(SCHEDULE), "target": 1e9})
        session = Session(program, task, tmp_path / "met", met, rates=(0.01, np.inf))
    assert session.fitted.step == 4
    assert session.fitted.status == "finished"


def test_one_diverged_member_does_not_end_the_run_and_all_of_them_do(program, task, tmp_path):
    one = Session(program, task, tmp_path / "one", rates=(0.01, np.inf))
    assert (one.fitted.status, one.fitted.step) == ("finished", 8)
    assert one.fitted.states.diverged_at.tolist() == [ALIVE, 0]  # the warm-up's step 0 makes its parameters inf * 0

    both = Session(program, task, tmp_path / "both", rates=(np.inf, np.inf))
    assert (both.fitted.status, both.fitted.step) == ("diverged", 3)
    assert both.fitted.states.diverged_at.tolist() == [0, 0]
    assert both.saved == [3]
    again = Session(program, task, tmp_path / "both", rates=(np.inf, np.inf))
    assert (again.fitted.status, again.fitted.step, again.records) == ("diverged", 3, {})
