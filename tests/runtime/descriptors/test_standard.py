"""Standard streams are open and take any character; a failure to write is one sentence."""

import subprocess
import sys

import pytest

PREPARE = "from services.runtime.descriptors.standard import *; prepare_streams(); "


def run(redirection: str, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "<&- >&-"])
def test_no_file_takes_the_place_of_a_closed_stream(redirection: str) -> None:
    code = f"{PREPARE}import os, sys; sys.stderr.write(str(os.open('/dev/null', os.O_RDONLY) > 2)); print('lost')"

    done = run(redirection, code)

    assert (done.returncode, done.stderr) == (0, "True")


def test_closed_standard_error_swallows_the_log() -> None:
    done = run("2>&-", f"{PREPARE}import sys; sys.stderr.write('lost'); print(sys.stderr.fileno())")

    assert (done.returncode, done.stdout) == (0, "2\n")


def test_characters_that_cannot_be_encoded_are_escaped() -> None:
    done = run("", f"{PREPARE}print('\\u6f22')", PYTHONIOENCODING="ascii")

    assert done.stdout == "\\u6f22\n"


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    done = run(">/dev/full", f"{PREPARE}print('lost'); flush_output()")

    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


def test_full_standard_error_leaves_the_exit_status_alone() -> None:
    code = f"{PREPARE}import sys\ntry: print('lost', file=sys.stderr, flush=True)\nexcept OSError: pass\nflush_output()"

    assert run("2>/dev/full", code).returncode == 0


def test_program_starts_again_in_utf8_mode_where_the_locale_has_another_encoding() -> None:
    code = f"{PREPARE}use_utf8(); import sys; print(sys.flags.utf8_mode, sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, "ü"],
        env={"PYTHONPATH": ":".join(sys.path), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
    )

    assert done.stdout.decode() == "1 ü\n"
