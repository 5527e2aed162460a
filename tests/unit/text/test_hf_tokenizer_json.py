"""A tokenizer.json beside the model: used as written, with what its neighbours say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from expertide.errors import FormatError, RequestError, UnsupportedError
from expertide.formats.gguf_values import GgufMetadata
from expertide.formats.tensors import ModelFiles
from expertide.text.byte_alphabet import BYTE_TO_CHAR
from expertide.text.tokenizer import Tokenizer
from text_samples import mixed_lines, toy_metadata

BOS, EOS, THINK = 257, 258, 259


def pipeline() -> Any:
    vocab = {BYTE_TO_CHAR[byte]: byte for byte in range(256)} | {"th": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<b>", special=True), AddedToken("<e>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend


def write(folder: Path, backend: Any, **neighbours: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in neighbours.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tokenizer.json"


CONFIG = {
    "bos_token": "<b>",
    "eos_token": {"content": "<e>"},
    "add_bos_token": True,
    "chat_template": "{{ bos_token }}!",
}


def test_ids_equal_those_of_the_pipeline_itself(tmp_path: Path) -> None:
    backend = pipeline()
    tokenizer = Tokenizer.from_hf_json(write(tmp_path, backend, tokenizer_config=CONFIG))
    for line in mixed_lines(300, seed=9):
        ids = tokenizer.encode(line, add_bos=False)
        assert ids == backend.encode(line, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == line


def test_special_tokens_are_hidden_and_added_words_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_json(write(tmp_path, pipeline(), tokenizer_config=CONFIG))
    assert tokenizer.encode("th<think><e>") == [BOS, 256, THINK, EOS]
    assert tokenizer.decode([BOS, 256, THINK, EOS]) == "th<think>"
    assert tokenizer.vocab_size == 260


def test_neighbours_name_begin_end_and_template(tmp_path: Path) -> None:
    path = write(
        tmp_path, pipeline(), tokenizer_config=CONFIG, generation_config={"eos_token_id": [EOS, BOS, 97, True]}
    )
    tokenizer = Tokenizer.from_hf_json(path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, EOS)
    assert tokenizer.stop_ids == {EOS, BOS}
    assert tokenizer.apply_chat_template([]) == "<b>!"
    assert tokenizer.encode(tokenizer.apply_chat_template([])) == [BOS, 33]


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    path = write(tmp_path, pipeline(), tokenizer_config=CONFIG)
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_hf_json(path).apply_chat_template([]) == "file"


def test_of_several_templates_the_default_one_is_used(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = write(tmp_path, pipeline(), tokenizer_config=CONFIG | {"chat_template": several})
    assert Tokenizer.from_hf_json(path).apply_chat_template([]) == "d"


def test_a_pipeline_that_begins_texts_itself_is_followed(tmp_path: Path) -> None:
    backend = pipeline()
    backend.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", BOS)])
    tokenizer = Tokenizer.from_hf_json(write(tmp_path, backend, tokenizer_config={"bos_token": "<b>"}))
    assert tokenizer.encode("th") == [BOS, 256]


def test_a_prompt_is_never_cut_by_the_file(tmp_path: Path) -> None:
    backend = pipeline()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_hf_json(write(tmp_path, backend))
    assert tokenizer.encode("abcdefgh") == list(b"abcdefgh")


def test_another_kind_of_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    backend = pipeline()
    backend.decoder = decoders.Metaspace()
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: tokenizer kind BPE with decoder Metaspace"):
        Tokenizer.from_hf_json(write(tmp_path, backend))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_neighbour_is_named(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, pipeline())
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: "):
        Tokenizer.from_hf_json(path)


def test_an_end_token_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, pipeline(), tokenizer_config={"eos_token": "<nope>"})
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: eos_token '<nope>' is not in tokenizer\.json"):
        Tokenizer.from_hf_json(path)


# Which of the two a model uses


def model_files(folder: Path, container: str, metadata: dict[str, object]) -> ModelFiles:
    return ModelFiles(container, (folder / "model.bin",), (0,), metadata, {})


def test_a_gguf_vocabulary_wins_over_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, pipeline(), generation_config={"eos_token_id": 256})
    tokenizer = Tokenizer.from_files(model_files(tmp_path, "gguf", toy_metadata()))
    assert tokenizer.pre_tokenizer == "gpt-2"
    assert tokenizer.stop_ids == {256, 257}


def test_a_gguf_file_keeps_no_second_copy_of_its_vocabulary(tmp_path: Path) -> None:
    class Arrays(GgufMetadata):
        num_forgotten = 0

        def forget_decoded(self) -> None:
            self.num_forgotten += 1

    metadata = Arrays(tmp_path / "model.bin", toy_metadata())
    Tokenizer.from_files(ModelFiles("gguf", (tmp_path / "model.bin",), (0,), metadata, {}))
    assert metadata.num_forgotten == 1


def test_a_damaged_generation_config_beside_a_gguf_only_warns(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    tokenizer = Tokenizer.from_files(model_files(tmp_path, "gguf", toy_metadata()))
    assert "generation_config.json: not valid JSON" in tokenizer.warnings[0]


@pytest.mark.parametrize("container", ["gguf", "safetensors"])
def test_a_model_without_a_vocabulary_uses_the_file_beside_it(tmp_path: Path, container: str) -> None:
    write(tmp_path, pipeline())
    files = model_files(tmp_path, container, {})
    assert Tokenizer.from_files(files).pre_tokenizer == "tokenizer.json"
    with pytest.raises(RequestError, match=r"--pre-tokenizer gpt-2: has no effect"):
        Tokenizer.from_files(files, pre_tokenizer="gpt-2")


def test_a_model_with_neither_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"model\.bin: has no tokenizer inside and no tokenizer\.json beside it"):
        Tokenizer.from_files(model_files(tmp_path, "safetensors", {}))


def test_torch_is_not_imported_with_the_tokenizer() -> None:
    code = "import sys, expertide.text.tokenizer; assert 'torch' not in sys.modules and 'jinja2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
