"""The whole path, on the smallest run there is: what it leaves on disk, and how it stops, resumes and starts anew."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqlab.reporting.results import KEYS, read_results
from seqlab.reporting.tensorboard import TensorBoard
from seqlab.training.program import Program

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.width=8 model.depth=1 task.length=16 task.pairs=2 task.vocab_size=17 population.seeds=2 "
    "train.batch_size=4 train.eval_batches=1 measure.recall.batches=1 measure.recall.batch_size=4"
)
RUN = f"model=gru {SMALL} train.steps=4 train.chunk=2 train.eval_every=2 train.checkpoint_every=2"


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_a_hurry():
    # what is tested here is not numbers, and half of the time would go into optimising programs that run once
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory):
    """A directory with one finished run in it."""
    directory = tmp_path_factory.mktemp("finished")
    typed = command(RUN, directory)
    assert typed.code == 0, typed.lines
    return directory


@pytest.fixture
def copy(finished, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(finished, tmp_path / "copy")


def run_directory(directory):
    (results,) = directory.rglob("results.json")
    return results.parent


def results_in(directory):
    return read_results(run_directory(directory))


def on_disk(directory):
    """But for the lock, which says who was the last to work there."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def numbers(results):
    """All that must not depend on when and where a run was made."""
    return {name: results[name] for name in ("config", "members", "measures", "ceilings", "controls")}


def test_results_have_the_schema_that_the_readme_documents(finished):
    results = results_in(finished)
    assert set(results) == set(KEYS)
    assert results["status"] == "finished"
    assert results["command"] == f"python -m seqlab.run {RUN}"
    assert results["config"]["model"]["build"]["mixer"]["state_size"] == 8
    assert "${" not in json.dumps(results["config"])
    assert results["versions"]["jax"] == jax.__version__
    assert "cpu" in results["device"].lower()
    assert [(m["seed"], m["learning_rate"], m["status"]) for m in results["members"]] == [
        (seed, 0.003, "finished") for seed in (0, 1)
    ]
    assert set(results["measures"]) == {"accuracy", "recall_by_pairs", "recall_by_gap"}
    for measure in results["measures"].values():
        assert np.shape(measure["values"]) == (2, *(len(axis) for axis in measure["axes"].values()))
    assert [m["metrics"]["accuracy"] for m in results["members"]] == results["measures"]["accuracy"]["values"]
    assert set(results["controls"]) == {"future", "order", "shift", "padding", "packing", "token_by_token"}
    assert all(control["holds"] for control in results["controls"].values())
    cost = results["cost"]
    assert set(cost) == set(KEYS["cost"].split(", "))
    assert all(value > 0 for value in cost.values())
    # 17 words in and out; a GRU: three gates with bias, three recurrent matrices and a bias, a read-out; two norms
    assert cost["parameters"] == 2 * 17 * 8 + 3 * (8 * 8 + 8) + 3 * 8 * 8 + 8 + (8 * 8 + 8) + 2 * 8
    assert cost["state_bytes"] == 8 * 4


def test_tensorboard_has_curves_of_mean_low_and_high_figures_texts_and_a_row_of_hparams(finished):
    directory = run_directory(finished)
    board = EventAccumulator(str(directory)).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4]
    assert {"train/accuracy", "train/gradient_norm", "valid/loss", "valid/accuracy", "test/accuracy"} <= set(
        board.Tags()["scalars"]
    )
    assert board.Tags()["images"]
    assert {"config", "result"} <= set(board.Tags()["tensors"])
    assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(board.PluginTagToContent("hparams"))
    results = results_in(finished)
    (mean,) = board.Scalars("test/accuracy")
    assert mean.value == pytest.approx(np.mean(results["measures"]["accuracy"]["values"]))  # one float32
    low, high = (
        EventAccumulator(str(directory / name)).Reload().Scalars("train/loss")[-1].value for name in ("low", "high")
    )
    assert low <= board.Scalars("train/loss")[-1].value <= high


def test_a_finished_run_says_so_and_touches_nothing(command, finished):
    before = on_disk(finished)
    typed = command(RUN, finished)
    assert typed.code == 0
    assert "is finished already; overwrite=true starts it anew" in typed.lines[0]
    assert any("accuracy" in line for line in typed.lines)
    assert on_disk(finished) == before


