"""Who is lost, by what the ranks say."""

import pytest

from llmq.comm.store import Beat, Watched, lost_in_words, lost_ranks

PATIENCE = 60.0


class Board:
    """Ranks that have said (collective, count, doing), and then nothing else for some seconds, although alive."""

    def __init__(self, *ranks, seconds=0, alive=True):
        self.ranks = {rank: Watched() for rank in range(len(ranks))}
        for second in range(seconds + 1):
            for number, (collective, count, doing) in enumerate(ranks):
                if alive or not second:
                    self.hear(number, collective, count, doing)
            self.tick()

    def hear(self, rank, collective, count, doing="", step=3):
        self.ranks[rank].hear(Beat(step, collective, count), doing)

    def tick(self):
        """A second."""
        for rank in self.ranks.values():
            rank.tick(1.0)

    def lost(self, size=None):
        return lost_ranks(self.ranks, size or len(self.ranks), PATIENCE)


COMPUTES = ("gather", 8, ""), ("", 7, ""), ("gather", 8, "")
STANDS = "it stands still for 61 s, and others wait for it"
STUCK = "it does not come out of a collective for 61 s"
SILENT = "no sign of life for 51 s: its process, or its machine, is stopped or cut off"


@pytest.mark.parametrize(
    ("ranks", "seconds", "alive", "lost"),
    [
        (COMPUTES, 58, True, {}),
        (COMPUTES, 60, True, {1: STANDS}),
        ([("gather", 8, ""), ("reduce", 7, "")], 60, True, {1: STANDS}),
        ([("", 7, "exporting"), ("gather", 8, "")], 3600, True, {}),
        # rank 2 is in an earlier collective than rank 1, and waits for rank 0 as well
        ([("", 6, "exporting"), ("gather", 8, ""), ("reduce", 7, "")], 3600, True, {}),
        ([("", 7, "exporting"), ("", 7, ""), ("gather", 8, "")], 60, True, {1: STANDS}),
        ([("", 7, ""), ("", 7, "")], 3600, True, {}),  # all compute
        ([("gather", 8, ""), ("gather", 8, "")], 60, True, dict.fromkeys(range(2), STUCK)),
        ([("", 8, ""), ("gather", 8, "")], 60, True, {1: STUCK}),
        ([("", 8, "exporting"), ("", 8, "")], 50, False, dict.fromkeys(range(2), SILENT)),
    ],
)
def test_ranks_that_stand_still_are_lost_where_others_wait_for_them(ranks, seconds, alive, lost):
    assert Board(*ranks, seconds=seconds, alive=alive).lost() == lost


def test_a_lost_rank_says_where_it_was_last_seen():
    said = lost_in_words(1, STANDS, Board(*COMPUTES, seconds=60).ranks[1].beat)
    assert said == f"rank 1 is lost: {STANDS} (last seen in step 3, after collective 7)"


def test_nobody_is_lost_while_all_advance():
    board = Board(("", 0, ""), ("", 0, ""))
    for count in range(500):
        for rank in range(2):
            board.hear(rank, "reduce", count, step=count)
        board.tick()
        assert not board.lost()


def test_the_time_of_what_took_long_does_not_count_afterwards():
    board = Board(("", 7, "exporting"), ("gather", 8, ""), seconds=600)
    board.hear(0, "", 7)
    board.tick()
    assert not board.lost()


def test_ranks_that_were_just_released_are_not_lost():
    """All have waited for ten minutes; what rank 0 does now has not reached what they say."""
    board = Board(("", 3, "exporting"), ("reduce", 4, ""), ("gather", 5, ""), seconds=600)
    for seconds in range(60):
        for rank, (collective, count) in enumerate([("reduce", 4), ("reduce", 4), ("gather", 5)]):
            board.hear(rank, collective, count)
        assert not board.lost(), seconds
        board.tick()
    assert board.lost().keys() == {0, 1}


def test_nor_are_those_in_a_collective_that_all_have_now_begun():
    board = Board(("", 3, "exporting"), ("reduce", 4, ""), ("reduce", 4, ""), seconds=600)
    board.hear(0, "reduce", 4)
    board.tick()
    assert not board.lost()


def test_a_silent_rank_is_lost_before_those_that_wait_for_it():
    board = Board(("gather", 8, ""), ("gather", 8, ""))
    for _ in range(46):
        board.hear(0, "gather", 8)
        board.tick()
    assert board.lost().keys() == {1} and "no sign of life for 47 s" in board.lost()[1]


def test_a_rank_that_left_is_not_missed_until_others_wait_for_it():
    board = Board(("", 8, ""), ("", 8, ""))
    board.ranks[1].leave()
    for _ in range(100):
        board.hear(0, "", 8, step=4)
        board.tick()
    assert not board.lost()
    for _ in range(60):
        board.hear(0, "gather", 9, step=4)
        assert not board.lost()
        board.tick()
    assert board.lost() == {1: "it has ended, and others wait for it"}


def test_a_rank_that_left_may_have_been_the_last_to_come():
    board = Board(("gather", 9, ""), ("", 8, "exporting"), seconds=100)
    board.ranks[1].leave()
    board.tick()
    assert not board.lost()


def test_a_rank_that_failed_is_lost_at_once_with_its_reason():
    board = Board(("gather", 8, ""), ("", 7, ""))
    board.ranks[1].problem = "it has failed with DataError: no data"
    assert board.lost() == {1: "it has failed with DataError: no data"}


def test_ranks_that_are_not_watched_yet_are_waited_for():
    board = Board(("gather", 1, ""))
    for _ in range(1000):
        board.hear(0, "gather", 1)
        board.tick()
    assert not board.lost(size=2)
