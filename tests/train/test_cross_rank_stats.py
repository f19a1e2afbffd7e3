"""What the reporting rank reads from the figures that all ranks post."""

from torch.distributed import HashStore

from penstock.train.cross_rank_stats import Board, BubbleMeter, bytes_of_all


def test_every_rank_s_last_figures_are_read():
    store = HashStore()
    boards = [Board(store, rank, 3) for rank in range(3)]
    assert boards[2].read() == {}
    boards[0].post({"busy": 1.0})
    boards[2].post({"busy": 2.0})
    boards[0].post({"busy": 3.0})
    assert boards[1].read() == {0: {"busy": 3.0}, 2: {"busy": 2.0}}


def test_bytes_are_those_of_all_ranks_or_of_none():
    """The first line of a run would else have those of the rank that reports, as if there were no other."""
    figures = {1: {"bytes": {"weights": 3}}}
    assert bytes_of_all(figures, 2) == {}
    figures[0] = {"bytes": {"weights": 4}}
    assert bytes_of_all(figures, 2) == {0: {"weights": 4}, 1: {"weights": 3}}


def test_the_bubble_is_idle_time_since_all_ranks_spoke():
    meter = BubbleMeter(2)
    meter.update({0: {"busy": 5.0, "time": 10.0}})  # rank 1 has not spoken yet
    meter.update({0: {"busy": 5.0, "time": 10.0}, 1: {"busy": 2.0, "time": 100.0}})
    assert meter.bubble is None
    meter.update({0: {"busy": 9.0, "time": 14.0}, 1: {"busy": 2.0, "time": 100.0}})  # nothing new from rank 1
    assert meter.bubble is None
    meter.update({0: {"busy": 9.0, "time": 15.0}, 1: {"busy": 5.0, "time": 105.0}})
    assert meter.bubble == 1 - (4 + 3) / (5 + 5)
    meter.update({0: {"busy": 11.0, "time": 17.0}, 1: {"busy": 7.5, "time": 107.0}})  # clocks of busy are not exact
    assert meter.bubble == 0
