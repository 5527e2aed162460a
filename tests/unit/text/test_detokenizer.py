"""The streaming decoder: whole characters only, and the same text however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertide.text.detokenizer import IncrementalDetokenizer, Utf8Stream, decode_bytes
from expertide.text.tokenizer import Tokenizer
from text_samples import mixed_lines, toy_metadata


class BytePieces:
    """A tokenizer whose token i is pieces[i]."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def stream(pieces: list[bytes]) -> list[str]:
    detokenizer = IncrementalDetokenizer(BytePieces(pieces))
    return [detokenizer.push(token_id) for token_id in range(len(pieces))] + [detokenizer.flush()]


def test_a_character_over_several_tokens_arrives_with_its_last_byte() -> None:
    assert stream([b"a\xf0", b"\x9f", b"\x99", b"\x82b"]) == ["a", "", "", "🙂b", ""]


def test_bytes_of_two_characters_in_one_token_are_told_apart() -> None:
    assert stream([b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd"]) == ["", "你", "好", ""]


@pytest.mark.parametrize("tail", [b"\xf0\x9f\x99", b"\xe4", b"\x80", b"\xff", b"\xff\xfe\xe4\xbd", b"\xed\xa0\x80"])
def test_a_tail_that_is_no_character_is_dropped_in_both_modes(tail: bytes) -> None:
    assert decode_bytes([b"ok", tail]) == "ok"
    assert "".join(stream([b"ok", tail])) == "ok"
    assert "".join(stream([b"ok", *(bytes([byte]) for byte in tail)])) == "ok"


def test_invalid_bytes_inside_a_text_are_shown_once_text_follows() -> None:
    assert stream([b"a", b"\xff", b"\xf0\x9f", b"b"]) == ["a", "", "", "\ufffd\ufffdb", ""]


def test_a_replacement_character_that_the_text_contains_is_kept_at_the_end() -> None:
    assert decode_bytes(["x\ufffd".encode()]) == "x\ufffd"


def test_a_flushed_detokenizer_starts_a_new_text() -> None:
    detokenizer = IncrementalDetokenizer(BytePieces([b"\xf0\x9f", b"a"]))
    detokenizer.push(0)
    assert detokenizer.flush() == ""
    assert detokenizer.push(1) == "a"


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_how_bytes_are_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(borders)]
    shown = stream(pieces)
    assert "".join(shown) == decode_bytes([data])
    for text in shown:
        text.encode("utf-8")  # whole characters: a lone surrogate would raise


@given(data=st.binary(max_size=40))
def test_the_text_is_python_s_own_lossy_decoding_less_its_tail(data: bytes) -> None:
    assert data.decode("utf-8", errors="replace").startswith(decode_bytes([data]))


@given(text=st.text(st.characters(exclude_categories=("Cs",))))
def test_valid_text_comes_back_whole(text: str) -> None:
    stream_of_bytes = Utf8Stream()
    assert "".join(stream_of_bytes.push(bytes([byte])) for byte in text.encode()) == text


def test_streamed_tokens_of_real_lines_concatenate_to_the_full_decode() -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(merges=["t h", "th e", "Ġ the", "ä ½"]))
    for line in mixed_lines(200, seed=3):
        ids = tokenizer.encode(line)
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(detokenizer.push(token_id) for token_id in ids) == tokenizer.decode(ids) == line
