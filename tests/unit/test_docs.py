"""Commands that the documentation shows exist, with the flags it shows; the Python it shows runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def commands(program: str) -> set[str]:
    """Everything in code (indented, or between backticks) that begins with `program`."""
    found = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found |= set(re.findall(rf"`({program} [^`]+)`", text))
        found |= {match.split("  #")[0].strip() for match in re.findall(rf"^    ({program} .*)$", text, re.MULTILINE)}
    return found


def test_the_two_commands_at_the_top_of_the_readme_are_make_demo_and_make_test() -> None:
    indented = re.findall(r"^    (\S.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [line.split("#")[0].strip() for line in indented[:2]] == ["make demo", "make test"]


@pytest.mark.parametrize("command", sorted(commands("make")))
def test_every_make_target_that_is_named_exists(command: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word for word in shlex.split(command)[1:] if "=" not in word]
    assert words and set(words) <= set(targets)


@pytest.mark.parametrize("command", sorted(commands("expertide")))
def test_every_command_that_is_shown_exists_with_its_flags(command: str) -> None:
    words = shlex.split(command)[1:]
    names = [word for word in words if re.fullmatch(r"[a-z]+", word)]
    # `trace diff` is a command of two words.
    path = names[:2] if names[:1] == ["trace"] else names[:1]
    done = subprocess.run(
        [sys.executable, "-m", "expertide", *path, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for flag in (word for word in words if re.match(r"-{1,2}[a-z]", word)):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", done.stdout), f"{command}: {flag} is not in its help"


def test_the_python_of_the_readme_runs_and_answers() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        assert (page.parent / link).exists(), link


def test_the_page_on_the_server_names_every_field_and_every_error() -> None:
    from expertide.server import schemas
    from expertide.server.errors import STATUS

    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    fields = {*schemas.IGNORED, *schemas.REFUSED_IN_CHAT}
    for kind in (schemas.CompletionRequest, schemas.ChatRequest, schemas.TokenizeRequest, schemas.DetokenizeRequest):
        fields |= set(kind.model_fields)
    assert not {name for name in fields if f"`{name}`" not in page}
    assert not {str(status) for status, _, _ in STATUS.values() if str(status) not in page}
