"""Popularity profiles: kept by fingerprint, merged, faded, and never believed blindly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from expert_world import ExpertFile, write_experts
from expertide import LLM, SamplingParams
from expertide.experts import popularity
from expertide.experts.popularity import MAX_TOKENS, Profile
from expertide.formats import open_model
from expertide.prepare import model_path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


def profile_of(file: ExpertFile, tokens: float, value: float) -> Profile:
    return Profile(tokens, {layer_id: np.full(8, value) for layer_id in file.catalog.layers})


def test_what_is_saved_is_loaded(file: ExpertFile) -> None:
    assert popularity.load("a", file.catalog) is None
    assert popularity.save("a", profile_of(file, 10, 2.5)) == popularity.path_of("a")
    found = popularity.load("a", file.catalog)
    assert found is not None and found.tokens == 10
    assert all((counts == 2.5).all() for counts in found.layers.values())
    assert list(popularity.path_of("a").parent.iterdir()) == [popularity.path_of("a")], "no half file is left"


def test_old_requests_fade(file: ExpertFile) -> None:
    both = profile_of(file, 100, 10) + profile_of(file, 50, 1)
    assert both.tokens == 150 and both.layers[1][0] == 11
    full = profile_of(file, MAX_TOKENS, 1000) + profile_of(file, MAX_TOKENS / 2, 100)
    assert full.tokens == MAX_TOKENS and full.layers[1][0] == 600


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: "no json",
        lambda c: json.dumps([]),
        lambda c: json.dumps(c | {"format": 2}),
        lambda c: json.dumps(c | {"tokens": "many"}),
        lambda c: json.dumps(c | {"tokens": float("nan")}),
        lambda c: json.dumps(c | {"layers": {}}),
        lambda c: json.dumps(c | {"layers": c["layers"] | {"2": [1.0] * 7}}),
        lambda c: json.dumps(c | {"layers": c["layers"] | {"2": [-1.0] * 8}}),
        lambda c: json.dumps(c | {"layers": c["layers"] | {"2": ["x"] * 8}}),
        lambda c: "[" * 100_000,
    ],
)
def test_a_damaged_profile_is_as_good_as_none(file: ExpertFile, damage) -> None:
    popularity.save("a", profile_of(file, 10, 2))
    path = popularity.path_of("a")
    path.write_text(damage(json.loads(path.read_text())))
    assert popularity.load("a", file.catalog) is None


def test_a_place_that_cannot_be_written_is_no_error(file: ExpertFile, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert popularity.save("a", profile_of(file, 10, 2)) is None


def test_the_fingerprint_is_of_bytes_not_of_names(tmp_path: Path) -> None:
    demo = model_path("demo")
    copy = tmp_path / "other-name.gguf"
    shutil.copy(demo, copy)
    name = popularity.fingerprint(open_model(demo))
    assert popularity.fingerprint(open_model(copy)) == name
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert popularity.fingerprint(open_model(copy)) != name


def test_a_run_leaves_a_profile_and_the_next_one_starts_from_it() -> None:
    def hits(**options: str) -> tuple[str, int]:
        with LLM("demo", context=256, expert_cache="7MiB", **options) as llm:
            assert llm.wait_for_fill(20)
            output = llm.generate("User: What is the capital of France?\n\nAssistant:", SamplingParams(max_tokens=40))
            return llm.placement()["startup_fill"], output.stats["experts"]["fill"]["useful"]

    assert hits()[0] == "even"
    name = popularity.fingerprint(open_model(model_path("demo")))
    with LLM("demo", context=256, expert_cache="7MiB") as llm:
        saved = popularity.load(name, llm.prepared.catalog)
        assert saved is not None and saved.tokens >= popularity.MIN_TOKENS
        assert all(counts.sum() == pytest.approx(4 * saved.tokens) for counts in saved.layers.values()), "K is 4"
    assert hits()[0] == "profile"
    assert hits(startup_fill="even")[0] == "even"
    kind, useful = hits(startup_fill="off")
    assert (kind, useful) == ("off", 0)