def test_overwriting_starts_anew_and_comes_to_the_same(command, finished, copy):
    before = on_disk(copy)
    assert command(f"{RUN} overwrite=true", copy).code == 0
    assert not any(before.get(path) == content for path, content in on_disk(copy).items())
    assert len(list(run_directory(copy).glob("events.*"))) == 1
    again, first = results_in(copy), results_in(finished)
    assert again["config"].pop("overwrite")
    assert not first["config"].pop("overwrite")
    assert numbers(again) == numbers(first)


def test_a_directory_of_another_configuration_is_refused_by_key_and_kept(command, copy):
    file = run_directory(copy) / "config.yaml"
    file.write_text(file.read_text().replace("batch_size: 4\n  chunk: 2", "batch_size: 5\n  chunk: 2"))
    before = on_disk(copy)
    typed = command(RUN, copy)
    assert typed.code == 2
    (line,) = typed.lines
    assert "train.batch_size was 5 and is 4" in line
    assert line.endswith("use overwrite=true")
    assert "train.chunk" not in line
    assert on_disk(copy) == before


@pytest.mark.parametrize("content", [b"", b"model: [", b"\xff\xfe\x00"], ids=["empty", "cut", "binary"])
def test_a_damaged_configuration_is_named_and_kept(command, copy, content):
    file = run_directory(copy) / "config.yaml"
    file.write_bytes(content)
    (run_directory(copy) / "results.json").unlink()
    typed = command(RUN, copy)
    assert typed.code == 2
    (line,) = typed.lines
    assert f"{file.relative_to(copy)} is damaged" in line and line.endswith("use overwrite=true to start anew")
    assert file.read_bytes() == content


def test_damaged_results_are_named(command, copy):
    file = run_directory(copy) / "results.json"
    file.write_text(json.dumps(read_results(run_directory(copy)) | {"tuning": None}))
    typed = command(RUN, copy)
    assert typed.code == 2
    (line,) = typed.lines
    assert "results.json is not a results file: its tuning are None" in line


def test_a_signal_while_measuring_ends_as_interrupted(command, finished, copy, monkeypatch):
    """Also one that comes where Python drops exceptions: the handler only leaves a note."""
    (run_directory(copy) / "results.json").unlink()
    measure = Program.measure

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "measure", interrupted)
        typed = command(RUN, copy)
    assert typed.code == 143
    assert results_in(copy)["status"] == "interrupted"
    assert command(RUN, copy).code == 0
    assert numbers(results_in(copy)) == numbers(results_in(finished))


def test_a_run_killed_before_its_results_were_written_measures_and_trains_no_more(command, finished, copy, monkeypatch):
    steps = []
    monkeypatch.setattr(TensorBoard, "scalars", lambda board, step, values: steps.append((step, *values)))
    (run_directory(copy) / "results.json").unlink()
    typed = command(RUN, copy)
    assert typed.code == 0
    assert "resuming at step 4 of 4" in typed.lines
    assert steps == [(5, "test/accuracy")]  # the outcome stands one step behind the last
    assert numbers(results_in(copy)) == numbers(results_in(finished))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_resumed_by_the_same_command(command, finished, tmp_path, monkeypatch, number, code):
    scalars = TensorBoard.scalars

    def interrupt(board, step, values):
        scalars(board, step, values)
        if "train/loss" in values:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(TensorBoard, "scalars", interrupt)
        typed = command(RUN, tmp_path)
    assert typed.code == code
    results = results_in(tmp_path)
    assert results["status"] == "interrupted"
    assert {member["status"] for member in results["members"]} == {"interrupted"}
    assert [path.name for path in run_directory(tmp_path).glob("checkpoints/*")] == ["2"]

    typed = command(RUN, tmp_path)
    assert typed.code == 0
    assert "resuming at step 2 of 4" in typed.lines
    assert numbers(results_in(tmp_path)) == numbers(results_in(finished))
    steps = [event.step for event in EventAccumulator(str(run_directory(tmp_path))).Reload().Scalars("train/loss")]
    assert steps == [2, 4]


def test_a_run_whose_members_all_diverge_ends_with_code_3(command, tmp_path):
    line = f"{RUN} population.learning_rates=[1e30]"
    assert command(line, tmp_path).code == 3
    results = results_in(tmp_path)
    assert results["status"] == "diverged"
    assert [member["status"] for member in results["members"]] == ["diverged", "diverged"]
    before = on_disk(tmp_path)
    again = command(line, tmp_path)
    assert again.code == 3
    assert "is diverged already" in again.lines[0]
    assert on_disk(tmp_path) == before


