"""Tokenizer from GGUF metadata: control tokens, begin of sequence, stop ids, odd ids and odd text."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertide.errors import RequestError, UnsupportedError
from expertide.text.sizes import tokenizer_bytes
from expertide.text.special_tokens import END_TEXTS
from expertide.text.tokenizer import Tokenizer
from text_samples import toy_metadata

MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ"]  # ids 256..259
BOS, EOS = 260, 261


def toy(**keys: object) -> Tokenizer:
    return Tokenizer.from_metadata(toy_metadata(merges=MERGES, **{"add_bos_token": True, **keys}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return toy()


@given(text=st.text(st.characters(exclude_categories=("Cs",))))
def test_decoding_the_ids_of_a_text_gives_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_merges_are_applied_best_first() -> None:
    assert toy().encode("the the", add_bos=False) == [257, 258]


# Begin of sequence


def test_the_begin_token_stands_in_front_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the") == [BOS, 257]
    assert tokenizer.encode("<|bos|>the") == [BOS, 257]
    assert tokenizer.encode("<|bos|>the", add_bos=True) == [BOS, 257]


def test_the_begin_token_is_left_out_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the", add_bos=False) == [257]


def test_an_empty_prompt_is_the_begin_token_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("pre", "add_bos"), [("deepseek-llm", True), ("llama-bpe", True), ("gpt-2", False), ("qwen2", False)]
)
def test_a_silent_file_adds_the_begin_token_where_its_family_does(pre: str, add_bos: bool) -> None:
    metadata = toy_metadata(pre=pre)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.add_bos == add_bos
    assert tokenizer.encode("") == ([metadata["tokenizer.ggml.bos_token_id"]] if add_bos else [])


def test_what_the_file_says_about_the_begin_token_counts() -> None:
    assert not Tokenizer.from_metadata(toy_metadata(pre="deepseek-llm", add_bos_token=False)).add_bos


def test_a_model_without_a_begin_token_works_and_refuses_to_add_one() -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(control=(), add_bos_token=True))
    assert tokenizer.encode("a") == [97]
    with pytest.raises(RequestError, match="add_bos: the model names no begin-of-sequence token"):
        tokenizer.encode("a", add_bos=True)


# Control, user-defined, unused tokens


def test_control_tokens_in_text_are_matched_only_when_allowed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<|eos|>b", add_bos=False) == [97, EOS, 98]
    plain = tokenizer.encode("a<|eos|>b", add_bos=False, parse_special=False)
    assert EOS not in plain
    assert tokenizer.decode(plain) == "a<|eos|>b"


def test_control_tokens_never_show(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, 257, EOS]) == "the"
    assert tokenizer.token_text(EOS) == "<|eos|>"


def test_user_defined_tokens_are_always_matched_and_shown() -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(user_defined=["<think>", "  x  é"], pre="deepseek-llm"))
    for parse_special in (True, False):
        assert tokenizer.encode("a<think>  x  éb", add_bos=False, parse_special=parse_special) == [97, 258, 259, 98]
    assert tokenizer.decode([97, 258, 259]) == "a<think>  x  é"


@pytest.mark.parametrize("pre", ["deepseek-llm", "llama-bpe"])
def test_unused_tokens_are_never_produced_and_decode_to_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(unused=["PAD", "<unused1>"], pre=pre))
    assert max(tokenizer.encode("PAD<unused1>", add_bos=False)) < 256
    assert tokenizer.decode([97, 258, 259, 98]) == "ab"


def test_llama_bpe_takes_whole_pieces_that_no_merge_leads_to() -> None:
    metadata = toy_metadata(pre="llama-bpe", control=())
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "whole"]  # type: ignore[misc]
    metadata["tokenizer.ggml.token_type"] = [1] * 257
    assert Tokenizer.from_metadata(metadata).encode("whole") == [256]
    assert len(Tokenizer.from_metadata(metadata, pre_tokenizer="qwen2").encode("whole")) == 5


def test_qwen2_text_is_brought_to_nfc() -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_ids_past_the_vocabulary_pad_the_model_and_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 262
    assert tokenizer.decode([97, 262, 1 << 40, 98]) == "ab"
    assert tokenizer.token_text(300) == "<unused 300>"


def test_a_negative_id_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="token id -1: ids begin at 0"):
        tokenizer.decode([97, -1])


def test_empty_texts_as_padding_are_accepted() -> None:
    metadata = toy_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "", ""]  # type: ignore[misc]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5, 1]  # type: ignore[misc]
    assert Tokenizer.from_metadata(metadata).decode([258, 97, 259]) == "a"


def test_byte_tokens_are_their_byte() -> None:
    metadata = toy_metadata(unused=["<0xE4>", "<0xZZ>"])
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"][:-2], 6, 6]  # type: ignore[index]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_bytes(258) == b"\xe4"
    assert tokenizer.token_bytes(259) == b"<0xZZ>"


# Text that is none


@pytest.mark.parametrize("text", ["a\ud83d", "\udc80", "ok \udfff end"])
def test_a_lone_surrogate_is_the_caller_s_error(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match=r"text: character \d is a lone surrogate \(U\+D[0-9A-F]{3}\)"):
        tokenizer.encode(text)
    assert tokenizer.encode("the") == [BOS, 257]


def test_half_a_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    assert tokenizer.decode(ids[:-1]) == "a"
    assert tokenizer.decode(ids) == "a🙂"


# Where a generation ends


def test_every_end_id_that_the_file_names_stops() -> None:
    tokenizer = Tokenizer.from_metadata(
        toy_metadata(control=["<b>", "<x>", "<y>", "<z>"], eos_token_id=257, eot_token_id=258, eom_token_id=259)
    )
    assert tokenizer.stop_ids == {257, 258, 259}


@pytest.mark.parametrize("text", sorted(END_TEXTS))
def test_a_token_with_a_well_known_end_text_stops_even_if_typed_as_normal(text: str) -> None:
    metadata = toy_metadata(control=["<b>", "<e>"], user_defined=[text])
    metadata["tokenizer.ggml.token_type"] = [1] * 259
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.stop_ids == {257, 258}
    assert tokenizer.encode(text, add_bos=False) == [258]
    assert tokenizer.decode([258]) == ""


def test_generation_config_adds_control_tokens_and_no_words() -> None:
    metadata = toy_metadata(control=["<b>", "<x>", "<e>"])
    assert Tokenizer.from_metadata(metadata, generation_eos=[257, 97, 999]).stop_ids == {257, 258}


def test_none_written_as_a_number_names_no_token() -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(eot_token_id=0xFFFF_FFFF, eom_token_id=-1))
    assert tokenizer.stop_ids == {257}


def test_fill_in_tokens_typed_as_normal_are_matched() -> None:
    metadata = toy_metadata(user_defined=["<｜fim▁hole｜>"])
    metadata["tokenizer.ggml.token_type"] = [1] * 259
    assert Tokenizer.from_metadata(metadata).encode("a<｜fim▁hole｜>", add_bos=False) == [97, 258]


# Which pre-tokenizer


def test_an_unknown_pre_tokenizer_is_refused_and_can_be_overridden() -> None:
    metadata = toy_metadata(pre="gpt-9")
    with pytest.raises(UnsupportedError, match=r"m\.gguf: tokenizer\.ggml\.pre.*'gpt-9'"):
        Tokenizer.from_metadata(metadata, source="m.gguf")
    assert Tokenizer.from_metadata(metadata, pre_tokenizer="smollm").pre_tokenizer == "smollm"


def test_a_missing_pre_tokenizer_is_the_architecture_s_with_a_warning() -> None:
    tokenizer = Tokenizer.from_metadata(toy_metadata(pre=None), source="m.gguf")
    assert tokenizer.pre_tokenizer == "deepseek-llm"
    assert len(tokenizer.warnings) == 1
    assert "m.gguf: tokenizer.ggml.pre is missing; using 'deepseek-llm'" in tokenizer.warnings[0]


def test_a_known_pre_tokenizer_gives_no_warning(tokenizer: Tokenizer) -> None:
    assert tokenizer.warnings == ()


def test_bytes_without_a_token_are_worth_a_warning() -> None:
    metadata = toy_metadata()
    metadata["tokenizer.ggml.tokens"][10] = "strange"  # type: ignore[index]
    (warning,) = Tokenizer.from_metadata(metadata, source="m.gguf").warnings
    assert warning.startswith("m.gguf: the vocabulary has no token for 1 of the bytes of UTF-8 (0A)")


# Threads and size


def test_threads_with_different_switches_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    wrong: list[list[int]] = []

    def work(parse_special: bool) -> None:
        expected = [EOS] if parse_special else tokenizer.encode("<|eos|>", add_bos=False, parse_special=False)
        for _ in range(300):
            ids = tokenizer.encode("<|eos|>", add_bos=False, parse_special=parse_special)
            if ids != expected:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("num_tokens", "num_merges", "measured_mib"),
    [(4_096, 3_837, 8.0), (102_400, 5, 25.8), (102_400, 99_757, 37.1), (129_280, 127_741, 55.5)],
)
def test_the_plan_s_figure_is_near_what_was_measured(num_tokens: int, num_merges: int, measured_mib: float) -> None:
    planned_mib = tokenizer_bytes(num_tokens, num_merges) / (1 << 20)
    # Hash tables grow in doublings, which a straight line can not follow closer than this.
    assert 0.96 * measured_mib <= planned_mib <= 1.2 * measured_mib
