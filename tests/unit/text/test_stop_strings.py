"""Stop strings over token borders: cut exactly, nothing held longer than needed, nothing swallowed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertide.errors import RequestError
from expertide.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            assert matcher.flush() == ""
            return shown, True
    return [*shown, matcher.flush()], False


def test_a_stop_string_over_three_pieces_is_cut_exactly_before_it() -> None:
    assert run(["\n\nUser:"], ["Paris.\n", "\nUs", "er: more"]) == (["Paris.", "", ""], True)


def test_text_that_only_began_like_a_stop_string_is_released_as_soon_as_it_is_not() -> None:
    assert run(["END"], ["the E", "N", "O", "x"]) == (["the ", "", "ENO", "x", ""], False)


def test_a_held_tail_comes_out_at_the_end() -> None:
    assert run(["STOP"], ["full ST"]) == (["full ", "ST"], False)


def test_the_tail_may_start_again_inside_itself() -> None:
    assert run(["aab"], ["aa", "aab"]) == (["", "aa"], True)


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert run(["abc", "b"], ["abc"]) == (["a"], True)
    assert run(["abc", "b"], ["a", "b", "c"]) == (["", "a"], True)


def test_of_two_complete_at_once_the_longer_is_cut() -> None:
    assert run(["c", "bc"], ["abc"]) == (["a"], True)


def test_nothing_comes_out_after_the_stop() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], "abc"])
def test_a_stop_string_that_can_not_be_one_is_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match=r"^stop: "):
        StopMatcher(stops)


@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_how_text_is_cut_makes_no_difference_and_no_stop_string_is_shown(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    shown, stopped = run(stops, pieces)
    # The meaning, spelled out: the shortest beginning of the text that ends in a stop string.
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    if ends:
        found = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert "".join(shown) == text[: ends[0] - len(found)]
    else:
        assert "".join(shown) == text


@given(text=st.text("ab", max_size=24), stop=st.text("ab", min_size=1, max_size=4))
def test_only_what_may_still_become_a_stop_string_is_held(text: str, stop: str) -> None:
    matcher = StopMatcher([stop])
    seen = shown = ""
    for char in text:
        seen += char
        piece, stopped = matcher.push(char)
        shown += piece
        if stopped:
            return
        held = seen[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)
