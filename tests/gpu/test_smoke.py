"""The GPU questions: all are asked and answered whatever the engine does, and each answer describes what it did.

Here they are asked of the fake TensorRT-LLM, with different injected faults.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.smoke import QUESTIONS
from tests.support.clock import WAIT_S
from tests.support.model_folder import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 2 * WAIT_S
PATIENCE_S = 2.0

END, STOP_STRING, ABORT = QUESTIONS[1][0], QUESTIONS[3][0], QUESTIONS[4][0]
WAITING, CONTINUED, SEED, SHUTDOWN = QUESTIONS[5][0], QUESTIONS[7][0], QUESTIONS[8][0], QUESTIONS[-1][0]


def ask(folder: Path, *, patience_s: float = PATIENCE_S, **faults: str) -> subprocess.CompletedProcess[str]:
    """Run the script on the fake. `faults`: variables of the fake, without their prefix."""
    script = str(ROOT / "tests" / "gpu" / "smoke.py")
    variables = {f"TLLM_FAKE_{name}": value for name, value in faults.items()}
    return subprocess.run(
        [sys.executable, script, f"--model={make_model_folder(folder)}", f"--patience={patience_s}"],
        env=os.environ | variables | {"PYTHONPATH": str(ROOT / "tests" / "fakes")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def table(printed: str) -> dict[str, list[str]]:
    """For each question: what was seen, what is assumed, and whether they agree."""
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in printed.splitlines() if line[:2] == "| "
    ]
    return {question: rest for question, *rest in rows[2:]}


def test_every_question_is_answered_as_assumed(tmp_path: Path) -> None:
    done = ask(tmp_path, patience_s=WAIT_S)  # No question may be given up because the machine is busy.

    rows = table(done.stdout)
    assert (done.returncode, [row[2] for row in rows.values()]) == (0, ["yes"] * len(QUESTIONS))
    assert [(question, row[1]) for question, row in rows.items()] == [(text, why) for text, _, why in QUESTIONS]
    assert all(row[0] for row in rows.values())
    assert rows[CONTINUED][0] == "4 of 4 continue with the same tokens"
    assert rows[STOP_STRING][0] == "RequestError: self.stop='a' is not processed by tokenizer"
    assert rows[WAITING][0] == "no final item in 2 s"
    assert rows[SEED][0] == "twice with a seed: different; without: different"
    assert rows[SHUTDOWN][0].startswith("back after")


@pytest.mark.parametrize(("in_tokens", "seen"), [("0", "cut off, 'stop'"), ("1", "the last of token_ids, 'stop'")])
def test_position_of_the_end_token_is_reported(tmp_path: Path, in_tokens: str, seen: str) -> None:
    rows = table(ask(tmp_path, END_IN_TOKENS=in_tokens).stdout)

    assert (rows[END][0], rows[END][2]) == (seen, "yes")


def test_slow_abort_and_hanging_shutdown_are_reported(tmp_path: Path) -> None:
    rows = table(ask(tmp_path, CANCEL_STEPS="9", SHUTDOWN="hangs").stdout)

    match = re.fullmatch(r"final item after \d+ ms and (\d+) tokens, 'cancelled'", rows[ABORT][0])
    assert match is not None
    assert int(match[1]) >= 7, "fewer steps if tokens were on their way when it was aborted"
    assert (rows[SHUTDOWN][0], rows[SHUTDOWN][2]) == ("not back in 1 s", "yes")


@pytest.mark.parametrize(
    ("death", "seen"), [("stored", "RuntimeError: LLM is shutting down"), ("silent", "no answer in 0.3 s")]
)
def test_remaining_questions_are_asked_after_the_engine_has_died(tmp_path: Path, death: str, seen: str) -> None:
    done = ask(tmp_path, patience_s=0.3, DEATH=death, DEATH_STEPS="20")

    rows = table(done.stdout)
    assert list(rows) == [text for text, _, _ in QUESTIONS]
    assert (rows[SEED][0], rows[SEED][2]) == (seen, "**no**")
    assert done.returncode == 1


def test_call_that_never_returns_is_reported_and_ends_the_script(tmp_path: Path) -> None:
    done = ask(tmp_path, patience_s=0.3, DEATH_STEPS="20", SHUTDOWN="hangs")

    assert done.stdout.splitlines()[-1].endswith("| blocks the event loop | calls return | **no** |")
    assert done.returncode == 1
