import io

import numpy as np
import pytest

from seqlab.reporting.figures import bar_figure, curve_figure, labels

GAPS = (1, 4, 16)


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def draw(figure):
    """Lays the figure out as saving it does."""
    figure.savefig(io.BytesIO())
    return figure


@pytest.mark.parametrize(
    ("runs", "short"),
    [
        (["mqar/ssm/model.width=8,seed=1", "mqar/gru/model.width=8,seed=1"], ["ssm", "gru"]),
        (
            ["mqar/ssm/defaults", "mqar/ssm/population.learning_rates=[1,2]"],
            ["defaults", "population.learning_rates=[1,2]"],
        ),
        (
            ["ssm/seed=1", "ssm/seed=1,train.steps=9"],
            ["ssm/seed=1", "ssm/seed=1,train.steps=9"],
        ),  # else one has no name
        (["mqar/ssm/seed=1,train.steps=9"], ["mqar ssm"]),
        (["ssm/defaults", "gru/seed=1"], ["ssm", "gru seed=1"]),
        (["ssm", "gru"], ["ssm", "gru"]),
        ([""], [""]),
    ],
)
def test_runs_are_labelled_by_what_tells_them_apart(runs, short):
    assert labels(runs) == short


def test_curves_are_the_mean_with_a_band_from_low_to_high():
    values = np.array([[1.0, 0.5, np.nan], [0.5, 0.25, 0.5]])
    (axes,) = curve_figure({"ssm": (GAPS, values)}, "gap", "recall", {"chance": 0.125}, log_x=True).axes
    mean, chance = axes.lines
    np.testing.assert_array_equal(mean.get_xydata(), [[1, 0.75], [4, 0.375], [16, 0.5]])
    np.testing.assert_array_equal(chance.get_ydata(), [0.125, 0.125])
    (band,) = axes.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert corners == {(1, 1.0), (4, 0.5), (16, 0.5), (1, 0.5), (4, 0.25)}
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("gap", "recall", "log")


def test_a_single_member_has_no_band():
    (axes,) = curve_figure({"ssm": (GAPS, np.ones((1, 3)))}, "gap", "recall").axes
    assert not axes.collections


def test_an_axis_of_words_keeps_them():
    figure = draw(curve_figure({"ssm": (["agent", "patient"], np.ones((2, 2)))}, "role", "accuracy"))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["agent", "patient"]


def test_ten_curves_can_be_told_apart_and_their_legend_covers_none():
    labels = [f"model.width={2**i},population.seeds=4" for i in range(10)]
    figure = draw(curve_figure({label: (GAPS, np.ones((2, 3))) for label in labels}, "gap", "recall", {"chance": 0.1}))
    assert legend(figure) == [*labels, "chance"]
    (axes,) = figure.axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 11
    box = figure.legends[0].get_window_extent()
    assert not box.overlaps(axes.get_window_extent())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0
    assert axes.get_window_extent().height > 0.75 * 4.0 * figure.dpi  # what the legend needs was added, not taken


def test_bars_are_means_with_a_dot_a_member():
    figure = bar_figure({"ssm": [0.25, 0.75], "rnn": np.array([0.5])}, "accuracy", {"bag of words": 0.5})
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5]
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.25, 0.75], [0.5], [0.5, 0.5]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ssm", "rnn"]
    assert legend(figure) == ["bag of words"]
