"""Reads a tokeniser in a process of its own, before this one does.

A frontend has tokenisers from workers, and a damaged one can do worse than be refused: there are files of a hundred
bytes on which the library takes all memory there is and aborts. Run as a program it is that process.
"""

import resource
import subprocess
import sys

from services.core.errors import Failure, Reason

TRIAL_S_MAX = 20.0
MEMORY_BYTES_MAX = 2 << 30
"""Address space. A vocabulary of 130,000 takes a tenth of it."""
_REFUSED = 3
_PROBE = "a" * 256 + "".join(map(chr, range(0x20, 0x250))) + "漢字 한국어 e\u0301\n\n\t  🎉👩‍👩‍👧 1234567890"
"""Something of everything, so that what breaks on ordinary text breaks there."""


def try_reading(content: bytes) -> None:
    """Blocks until the process has ended. Raises Failure if it could not read `content`, or died of it."""
    command = [sys.executable, "-m", "services.models.tokenizers.sandbox"]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=TRIAL_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failure(Reason.INTERNAL, f"reading the model's tokeniser takes more than {TRIAL_S_MAX:.0f} s") from error
    if done.returncode == _REFUSED:
        raise Failure(Reason.INTERNAL, done.stdout.decode(errors="replace"))
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines() or [""]
        detail = f"the model's tokeniser ends the process that reads it, with status {done.returncode}: {lines[0]}"
        raise Failure(Reason.INTERNAL, detail)


def main() -> None:
    """Read what comes in. Ends with 0, with _REFUSED after saying why, or as it happens."""
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