def test_one_diverged_member_is_reported_and_the_others_are_judged_without_it(command, finished, tmp_path):
    line = f"{RUN} population.seeds=1 population.learning_rates=[0.003,1e30]"
    assert command(line, tmp_path).code == 0
    results = results_in(tmp_path)
    assert results["status"] == "finished"
    assert [member["status"] for member in results["members"]] == ["finished", "diverged"]
    assert results["members"][0] == results_in(finished)["members"][0]
    assert all(control["holds"] for control in results["controls"].values())


def test_a_bug_leaves_failed_results_its_traceback_and_a_run_that_can_be_resumed(
    command, finished, tmp_path, monkeypatch
):
    def broken(*arguments):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(TensorBoard, "figure", broken)
        typed = command(RUN, tmp_path)
    assert typed.code == 1
    assert typed.lines[-1] == "RuntimeError: out of luck"
    assert results_in(tmp_path)["status"] == "failed"
    assert command(RUN, tmp_path).code == 0
    assert numbers(results_in(tmp_path)) == numbers(results_in(finished))


def test_a_sweep_with_a_bad_job_finishes_the_others(command, finished, tmp_path):
    typed = command(f"-m {RUN} task.pairs=5,2", tmp_path)
    assert typed.code == 2
    assert typed.lines[-2] == "1 of 2 runs finished"
    assert "task.pairs=5" in typed.lines[-1]
    assert "task.pairs: 5 do not fit task.length 16" in typed.lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert results_in(tmp_path)["measures"] == results_in(finished)["measures"]


def environment(**more):
    cache = jax.config.jax_compilation_cache_dir
    ours = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": cache}
    return os.environ | ours | more


def commits(directory):
    """How many commits Orbax has made; unlike `rglob`, a walk does not mind what is renamed meanwhile."""
    return sum("commit_success.txt" in files for _, _, files in os.walk(directory))


def test_ctrl_c_and_sigterm_leave_a_process_that_the_same_command_takes_up(command, tmp_path):
    line = f"model=gru {SMALL} train.steps=1500 train.chunk=5 train.eval_every=1500 train.checkpoint_every=250"
    program = [sys.executable, "-m", "seqlab.run", *line.split()]
    checkpoints, codes = 0, []
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(program, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while commits(tmp_path) <= checkpoints and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
        codes.append(process.returncode)
        assert "Traceback" not in error
        assert results_in(tmp_path)["status"] == "interrupted"
        checkpoints = commits(tmp_path)
    assert codes == [143, 130]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stderr

    whole = tmp_path / "whole"
    whole.mkdir()
    assert command(line, whole).code == 0
    shutil.move(whole, tmp_path.parent / "whole")
    assert numbers(results_in(tmp_path)) == numbers(results_in(tmp_path.parent / "whole"))


def test_the_mixer_of_the_readme_runs_as_a_user_would_write_it(tmp_path):
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["mean.py", "my_conf/model/mean.yaml"]
    for name, content in blocks:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    words = ["--config-dir", "my_conf", "model=mean", *SMALL.split(), "train.steps=2"]
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    del env["JAX_COMPILATION_CACHE_DIR"]

    module = [sys.executable, "-m", "seqlab.run", *words]
    done = subprocess.run(module, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert (run_directory(tmp_path).relative_to(tmp_path)).parts[:3] == ("runs", "mqar", "mean")
    assert list((tmp_path / "cache" / "seqlab" / "xla").iterdir())  # where compiled programs are kept

    # as the console script, for which Python does not look in the current directory; the model's own refusal is enough
    script = [sys.executable, "-P", "-c", "from seqlab.run import main; main()", *words, "model.bidirectional=both"]
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "model.bidirectional=both is unknown" in done.stderr


def test_a_text_that_changed_since_is_refused(command, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    line = (
        "model=gru model.width=8 model.depth=1 task=text task.path=text.txt task.length=8 population.seeds=1 "
        "train.batch_size=2 train.eval_batches=1 train.chunk=1 train.checkpoint_every=1 train.steps=2"
    )
    first = command(line, tmp_path)
    assert first.code == 0, first.lines
    directory = run_directory(tmp_path)
    metrics = read_results(directory)["members"][0]["metrics"]
    assert next(iter(metrics)) == "bits_per_character"  # the main metric stands first, not the first of the alphabet
    (directory / "results.json").unlink()  # as a kill before the end leaves it
    before = on_disk(directory)
    text.write_text("a quick brown fox jumps over the lazy dogs\n" * 40)
    refused = command(line, tmp_path)
    assert refused.code == 2
    assert "other data" in refused.lines[-1] and "overwrite=true" in refused.lines[-1]
    assert on_disk(directory) == before
