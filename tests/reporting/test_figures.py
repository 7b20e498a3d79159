import io

import numpy as np

from seqlab.reporting.figures import bar_figure, curve_figure, measure_figures, tuning_figures
from seqlab.reporting.tuning import tuned, untuned

GAPS = (1, 4, 16)


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def draw(figure):
    """Lays the figure out as saving it does."""
    figure.savefig(io.BytesIO())
    return figure


def test_curves_are_the_interquartile_mean_with_its_interval_as_a_band():
    # a quarter of all resamples of two holds the lower one only, so the interval is all there is; of one there is none
    values = np.array([[1.0, 0.5, np.nan], [0.5, 0.25, 0.5]])
    (axes,) = curve_figure({"ssm": (GAPS, values)}, "gap", "recall", {"chance": 0.125}, log_x=True).axes
    mean, chance = axes.lines
    np.testing.assert_array_equal(mean.get_xydata(), [[1, 0.75], [4, 0.375], [16, 0.5]])
    np.testing.assert_array_equal(chance.get_ydata(), [0.125, 0.125])
    (band,) = axes.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert corners == {(1, 1.0), (4, 0.5), (1, 0.5), (4, 0.25)}
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


RATES = (3e-3, 3e-4, 1e-3)


def tuned_run(validation, **parts):
    members = [{"learning_rate": rate, "metrics": {"accuracy": 0.5}} for rate in RATES for _ in validation[0]]
    tuning = tuned(untuned("accuracy", True, RATES), validation)
    return {"tuning": tuning, "members": members, "measures": {}, "ceilings": {}} | parts


def test_validation_scores_over_learning_rates_with_a_ring_around_the_chosen_one():
    runs = {
        "ssm": tuned_run([[0.5, 0.5], [0.25, 0.25], [0.75, 0.75]]),
        "gru": tuned_run([[np.nan, 0.9], [0.25, 0.25], [0.5, 0.75]]),  # too many diverged at the highest rate
        "rnn": {"tuning": untuned("accuracy", True, RATES)},  # was interrupted
    }
    ((name, figure),) = tuning_figures(runs).items()
    assert name == "tuning/accuracy"
    ssm, gru, *rings = draw(figure).axes[0].lines
    np.testing.assert_array_equal(ssm.get_xydata(), [[3e-4, 0.25], [1e-3, 0.75], [3e-3, 0.5]])
    np.testing.assert_array_equal(gru.get_ydata(), [0.25, 0.625, np.nan])
    assert [(*ring.get_xdata(), *ring.get_ydata()) for ring in rings] == [(1e-3, 0.75), (1e-3, 0.625)]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0.0003", "0.001", "0.003"]
    assert legend(figure) == ["ssm", "gru"]


def test_measures_are_shown_of_the_members_with_the_chosen_rate():
    run = tuned_run([[0.1], [0.2], [0.9]], measures={"accuracy": {"axes": {}, "values": [0.25, 0.5, 0.75]}})
    (bar,) = measure_figures({"ssm": run})["accuracy"].axes[0].patches
    assert bar.get_height() == 0.75


def test_bars_with_long_names_are_told_apart_in_the_legend(tmp_path):
    names = [f"ssm width={width} learning_rate=0.00122960711" for width in range(9)]
    figure = bar_figure({name: [0.1, 0.2] for name in names}, "accuracy", {"chance": 0.1})
    figure.savefig(tmp_path / "bars.png")  # where what does not fit is a warning, which here is an error
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["chance", *names]
    assert not figure.axes[0].get_xticklabels()
