"""The questions to a GPU: all are asked and answered whatever the engine does, and each answer is what the engine did.

Here they are asked of the TensorRT-LLM that the tests play, in each of its moods.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.smoke import QUESTIONS
from tests.support.model_folder import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
PATIENCE_S = 2.0

END, STOP_STRING, ABORT = QUESTIONS[1][0], QUESTIONS[3][0], QUESTIONS[4][0]
WAITING, CONTINUED, SEED, SHUTDOWN = QUESTIONS[5][0], QUESTIONS[7][0], QUESTIONS[8][0], QUESTIONS[-1][0]


def ask(folder: Path, *, patience_s: float = PATIENCE_S, **mood: str) -> subprocess.CompletedProcess[str]:
    """The script on the fake. mood: its variables, without their prefix."""
    script = str(ROOT / "tests" / "gpu" / "smoke.py")
    variables = {f"TLLM_FAKE_{name}": value for name, value in mood.items()}
    return subprocess.run(
        [sys.executable, script, f"--model={make_model_folder(folder)}", f"--patience={patience_s}"],
        env=os.environ | variables | {"PYTHONPATH": str(ROOT / "tests" / "fakes")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def table(printed: str) -> dict[str, list[str]]:
    """What was seen, what is assumed, and whether they agree, for each question."""
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in printed.splitlines() if line[:2] == "| "
    ]
    return {question: rest for question, *rest in rows[2:]}


def test_all_that_is_asked_is_answered(tmp_path: Path) -> None:
    done = ask(tmp_path)

    rows = table(done.stdout)
    assert (done.returncode, [row[2] for row in rows.values()]) == (0, ["yes"] * len(QUESTIONS))
    assert [(question, row[1]) for question, row in rows.items()] == [(text, why) for text, _, why in QUESTIONS]
    assert all(row[0] for row in rows.values())
    assert rows[CONTINUED][0] == "4 of 4 go on with the same tokens"
    assert rows[STOP_STRING][0] == "RequestError: self.stop='a' is not processed by tokenizer"
    assert rows[WAITING][0] == "no final item in 0.5 s"
    assert rows[SEED][0] == "twice with a seed: others; without: others"
    assert rows[SHUTDOWN][0].startswith("back after")


@pytest.mark.parametrize(("in_tokens", "seen"), [("0", "cut off, 'stop'"), ("1", "the last of token_ids, 'stop'")])
def test_either_place_of_the_end_is_seen(tmp_path: Path, in_tokens: str, seen: str) -> None:
    rows = table(ask(tmp_path, END_IN_TOKENS=in_tokens).stdout)

    assert (rows[END][0], rows[END][2]) == (seen, "yes")


def test_how_long_an_abort_takes_and_that_a_shutdown_hangs_is_seen(tmp_path: Path) -> None:
    rows = table(ask(tmp_path, CANCEL_STEPS="9", SHUTDOWN="hangs").stdout)

    told = re.fullmatch(r"final item after \d+ ms and (\d+) tokens, 'cancelled'", rows[ABORT][0])
    assert told is not None
    assert int(told[1]) >= 7, "some steps less if tokens were under way when it was aborted"
    assert (rows[SHUTDOWN][0], rows[SHUTDOWN][2]) == ("not back in 1 s", "yes")


@pytest.mark.parametrize(
    ("death", "seen"), [("stored", "RuntimeError: LLM is shutting down"), ("silent", "no answer in 0.3 s")]
)
def test_an_engine_that_dies_on_the_way_does_not_keep_the_rest_from_being_asked(
    tmp_path: Path, death: str, seen: str
) -> None:
    done = ask(tmp_path, patience_s=0.3, DEATH=death, DEATH_STEPS="20")

    rows = table(done.stdout)
    assert list(rows) == [text for text, _, _ in QUESTIONS]
    assert (rows[SEED][0], rows[SEED][2]) == (seen, "**no**")
    assert done.returncode == 1


def test_a_call_that_never_returns_ends_the_questions_and_is_told(tmp_path: Path) -> None:
    done = ask(tmp_path, patience_s=0.3, DEATH_STEPS="20", SHUTDOWN="hangs")

    assert done.stdout.splitlines()[-1].endswith("| holds up the event loop | that calls return | **no** |")
    assert done.returncode == 1
