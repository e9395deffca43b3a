"""Commands work without standard streams, with a full disk behind them, and in any locale.

| workload | nemesis | checker |
| --- | --- | --- |
| every long-running command | standard streams are closed, full, or their reader is gone | they serve |
| commands that print | standard output is full, or its reader is gone | one sentence, or none; no traceback |
| all | locale C without UTF-8, ASCII streams, odd time zones and settings of Python | they serve |
"""

import json
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration.harness.plane.commands import BARE, UNBROKEN, Commands, commands, complete
from tests.integration.harness.waiting import wait_until
from tests.support.chat_server import DONE, Server, event

REDIRECTIONS = ["2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"]
PORTS = ("--registry-port=0", "--grpc-port=0", "--http-port=0")
LISTEN = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")


def redirected(folder: Path, redirection: str) -> AbstractContextManager[Commands]:
    return commands(folder, BARE, ("sh", "-c", f'exec "$@" {redirection}', "sh"))


def wait_file(plane: Commands, file: Path, *words: str) -> dict[str, str]:
    """Start a command, and return the JSON that it writes when it is ready."""
    process = plane.start(*words).process
    wait_until(lambda: file.exists() or process.poll() is not None, 60)
    assert process.poll() is None, (words, process.poll())
    content: dict[str, str] = json.loads(file.read_text())
    return content


@pytest.mark.parametrize("redirection", REDIRECTIONS)
def test_plane_serves_whatever_becomes_of_its_standard_streams(tmp_path: Path, redirection: str) -> None:
    with redirected(tmp_path, redirection) as plane:
        files = [tmp_path / name for name in ("registry", "worker", "frontend")]
        ready = [f"--ready-file={file}" for file in files]
        registry = wait_file(plane, files[0], "registry", "--listen=127.0.0.1:0", ready[0])["address"]
        wait_file(plane, files[1], "worker", f"--registry={registry}", ready[1])
        options = ("--processes=2", f"--registry={registry}", *LISTEN)
        frontend = wait_file(plane, files[2], "frontend", *options, ready[2])

        wait_until(lambda: complete(frontend["http"])[0] == 200)


@pytest.mark.parametrize("redirection", REDIRECTIONS)
def test_local_cluster_serves_whatever_becomes_of_its_standard_streams(tmp_path: Path, redirection: str) -> None:
    with redirected(tmp_path, redirection) as plane:
        state = tmp_path / "run" / "cluster.json"
        started = plane.start("up", f"--state-dir={state.parent}", "--workers=1", *PORTS)
        wait_until(lambda: state.exists() or started.process.poll() is not None, 60)

        assert started.process.poll() is None
        assert complete(json.loads(state.read_text())["frontends"][0]["http"])[0] == 200
        assert started.end() == 0


def test_local_cluster_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    state = tmp_path / "run" / "cluster.json"
    words = [str(UNBROKEN), "up", f"--state-dir={state.parent}", "--workers=1", *PORTS]
    with subprocess.Popen(words, env=dict(BARE), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as up:
        assert up.stdout is not None
        up.stdout.close()
        wait_until(lambda: state.exists() or up.poll() is not None, 60)

        assert up.poll() is None
        assert complete(json.loads(state.read_text())["frontends"][0]["http"])[0] == 200
        up.terminate()


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["models", "pull", "smollm2"]])
def test_command_that_cannot_print_says_so(words: list[str]) -> None:
    full = subprocess.run(
        ["sh", "-c", '"$@" >/dev/full', "sh", UNBROKEN, *words], env=dict(BARE), capture_output=True, text=True
    )

    assert full.returncode == 1
    assert full.stderr == "error: cannot write to standard output: No space left on device\n"


MODEL = "modèle-漢"
LOCALES = {
    "C": {"LC_ALL": "C", "TZ": ":::/weird"},
    "no UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII streams": {"PYTHONIOENCODING": "ascii", "LANG": "xx_XX.UTF-8", "TMPDIR": "/none"},
    "development mode": {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"},
    "no assertions": {"PYTHONOPTIMIZE": "2"},
}


@pytest.mark.parametrize("environment", LOCALES.values(), ids=LOCALES)
def test_plane_serves_in_any_locale_and_setting_of_python(tmp_path: Path, environment: dict[str, str]) -> None:
    with commands(tmp_path, {**BARE, **environment}) as plane:
        registry = plane.registry()
        plane.worker(registry, f"--served-model-name={MODEL}")
        frontend = plane.frontend(registry, "--processes=2")
        wait_until(lambda: frontend.log.count('"worker found"') == 2)  # Either process may get a request.
        address = frontend.wait_event("frontend ready")["http"]
        assert complete(address, MODEL)[0] == 200
        chat = plane.run("chat", f"--url=http://{address}", "--max-tokens=4", text="Hi ü")

        assert (chat.returncode, chat.stderr) == (0, "")


def test_chat_escapes_characters_that_its_output_cannot_have() -> None:
    with Server([event("漢字 ü") + DONE]) as server:
        done = subprocess.run(
            [UNBROKEN, "chat", f"--url={server.url}"],
            env={**BARE, "PYTHONIOENCODING": "ascii"},
            input=b"Hi",
            capture_output=True,
            check=True,
        )

    assert done.stdout == b"\\u6f22\\u5b57 \\xfc\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["worker", "--served-model-name=\udcff"], "--served-model-name"),
        (["worker", "--model=\udcff"], "--model"),
        (["worker", "--advertise=\udcff:1"], "--advertise"),
        (["frontend", "--registry=\udcff:1"], "--registry"),
        (["frontend", "--metrics-prefix=a b"], "--metrics-prefix"),
    ],
)
def test_option_that_cannot_be_sent_is_refused_by_name(tmp_path: Path, words: list[str], named: str) -> None:
    """\udcff is how Python reads and writes the byte 0xff."""
    with commands(tmp_path) as plane:
        done = plane.run(*words)

    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
