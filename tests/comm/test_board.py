"""Who is lost, by what the ranks say."""

from llmq.comm.board import Beat, Watched, lost_ranks

PATIENCE = 60.0


class Board:
    """What ranks have said, by their numbers."""

    def __init__(self, size):
        self.ranks = {rank: Watched() for rank in range(size)}

    def heard(self, rank, beat, doing):
        self.ranks[rank].hear(beat, doing)

    def tick(self):
        """A second."""
        for rank in self.ranks.values():
            rank.tick(1.0)

    def lost(self):
        return lost_ranks(self.ranks, len(self.ranks), PATIENCE)


def lost_of(board):
    return {one.rank: one.why for one in board.lost()}


def board_of(*ranks, seconds=0.0, alive=True):
    """Ranks that have said (collective, count, doing), and then nothing else for some seconds, although alive."""
    board = Board(len(ranks))
    for second in range(int(seconds) + 1):
        for number, (collective, count, doing) in enumerate(ranks):
            if alive or not second:
                board.heard(number, Beat(3, collective, count), doing)
        board.tick()
    return board


def test_nobody_is_lost_while_all_advance():
    board = board_of(("", 0, ""), ("", 0, ""))
    for count in range(500):
        for rank in range(2):
            board.heard(rank, Beat(count, "reduce", count), "")
        board.tick()
        assert not board.lost()


def test_a_rank_that_computes_while_the_others_wait_is_lost_after_the_patience():
    ranks = ("gather", 8, ""), ("", 7, ""), ("gather", 8, "")
    assert lost_of(board_of(*ranks, seconds=58)) == {}
    assert lost_of(board_of(*ranks, seconds=60)) == {1: "it stands still for 61 s, and others wait for it"}
    [one] = board_of(*ranks, seconds=60).lost()
    right = "rank 1 is lost: it stands still for 61 s, and others wait for it (last seen in step 3, after collective 7)"
    assert str(one) == right


def test_a_rank_in_an_earlier_collective_than_the_others_is_lost():
    assert lost_of(board_of(("gather", 8, ""), ("reduce", 7, ""), seconds=60)).keys() == {1}


def test_what_may_take_long_is_no_loss():
    assert not lost_of(board_of(("", 7, "exporting"), ("gather", 8, ""), seconds=3600))


def test_nor_are_the_ranks_that_wait_for_it_and_for_each_other():
    """Rank 2 is in an earlier collective than rank 1, and waits for rank 0 as well."""
    assert not lost_of(board_of(("", 6, "exporting"), ("gather", 8, ""), ("reduce", 7, ""), seconds=3600))


def test_a_rank_beside_one_that_may_take_long_is_still_found():
    ranks = ("", 7, "exporting"), ("", 7, ""), ("gather", 8, "")
    assert lost_of(board_of(*ranks, seconds=60)).keys() == {1}


def test_the_time_of_what_took_long_does_not_count_afterwards():
    board = board_of(("", 7, "exporting"), ("gather", 8, ""), seconds=600)
    board.heard(0, Beat(3, "", 7), "")
    board.tick()
    assert not board.lost()


def test_ranks_that_were_just_released_are_not_lost():
    """All have waited for ten minutes; what rank 0 does now has not reached what they say."""
    board = board_of(("", 3, "exporting"), ("reduce", 4, ""), ("gather", 5, ""), seconds=600)
    for seconds in range(60):
        for rank, beat in enumerate([Beat(3, "reduce", 4), Beat(3, "reduce", 4), Beat(3, "gather", 5)]):
            board.heard(rank, beat, "")
        assert not board.lost(), seconds
        board.tick()
    assert lost_of(board).keys() == {0, 1}


def test_nor_are_those_in_a_collective_that_all_have_now_begun():
    board = board_of(("", 3, "exporting"), ("reduce", 4, ""), ("reduce", 4, ""), seconds=600)
    board.heard(0, Beat(3, "reduce", 4), "")
    board.tick()
    assert not board.lost()


def test_all_that_compute_for_long_are_not_lost():
    assert not lost_of(board_of(("", 7, ""), ("", 7, ""), seconds=3600))


def test_a_collective_that_all_have_begun_and_none_leaves_is_lost_with_all_in_it():
    found = lost_of(board_of(("gather", 8, ""), ("gather", 8, ""), seconds=60))
    assert found == dict.fromkeys(range(2), "it does not come out of a collective for 61 s")
    assert lost_of(board_of(("", 8, ""), ("gather", 8, ""), seconds=60)).keys() == {1}


def test_a_silent_rank_is_lost_before_those_that_wait_for_it():
    board = board_of(("gather", 8, ""), ("gather", 8, ""))
    for _ in range(46):
        board.heard(0, Beat(3, "gather", 8), "")
        board.tick()
    assert lost_of(board).keys() == {1} and "no sign of life for 47 s" in lost_of(board)[1]


def test_silence_counts_while_something_takes_long():
    assert lost_of(board_of(("", 8, "exporting"), ("", 8, ""), seconds=50, alive=False)).keys() == {0, 1}


def test_a_rank_that_left_is_not_missed_until_others_wait_for_it():
    board = board_of(("", 8, ""), ("", 8, ""))
    board.ranks[1].leave()
    for _ in range(100):
        board.heard(0, Beat(4, "", 8), "")
        board.tick()
    assert not board.lost()
    for _ in range(60):
        board.heard(0, Beat(4, "gather", 9), "")
        assert not board.lost()
        board.tick()
    assert lost_of(board) == {1: "it has ended, and others wait for it"}


def test_a_rank_that_left_may_have_been_the_last_to_come():
    board = board_of(("gather", 9, ""), ("", 8, "exporting"), seconds=100)
    board.ranks[1].leave()
    board.tick()
    assert not board.lost()


def test_a_rank_that_failed_is_lost_at_once_with_its_reason():
    board = board_of(("gather", 8, ""), ("", 7, ""))
    board.ranks[1].problem = "it has failed with DataError: no data"
    assert lost_of(board) == {1: "it has failed with DataError: no data"}


def test_ranks_that_are_not_watched_yet_are_waited_for():
    board = Board(1)
    for _ in range(1000):
        board.heard(0, Beat(0, "gather", 1), "")
        board.tick()
    assert not lost_ranks(board.ranks, 2, PATIENCE)
