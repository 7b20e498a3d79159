"""What a run says of a grid of learning rates: which one it is judged by, without a look at the test split."""

import copy
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import seqlab.record
from seqlab.compare import main
from seqlab.record import add_tuning
from seqlab.reporting.results import read_results
from seqlab.reporting.tuning import judged, main_scores, untuned

RATES = [3e-4, 1e-3, 3e-3]
GRID = (
    "model=gru model.width=8 model.depth=1 task.length=16 task.pairs=2 task.vocab_size=17 population.seeds=2 "
    "train.batch_size=4 train.eval_batches=1 measure.recall.batches=1 measure.recall.batch_size=4 train.steps=4 "
    "train.chunk=2 train.eval_every=2 train.checkpoint_every=2 population.learning_rates=[3e-4,1e-3,3e-3]"
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_a_hurry():
    # what is tested here is not numbers, and half of the time would go into optimising programs that run once
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def fitted(validation, diverged_at=(-1,) * 6, solved_at=(-1,) * 6):
    states = SimpleNamespace(diverged_at=np.array(diverged_at), solved_at=np.array(solved_at))
    return SimpleNamespace(
        validation={"accuracy": np.array(validation, np.float32)} if validation else {}, states=states
    )


def blank(test=(0.0,) * 6):
    members = [
        {"learning_rate": rate, "metrics": {"accuracy": test[i]}, "status": "finished"}
        for i, rate in enumerate(np.repeat(RATES, 2).tolist())
    ]
    return {"members": members, "tuning": untuned("accuracy", True, RATES), "config": {}}


TASK = SimpleNamespace(main_metric="accuracy")


def add(results, fitted):
    add_tuning.__wrapped__(results, TASK, fitted)  # what jaxtyping checks are real tasks


def test_the_rate_is_chosen_on_the_validation_split_and_never_on_the_reported_one():
    results = blank(test=(0.0, 0.0, 0.25, 0.25, 1.0, 1.0))
    add(results, fitted([0.1, 0.1, 0.9, 0.9, 0.2, 0.2]))
    assert results["tuning"]["learning_rate"] == 1e-3
    assert main_scores(results).tolist() == [0.25, 0.25]
    other = blank(test=(1.0,) * 6)
    add(other, fitted([0.1, 0.1, 0.9, 0.9, 0.2, 0.2]))
    assert other["tuning"] == results["tuning"]


def test_members_know_their_scores_and_when_they_solved_it():
    results = blank()
    add(results, fitted([0.5, 1.0, 0.25, 0.5, 0.75, 0.5], (-1, 3, -1, -1, -1, -1), (-1, 2, -1, 4, -1, -1)))
    scores = [member["validation"] for member in results["members"]]
    assert np.isnan(scores[1])  # diverged, whatever it scored before
    assert scores[:1] + scores[2:] == [0.5, 0.25, 0.5, 0.75, 0.5]
    assert [member["solved_at"] for member in results["members"]] == [None, 2, None, 4, None, None]
    assert results["tuning"]["learning_rate"] == 3e-3


def test_without_validation_nothing_is_chosen():
    results = blank()
    before = copy.deepcopy(results["tuning"])
    add(results, fitted(None))
    assert results["tuning"] == before


def test_a_grid_is_trained_in_one_program_and_reported_whole(command, tmp_path, capsys, monkeypatch):
    def validation(results, task, fitted):
        """With the middle rate the best on the validation split, whatever four steps of training came to."""
        fitted.validation = {"accuracy": np.array([0.1, 0.2, 0.6, 0.7, 0.9, 0.1], np.float32)}
        add_tuning(results, task, fitted)

    monkeypatch.setattr(seqlab.record, "add_tuning", validation)
    typed = command(GRID, tmp_path)
    assert typed.code == 0, typed.lines
    (file,) = tmp_path.rglob("results.json")
    results = read_results(file.parent)
    assert [(m["learning_rate"], m["seed"]) for m in results["members"]] == [(r, s) for r in RATES for s in (0, 1)]
    tuning = results["tuning"]
    assert (tuning["metric"], tuning["learning_rate"], tuning["at_edge"]) == ("accuracy", 1e-3, False)
    assert np.shape(tuning["validation"]) == (3, 2)
    assert len(results["measures"]["accuracy"]["values"]) == 6  # all members are kept
    assert judged(results).tolist() == [2, 3]
    shown = "\n".join(typed.lines)
    assert "valid/accuracy at 0.001 " in shown and "0.65 [0.6, 0.7], chosen" in shown.replace("0.6000", "0.6")
    assert "2 of 6 members" in shown and "widen" not in shown

    board = EventAccumulator(str(file.parent)).Reload()
    (test,) = board.Scalars("test/accuracy")
    assert test.value == pytest.approx(np.mean(main_scores(results)))  # one float32
    assert board.Scalars("tuning/learning_rate")[0].value == np.float32(1e-3)
    assert board.Scalars("tuning/at_edge")[0].value == 0
    assert "tuning/accuracy" in board.Tags()["images"]
    by_rate = [
        EventAccumulator(str(file.parent / f"lr={rate:g}")).Reload().Scalars("train/loss")[-1].value for rate in RATES
    ]
    assert len(set(by_rate)) == 3
    assert np.mean(by_rate) == pytest.approx(board.Scalars("train/loss")[-1].value)

    assert main([str(tmp_path / "runs")]) == 0
    assert "2 of 6" in capsys.readouterr().out


def test_a_rate_that_stands_twice_is_refused(command, tmp_path):
    typed = command("population.learning_rates=[1e-3,0.001]", tmp_path)
    assert (typed.code, len(typed.lines)) == (2, 1)
    assert "a rate twice" in typed.lines[0]
