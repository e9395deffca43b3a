"""Loads a tokeniser in a child process before this process does.

Frontends get tokenisers from workers, and a damaged one can crash the process that loads it: with some files of a
hundred bytes, the library allocates all memory and aborts. The child process runs this module as a program.
"""

import resource
import subprocess
import sys

from services.core.errors import Failure, Reason

TRIAL_S_MAX = 20.0
MEMORY_BYTES_MAX = 2 << 30
"""Address space of the child process. A vocabulary of 130,000 needs a tenth of it."""
_REFUSED = 3
_PROBE = "a" * 256 + "".join(map(chr, range(0x20, 0x250))) + "漢字 한국어 e\u0301\n\n\t  🎉👩‍👩‍👧 1234567890"
"""A sample of many scripts, so that a tokeniser that fails on ordinary text fails in the child process."""


def try_reading(content: bytes) -> None:
    """Load `content` in a child process, blocking until it ends. Raises Failure if it cannot, or crashes."""
    command = [sys.executable, "-m", "services.models.tokenizers.sandbox"]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=TRIAL_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failure(Reason.INTERNAL, f"loading the model's tokeniser takes more than {TRIAL_S_MAX:.0f} s") from error
    if done.returncode == _REFUSED:
        raise Failure(Reason.INTERNAL, done.stdout.decode(errors="replace"))
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines() or [""]
        detail = f"the model's tokeniser crashes the process that loads it, with status {done.returncode}: {lines[0]}"
        raise Failure(Reason.INTERNAL, detail)


def main() -> None:
    """Load the tokeniser on standard input. Exits with 0, or with _REFUSED after printing the reason."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        from services.models.tokenizers.huggingface import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(sys.stdin.buffer.read())
        for add_special in (True, False):
            tokenizer.encode(_PROBE, add_special=add_special)
    except Failure as failure:
        sys.stdout.write(failure.detail)
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
