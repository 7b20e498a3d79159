"""What is written is read back by TensorBoard itself: its accumulator, and the backend of its HParams page."""

import time

import numpy as np
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from seqlab.reporting.tensorboard import TensorBoard


def read(directory):
    return EventAccumulator(str(directory)).Reload()


def points(directory, tag):
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def next_second():
    """TensorBoard orders the files of a directory by the second in their names."""
    time.sleep(1.01 - time.time() % 1)


def hparams_page(root):
    """(columns, metric columns, rows) as the HParams page of TensorBoard gets them."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(root)).Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(root))))
    experiment = get_experiment.Handler(RequestContext(), context, "", api_pb2.GetExperimentRequest()).run()
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, slice_size=100)
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    columns = {info.name: info.type for info in experiment.hparam_infos}
    return columns, {(info.name.group, info.name.tag) for info in experiment.metric_infos}, groups


def test_mean_low_and_high_are_overlaid_runs_with_the_same_tag(tmp_path):
    with TensorBoard(tmp_path, 0) as board:
        board.scalars(10, {"valid/accuracy": np.array([0.25, 0.5, 0.75], np.float32), "lr": [1.0, 1.0, 1.0]})
        board.scalars(20, {"valid/accuracy": [0.5, np.nan, 1.0]})
        board.scalars(30, {"valid/accuracy": [np.nan, np.nan, np.inf]})
    mean = points(tmp_path, "valid/accuracy")
    assert mean[:2] == [(10, 0.5), (20, 0.75)]
    assert mean[2][0] == 30 and np.isnan(mean[2][1])
    assert points(tmp_path / "low", "valid/accuracy") == [(10, 0.25), (20, 0.5)]
    assert points(tmp_path / "high", "valid/accuracy") == [(10, 0.75), (20, 1.0)]
    assert points(tmp_path / "low", "lr") == [(10, 1.0)]


def test_a_single_member_has_no_siblings(tmp_path):
    with TensorBoard(tmp_path, 0) as board:
        board.scalars(10, {"loss": np.array([0.5])})
    assert points(tmp_path, "loss") == [(10, 0.5)]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_each_of_several_learning_rates_has_a_curve_of_its_own(tmp_path):
    with TensorBoard(tmp_path, 0, rates=[1e-3, 1e-3, 0.03, 0.03]) as board:
        board.scalars(10, {"loss": [1.0, 3.0, 5.0, np.nan]})
        board.scalars(20, {"loss": [1.0, 2.0, np.nan, np.nan]})
        board.session_end("finished", {"test/loss": [1.0, 2.0]}, 20)  # of the chosen rate alone
    assert points(tmp_path / "lr=0.001", "loss") == [(10, 2.0), (20, 1.5)]
    assert points(tmp_path / "lr=0.03", "loss") == [(10, 5.0)]
    assert points(tmp_path, "loss") == [(10, 3.0), (20, 1.5)]
    assert points(tmp_path, "test/loss") == [(20, 1.5)]
    assert read(tmp_path / "lr=0.001").Tags()["scalars"] == ["loss"]


def test_a_single_learning_rate_has_none(tmp_path):
    with TensorBoard(tmp_path, 0, rates=[1e-3, 1e-3]) as board:
        board.scalars(10, {"loss": [1.0, 3.0]})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["high", "low"]


def test_steps_beyond_the_checkpoint_are_dropped_after_a_crash(tmp_path):
    with TensorBoard(tmp_path, 0) as board:
        for step in (10, 20, 30, 40):
            board.scalars(step, {"loss": [1.0, 3.0]})
    next_second()
    with TensorBoard(tmp_path, 20) as board:
        board.scalars(35, {"loss": [5.0, 7.0]})
    assert points(tmp_path, "loss") == [(10, 2.0), (20, 2.0), (35, 6.0)]
    assert points(tmp_path / "low", "loss") == [(10, 1.0), (20, 1.0), (35, 5.0)]
    assert points(tmp_path / "high", "loss") == [(10, 3.0), (20, 3.0), (35, 7.0)]
    next_second()
    with TensorBoard(tmp_path, 0) as board:  # killed before its first checkpoint: everything is written anew
        board.scalars(0, {"loss": [9.0]})
    assert points(tmp_path, "loss") == [(0, 9.0)]


def test_flushed_points_can_be_read_while_the_run_goes_on(tmp_path):
    with TensorBoard(tmp_path, 0) as board:
        board.scalars(10, {"loss": [1.0, 3.0]})
        board.flush()
        assert points(tmp_path / "high", "loss") == [(10, 3.0)]


def test_figures_and_texts_are_read_back(tmp_path):
    figure = Figure(figsize=(3, 2))
    figure.add_subplot().plot([0, 1], [0, 1])
    with TensorBoard(tmp_path, 0) as board:
        board.figure("recall", 5, figure)
        board.text("config", 0, "model: **ssm**, größer")
    accumulator = read(tmp_path)
    (image,) = accumulator.Images("recall")
    assert (image.step, image.width, image.height) == (5, 3 * 120, 2 * 120)
    assert image.encoded_image_string.startswith(b"\x89PNG")
    (text,) = accumulator.Tensors("config")
    assert text.tensor_proto.string_val[0].decode() == "model: **ssm**, größer"
    assert accumulator.SummaryMetadata("config").plugin_data.plugin_name == "text"


def test_one_hparams_table_has_the_columns_of_all_models(tmp_path):
    runs = {
        "ssm/default": (
            {"model": "ssm", "state_size": np.int64(64), "position": None, "bidirectional": False},
            [0.25, 0.5],
        ),
        "encoder/default": (
            {"model": "encoder", "heads": 4, "state_size": None, "position": "rope", "shape": (1, 2)},
            [0.5, 1.0],
        ),
        "encoder/seed=4": (
            {"model": "encoder", "heads": 4, "state_size": None, "position": "rope", "shape": (1, 2)},
            [1.0, 1.0],
        ),
    }
    for name, (hparams, accuracy) in runs.items():
        with TensorBoard(tmp_path / name, 0) as board:
            board.session_start(hparams, group=hparams["model"])
            board.session_end("finished", {"accuracy": accuracy}, step=100)
    columns, metrics, groups = hparams_page(tmp_path)
    assert columns == {
        "model": api_pb2.DATA_TYPE_STRING,
        "state_size": api_pb2.DATA_TYPE_FLOAT64,
        "heads": api_pb2.DATA_TYPE_FLOAT64,
        "position": api_pb2.DATA_TYPE_STRING,
        "bidirectional": api_pb2.DATA_TYPE_BOOL,
        "shape": api_pb2.DATA_TYPE_STRING,
    }
    assert metrics == {("", "accuracy"), ("low", "accuracy"), ("high", "accuracy")}
    rows = {group.name: group for group in groups}
    assert set(rows) == {"ssm", "encoder"}
    assert [session.name for session in rows["encoder"].sessions] == ["encoder/default", "encoder/seed=4"]
    assert {session.status for group in groups for session in group.sessions} == {api_pb2.STATUS_SUCCESS}
    accuracy = {(value.name.group, value.name.tag): value.value for value in rows["encoder"].metric_values}
    assert accuracy[("", "accuracy")] == (0.75 + 1.0) / 2  # the mean of the two runs' means, exact in float32


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("interrupted", "finished", api_pb2.STATUS_SUCCESS),
        ("failed", "diverged", api_pb2.STATUS_FAILURE),
        ("failed", "interrupted", api_pb2.STATUS_UNKNOWN),
    ],
)
def test_a_resumed_run_shows_how_it_ended_at_last(tmp_path, first, second, status):
    for first_step, end in ((0, first), (20, second)):
        with TensorBoard(tmp_path / "run", first_step) as board:
            board.session_start({"model": "ssm"}, group="ssm")
            board.session_end(end, {"loss": [1.0]}, first_step + 20)
        next_second()
    _, _, (group,) = hparams_page(tmp_path)
    (session,) = group.sessions
    assert session.status == status


def test_an_unknown_end_is_refused(tmp_path):
    with TensorBoard(tmp_path, 0) as board, pytest.raises(ValueError, match=r"'done'.*finished, interrupted"):
        board.session_end("done", {}, 1)
