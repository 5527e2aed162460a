"""The program as people run it: exit codes, one to three lines on stderr, never a traceback; Ctrl-C and broken pipes.

Each test starts the program in a process of its own. Tests that load the model take seconds, so they check several
things at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import broken_files

PROGRAM = [sys.executable, "-m", "expertide"]
QUESTION = "What is the capital of France?"
TALE = "Long ago, in a small town by the sea, there was a young boy named Sam. His favourite thing was a yellow hat."


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("EXPERTIDE_")}
    return env | {"PYTHONIOENCODING": "utf-8"} | more


def run(*arguments: str, text: str | None = None, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        env=environment(**env),
    )


def assert_refused(done: subprocess.CompletedProcess[str], code: int, pattern: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert 1 <= len(lines) <= 3, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(pattern, done.stderr), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["run"], "Missing argument 'MODEL'"),
        (["walk", "demo"], "No such command 'walk'"),
        (["run", "demo", "--no-such-flag"], "No such option: --no-such-flag"),
        (["run", "demo", "-p", "x", "-n", "many"], "--max-tokens.: .*valid integer"),
        (["run", "demo", "-p", "x", "-n", "0"], ": -n: got 0, expected"),
        (["run", "demo", "-p", "x", "--temperature", "-1"], ": --temperature: got -1.0, expected"),
        (["run", "demo", "-p", "x", "--top-p", "2"], ": --top-p: got 2.0, expected"),
        (["run", "demo", "-p", "x", "--top-k", "5"], "--top-k has no effect at temperature 0"),
        (["run", "demo", "-p", "x", "--stop", ""], ": --stop: "),
        (["run", "demo", "-p", "x", "--ram", "lots"], "--ram: size 'lots' is not understood"),
        (["run", "demo", "-p", "x", "--expert-cache", "-4MiB"], "--expert-cache: size"),
        (["run", "demo", "-p", "x", "--vram", "4GiB"], "--vram 4GiB: has no effect"),
        (["run", "demo", "-p", "x", "--device", "cuda"], "--device cuda: this version computes on the CPU only"),
        (["run", "demo", "-p", "x", "--device", "tpu"], "--device tpu: known values are auto, cpu, cuda"),
        (["run", "demo", "-p", "x", "--cache-policy", "best"], "--cache-policy best: known values are"),
        (["run", "demo", "-p", "x", "--threads", "0"], "--threads 0: must lie between"),
        (["run", "demo", "-p", "x", "--context", "1"], "--context 1: must lie between"),
        (["run", "demo", "-p", "x", "--prefill-chunk", "0"], "--prefill-chunk 0: must lie between"),
        (["run", "demo", "-p", "x", "--prompt-file", "y"], "-p and --prompt-file both"),
        (["eval", "demo"], "Missing option '--suite'"),
        (["bench", "demo", "-p", ""], "the prompt is empty"),
        (["trace", "diff", "only-one"], "Missing argument 'B'"),
    ],
)
def test_a_usage_error_exits_with_2_and_names_the_flag(arguments: list[str], pattern: str):
    assert_refused(run(*arguments), 2, pattern)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["run", "no/such/model.gguf", "-p", "x"], "no/such/model.gguf"),
        (["inspect", "no/such/model.gguf"], "no/such/model.gguf"),
        (["run", "demo", "--prompt-file", "no/such/prompt"], "no/such/prompt: cannot be read: No such file"),
        (["run", "demo", "-p", ""], "the prompt is empty"),
        (["run", "demo", "-p", "x", "--json", "no/such/folder/x.json"], "the directory .* does not exist"),
        (
            ["run", "demo", "-p", "x", "--ram", "100MiB"],
            r"the budget is 100 MiB\n  interpreter 2.*\n  raise --ram to \d+MiB",
        ),
        (
            ["run", "demo", "-p", "x", "--expert-cache", "64KiB"],
            "64KiB is below the smallest that works, 624KiB: 6 experts",
        ),
        (["plan", "demo", "--context", "1000000"], "1,000,000.*2,048"),
        (["eval", "demo", "--suite", "no/such/suite"], "no/such/suite: cannot be read"),
        (["trace", "diff", "no/such/a", "no/such/b"], "no trace there"),
        (["inspect", "m" * 300], "m: File name too long"),
        (["inspect", "~no-such-user/model.gguf"], "~no-such-user/model.gguf: no such file"),
        (["plan", "demo", "--json", "m" * 300], "m: cannot be written: File name too long"),
        (["run", "demo", "-p", "x", "--json", "/proc/x.json"], "/proc/x.json: cannot be written: "),
        (["plan", "demo", "--pre-tokenizer", "other"], "--pre-tokenizer other: known names are"),
        (["run", "demo", "-p", "\udcff"], "-p: character 0 is not UTF-8 text"),
    ],
)
def test_what_cannot_be_done_exits_with_1_and_says_why(arguments: list[str], pattern: str):
    assert_refused(run(*arguments), 1, pattern)


@pytest.mark.parametrize(
    ("name", "value"),
    [("EXPERTIDE_KERNELS", "fast"), ("EXPERTIDE_SERIAL_IO", "maybe"), ("EXPERTIDE_CPU_ISA", "mmx")],
)
def test_a_diagnosis_variable_that_cannot_be_read_stops_the_program(name: str, value: str):
    assert_refused(run("plan", "demo", **{name: value}), 1, f"{name}={value}")


def test_an_unknown_diagnosis_variable_stops_every_command():
    for command in (["inspect", "demo"], ["plan", "demo"]):
        assert_refused(run(*command, EXPERTIDE_KERNEL="reference"), 1, "EXPERTIDE_KERNEL: no such environment variable")


def test_standard_input_that_is_not_text_is_refused():
    done = subprocess.run([*PROGRAM, "run", "demo"], input=b"\xff\xfe", capture_output=True, env=environment())
    assert done.returncode == 1
    assert b"standard input: byte 0 is not UTF-8 text" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "demo"], ["plan", "demo", "--json", "-"]])
def test_a_full_disk_under_standard_output_is_named(arguments: list[str]):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=60)
    assert done.returncode == 1
    assert done.stderr == "expertide: standard output: cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "closing", "code", "pattern"),
    [
        (["plan", "demo"], ">&-", 1, "standard output is closed"),
        (["plan", "demo"], "2>&-", 0, "^$"),
        (["plan", "demo"], "<&-", 0, "^$"),
        (["plan", "demo"], "<&- >&- 2>&-", 1, "^$"),
        (["run", "demo"], "<&-", 2, "no prompt"),
        (["chat", "demo"], "<&-", 0, "/exit"),
        (["inspect", "no/such/model"], "2>&-", 1, "^$"),
    ],
)
def test_standard_streams_that_are_closed_never_give_a_traceback(
    arguments: list[str], closing: str, code: int, pattern: str
):
    command = f'exec "$@" {closing}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env=environment(),
    )
    assert done.returncode == code, done.stderr
    assert re.search(pattern, done.stderr) and "Traceback" not in done.stderr, done.stderr


def test_checking_a_json_target_leaves_nothing_behind(tmp_path: Path):
    assert_refused(run("plan", "no/such/model", "--json", str(tmp_path / "x.json")), 1, "no/such/model")
    assert list(tmp_path.iterdir()) == []


def test_names_inside_a_file_cannot_drive_the_terminal(tmp_path: Path):
    path = tmp_path / "model.gguf"
    evil = "\x1b[2J\x1b]0;title\x07"
    entries = [
        broken_files.entry(key, broken_files.STRING, text) for key, text in (("general.architecture", "x"), ("n", evil))
    ]
    tensors = (broken_files.tensor(f"blk.0.{evil}.weight", (64, 4), 0, 0),)
    path.write_bytes(broken_files.gguf_bytes(entries=entries, tensors=tensors))
    done = run("inspect", str(path), "--tensors", "--metadata")
    assert "?[2J?]0;title?" in done.stdout
    assert not set(done.stdout + done.stderr) & set("\x1b\x07")


def test_a_prompt_far_beyond_the_context_is_refused_without_cutting_it(tmp_path: Path):
    prompt = tmp_path / "prompt"
    prompt.write_text("hello world\n" * 1_000_000, encoding="utf-8")
    peak = "import resource, sys; from expertide.cli.main import run_command; code = run_command(sys.argv[1:]); " + (
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10); sys.exit(code)"
    )
    arguments = ["run", "demo", "--raw", "--prompt-file", str(prompt)]
    done = subprocess.run([sys.executable, "-c", peak, *arguments], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 1
    assert re.search(r"the prompt has 11,999,999 characters, the context is 2,048 tokens of at most", done.stderr)
    assert int(done.stdout) < 450  # cutting it into tokens takes 2 GiB


def test_json_never_overwrites_a_file_that_is_no_json_object(tmp_path: Path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert_refused(run("plan", "demo", "--json", str(model)), 1, "will not be overwritten")
    assert model.read_bytes() == b"GGUF"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["inspect", "demo"], ["plan", "demo"]])
def test_help_inspect_and_plan_finish_before_torch_is_imported(arguments: list[str]):
    code = (
        "import sys; from expertide.cli.main import run_command; code = run_command(sys.argv[1:]);"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["run", "demo", "--no-such-flag"], {}),
        (["run", "no/such/file.gguf", "-p", "x"], {}),
        (["run", str(Path(__file__)), "-p", "x"], {}),
        (["run", "demo", "-p", "x", "--ram", "100MiB"], {}),
        (["run", "demo", "-p", "x", "--context", "1000000"], {}),
        (["run", "demo", "-p", "x", "--pre-tokenizer", "other"], {}),
        (["run", "demo", "-p", "x"], {"EXPERTIDE_KERNELS": "fast"}),
        (["run", "demo", "-p", "x"], {"EXPERTIDE_KERNEL": "reference"}),
    ],
)
def test_what_a_refusal_needs_is_known_before_torch_is_imported(arguments: list[str], variables: dict[str, str]):
    code = (
        "import sys; from expertide.cli.main import run_command; code = run_command(sys.argv[1:]);"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, env=environment(**variables))
    assert done.returncode in (1, 2), (done.returncode, done.stderr)
    assert done.stderr


def test_inspect_and_plan_write_json_to_standard_output_and_nothing_else():
    facts = json.loads(run("inspect", "demo", "--json", "-").stdout)
    assert facts["architecture"] == "deepseek2"
    assert facts["experts"]["layers"] * facts["experts"]["per_layer"] == 160
    assert len(facts["tensors"]) == facts["num_tensors"]
    plan = json.loads(run("plan", "demo", "--json", "-", "--expert-cache", "4MiB").stdout)
    assert plan["predicted_bytes"] == sum(plan["shares"].values()) <= plan["ram_budget_bytes"]
    assert plan["shares"]["expert cache"] == 4 << 20


def test_run_answers_and_reports_with_the_documented_json(tmp_path: Path):
    target = tmp_path / "run.json"
    done = run(
        "run", "demo", "-p", QUESTION, "-n", "40", "--expert-cache", "4MiB", "--json", str(target), "--threads", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    facts = json.loads(target.read_text(encoding="utf-8"))
    assert facts["text"].strip() == done.stdout.strip()
    assert facts["finish_reason"] == "stop"
    assert len(facts["token_ids"]) - 1 == facts["timings"]["decode_tokens"]
    assert len(facts["prompt_token_ids"]) == facts["timings"]["prefill_tokens"]
    assert {"load_s", "ttft_s", "prefill_s", "prefill_tps", "decode_s", "decode_tps"} <= facts["timings"].keys()
    assert {
        "ram_budget_bytes", "ram_peak_bytes", "vram_budget_bytes", "vram_peak_bytes", "vram_allocated_peak_bytes",
        "vram_reserved_peak_bytes", "resident_bytes", "expert_cache_bytes", "kv_bytes",
    } <= facts["memory"].keys()  # fmt: skip
    assert facts["memory"]["expert_cache_bytes"] == 4 << 20
    assert facts["memory"]["ram_peak_bytes"] <= facts["memory"]["ram_budget_bytes"]
    decode = facts["experts"]["decode"]
    # Five MoE layers, four experts a token, one token a step.
    assert decode["requests"] == 5 * 4 * facts["timings"]["decode_tokens"] == decode["hits_host"] + decode["misses"]
    assert decode["read_bytes"] >= decode["misses"] * decode["needed_bytes"] // decode["requests"] > 0
    assert facts["placement"]["compute_placement"] == "fixed"
    # Stderr: what was loaded, and one line of expert statistics; no bars, as it is no terminal.
    lines = done.stderr.strip().splitlines()
    assert re.match(
        r"experts: [\d,]+ looked up .*, [\d.]+ % found in RAM, [\d.]+ MiB read, [\d.]+ s spent waiting for the disk; "
        r"RAM has room for 27 % of all experts$",
        lines[-1],
    ), lines
    assert len(lines[-1]) <= 200
    assert re.match(r"prompt: .* tokens at .*/s; answer: .*; peak \d+ MiB of --ram auto \(.*\)$", lines[-2]), lines
    assert "context 2,048 tokens" in lines[-3] and "(27 % of all experts)" in lines[-3]
    # Behind a chat template the answer begins with a space that is part of no word: shown without, kept in the JSON.
    assert facts["text"].startswith(" ") and not done.stdout.startswith(" ")


def test_a_prompt_from_standard_input_is_answered_and_json_alone_goes_to_standard_output():
    done = run("run", "demo", "--raw", "-n", "8", "--json", "-", text=f"User: {QUESTION}\n\nAssistant:")
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout)["text"]


def test_one_last_newline_of_a_prompt_is_dropped_wherever_it_came_from(tmp_path: Path):
    """`echo 5-2=? | expertide run demo` asked another question than `-p "5-2=?"`."""
    prompt = tmp_path / "prompt"
    prompt.write_bytes(b"5-2=?\r\n")
    command = ["run", "demo", "-n", "1", "--json", "-"]
    asked = json.loads(run(*command, "-p", "5-2=?").stdout)["prompt_token_ids"]
    assert json.loads(run(*command, text="5-2=?\n").stdout)["prompt_token_ids"] == asked
    assert json.loads(run(*command, "--prompt-file", str(prompt)).stdout)["prompt_token_ids"] == asked
    assert json.loads(run(*command, text="5-2=?\n\n").stdout)["prompt_token_ids"] != asked


def test_an_answer_without_text_says_so():
    done = run("run", "demo", "-p", QUESTION, "-n", "1", "--stop", " ")
    assert done.returncode == 0 and done.stdout == ""
    assert "note: 1 token, none of them with text" in done.stderr


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    done = run("run", "demo", "--raw", "--context", "32", text="one two three " * 40)
    assert done.returncode == 1
    assert re.search(r"the prompt has [\d,]+ tokens, the context is 32 ", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    # Known before a weight was read: after the load there would be a line about it.
    assert len(done.stderr.splitlines()) == 1


def test_a_stop_text_is_cut_off_and_ends_the_answer():
    done = run("run", "demo", "-p", QUESTION, "--stop", "Paris", "--json", "-")
    facts = json.loads(done.stdout)
    assert facts["finish_reason"] == "stop"
    assert "Paris" not in facts["text"]
    assert facts["text"]


def test_ctrl_c_ends_with_130_and_the_text_so_far(tmp_path: Path):
    target = tmp_path / "run.json"
    child = subprocess.Popen(
        # Drawn hot, an answer goes on until the context is full: long enough to be interrupted.
        [*PROGRAM, "run", "demo", "--raw", "-p", "User: Tell me a story.\n\nAssistant:", "-n", "2000",
         "--temperature", "3", "--seed", "1", "--json", str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    first = os.read(child.stdout.fileno(), 1)
    child.send_signal(signal.SIGINT)
    rest, errors = child.communicate(timeout=60)
    shown = (first + rest).decode("utf-8")
    assert child.returncode == 130, errors
    assert b"Traceback" not in errors and b"interrupted" in errors
    facts = json.loads(target.read_text(encoding="utf-8"))
    assert facts["finish_reason"] == "abort"
    assert facts["text"] and shown == facts["text"] + "\n"


def test_a_reader_that_goes_away_ends_the_program_quietly():
    child = subprocess.Popen(
        [*PROGRAM, "run", "demo", "-p", "Tell me a story about a fox.", "-n", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdout is not None and child.stderr is not None
    os.read(child.stdout.fileno(), 1)
    child.stdout.close()
    errors = child.stderr.read().decode("utf-8")
    assert child.wait(timeout=60) == 0
    assert "Broken" not in errors and "Traceback" not in errors


def test_chat_keeps_the_conversation_and_ends_with_its_input():
    done = run("chat", "demo", "-n", "32", text=f"{QUESTION}\n/stats\n/reset\n5-2=?\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "3" in done.stdout.splitlines()[-1]
    assert "experts: " in done.stderr
    assert "the conversation begins anew" in done.stderr


def test_chat_names_unknown_commands_and_says_what_helps_when_the_context_is_full():
    done = run("chat", "demo", "-n", "2", "--context", "32", text="/rest\n" + "a fox " * 40 + "\n/etc/hosts?\n")
    assert done.returncode == 0, done.stderr
    assert "unknown command /rest: /reset begins anew" in done.stderr
    assert re.search(r"has [\d,]+ tokens, the context is 32 \(/reset begins anew\)", done.stderr)
    assert done.stdout.strip()


def test_a_chat_that_cannot_begin_is_refused_before_the_weights_are_read():
    done = run("chat", "demo", "--context", "32", "--system", "You are a fox. " * 20, text="hello\n")
    assert_refused(done, 1, r"^expertide: the prompt has \d+ tokens, the context is 32")


def test_doctor_measures_what_plan_then_predicts_with_and_says_what_it_replaces(tmp_path: Path):
    demo = Path(broken_files.__file__).parents[1] / "src" / "expertide" / "data"
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    unknown = json.loads(run("plan", "demo", "--json", "-", **place).stdout)["decode"]
    assert unknown["tokens_per_s"] is None
    # A directory with one model is a model, as it is for run.
    first = run("doctor", str(demo), **place)
    assert first.returncode == 0, first.stderr
    assert "in place of" not in first.stdout
    known = json.loads(run("plan", "demo", "--json", "-", **place).stdout)["decode"]
    answer = json.loads(run("run", "demo", "-p", TALE, "-n", "48", "--json", "-").stdout)
    # Both depend on what else the machine did just then; before computing was counted they were a factor of 30 apart.
    assert 1 / 8 < known["tokens_per_s"] / answer["timings"]["decode_tps"] < 8
    assert "in place of earlier rates" in run("doctor", "demo", **place).stdout


def test_bench_keeps_its_three_figures_apart():
    done = run("bench", "demo", "-n", "4", "-p", "5-2=?", "-p", QUESTION, "--repeat", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [len(facts[kind]["samples"]) for kind in ("first_run", "rotating", "repeated")] == [1, 2, 2]
    assert facts["first_run"]["decode_tps"]["median"] > 0
    assert facts["repeated"]["samples"][0]["timings"]["decode_tokens"] == 3
    assert facts["bound"]["bytes_per_token"] > 0
    assert facts["machine"]["memory_bytes_per_s"] > 0


def test_eval_scores_questions_and_measures_perplexity(tmp_path: Path):
    suite = tmp_path / "suite.json"
    prompt = f"User: {QUESTION}\n\nAssistant:"
    suite.write_text(
        json.dumps(
            {
                "format": 1,
                "facts": [
                    {"id": "right", "prompt": prompt, "regex": "Paris", "max_tokens": 16},
                    {"id": "wrong", "prompt": prompt, "regex": "London", "max_tokens": 16},
                ],
                "perplexity": [{"id": "text", "text": TALE}],
            }
        ),
        encoding="utf-8",
    )
    done = run("eval", "demo", "--suite", str(suite), "--json", "-")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["total"] == {"right": 1, "of": 2}
    # Guessing among 4,096 tokens gives ln 4096 = 8.3; a model trained on such openings is far below half of that.
    assert 0 < facts["perplexity"]["mean_nll"] < 3


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("not json", "is no JSON"),
        ("[]", "found a list, expected an object"),
        ("{}", "holds no questions"),
        ('{"a": [{"id": "x", "prompt": "y", "max_tokens": 4}]}', r"a\[0\].regex: found NoneType, expected str"),
        (
            '{"a": [{"id": "x", "prompt": "y", "max_tokens": 4, "regex": "a{99999999999}"}]}',
            r"a\[0\].regex: .*too large",
        ),
        ('{"a": [{"id": "x", "prompt": "y", "max_tokens": 4, "regex": "("}]}', r"a\[0\].regex: .*unterminated"),
    ],
)
def test_a_suite_that_is_none_is_refused_before_the_model_loads(tmp_path: Path, content: str, pattern: str):
    suite = tmp_path / "suite.json"
    suite.write_text(content, encoding="utf-8")
    started = time.monotonic()
    assert_refused(run("eval", "demo", "--suite", str(suite)), 1, pattern)
    assert time.monotonic() - started < 20


def test_two_traces_of_one_run_agree_and_another_prompt_differs(tmp_path: Path):
    for name, prompt in (("a", "5-2=?"), ("b", "5-2=?"), ("c", "5-3=?")):
        done = run("run", "demo", "-p", prompt, "-n", "2", EXPERTIDE_DUMP=str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    same = run("trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (same.returncode, same.stdout) == (0, "no difference\n")
    other = run("trace", "diff", str(tmp_path / "a"), str(tmp_path / "c"))
    assert other.returncode == 1
    assert re.search(r"step 0 \(prefill at position 0\)", other.stdout)


@pytest.mark.parametrize("seconds", [0.8, 2.0])
def test_ctrl_c_while_the_program_starts_or_loads_is_as_quiet_as_later(seconds: float):
    # A prompt of 1,800 tokens in steps of one: still under way after two seconds on any machine.
    prompt = " one" * 1800
    child = subprocess.Popen(
        [*PROGRAM, "run", "demo", "--raw", "-p", prompt, "-n", "200", "--prefill-chunk", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    # Python itself needs some 50 ms before it can catch anything.
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert b"Traceback" not in errors
    assert errors.decode("utf-8").endswith("expertide: interrupted\n")
