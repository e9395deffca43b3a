"""Builds each client with its language's own tools from the published proto file, in the user's cache folder.

Downloads and builds stay there for the next run. Nothing is written to this tree, and the folder may be deleted at any
time.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PROTO = HERE.parent.parent / "proto"
PACKAGES = HERE.parent.parent / "clients"
INFERENCE = "unbroken/v1/inference.proto"
CACHE = Path.home() / ".cache" / "unbroken" / "clients"
MADE = "command.json"
"""Contains the command. It is written last, so a folder without it is incomplete."""
BUF = Path(sys.executable).parent / "buf"
BUILD_S_MAX = 900.0
"""Longest build, with all downloads, on a busy machine."""


@dataclass(frozen=True)
class Client:
    """A program in the folder of this name, and how to build it."""

    name: str
    tools: tuple[str, ...]
    build: Callable[[Path], list[str]]
    """Builds the program in a folder, and returns its command without the server's address."""
    package: str | None = None
    """The folder below clients/ whose package the program uses. It is copied to `package`, beside the program."""

    @property
    def program(self) -> Path:
        """The folder with the source of the program."""
        return HERE / self.name

    @property
    def missing(self) -> list[str]:
        """The tools that this machine lacks."""
        return missing(*self.tools)

    def command(self) -> list[str]:
        """Return the command; builds the program if it or the proto file has changed. Raises CalledProcessError."""
        sources = self._sources()
        content = b"".join(str(path).encode() + data for path, data in sources.items())
        folder = CACHE / f"{self.name}-{hashlib.sha256(content).hexdigest()[:16]}"
        with alone_in(folder):
            command = _made(folder)
            # An interpreter may have belonged to a checkout that is gone.
            if not command or shutil.which(command[0]) is None:
                self._make(folder, sources)
                command = _made(folder)
        return command

    def _sources(self) -> dict[Path, bytes]:
        """Return all sources: the files of the program, and the folders `proto` and `package` beside them."""
        program = _files(self.program)
        if self.package is not None:
            program |= {Path("package", path): data for path, data in _files(PACKAGES / self.package).items()}
        return program | {Path("proto", INFERENCE): (PROTO / INFERENCE).read_bytes()}

    def _make(self, folder: Path, sources: dict[Path, bytes]) -> None:
        """Build from scratch, whatever an interrupted build has left."""
        shutil.rmtree(folder, ignore_errors=True)
        for path, data in sources.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        command = self.build(folder)
        written = folder / f"{MADE}.part"
        written.write_text(json.dumps(command))
        written.rename(folder / MADE)


def _made(folder: Path) -> list[str]:
    """The command of a complete build; empty if there is none."""
    made = folder / MADE
    return json.loads(made.read_text()) if made.exists() else []


def missing(*tools: str) -> list[str]:
    """Those of the tools that this machine lacks."""
    return [tool for tool in tools if shutil.which(tool) is None]


def _files(folder: Path) -> dict[Path, bytes]:
    paths = sorted(path for path in (*folder.iterdir(), *folder.glob("src/**/*")) if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in paths if path.suffix != ".pyc"}


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that no other run of these tests builds there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    """Run a tool to its end and show its output. Raises CalledProcessError."""
    subprocess.run(command, cwd=cwd, env=env, check=True, timeout=BUILD_S_MAX)


def python(folder: Path) -> list[str]:
    """Build in a virtual environment of its own, without access to this project's packages."""
    command = python_sdk(folder)
    run(
        command[0], "-m", "grpc_tools.protoc", "-Iproto", "--python_out=.", "--grpc_python_out=.", INFERENCE, cwd=folder
    )
    return command


def python_sdk(folder: Path) -> list[str]:
    """Install a package that needs no generated code."""
    interpreter = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    run(interpreter, "-m", "pip", "install", "--quiet", "-r", "requirements.txt", cwd=folder)
    return [str(interpreter), str(folder / "client.py")]


def healing_python(folder: Path) -> list[str]:
    """Build the wheel of the package, and install it."""
    command = python_sdk(folder)
    run(command[0], "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "./package", cwd=folder)
    (wheel,) = (folder / "dist").iterdir()
    run(command[0], "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=folder)
    return command


def healing_node(folder: Path) -> list[str]:
    """Pack the package, and install it."""
    command = node_sdk(folder)
    run("npm", "pack", "--silent", "./package", cwd=folder)
    (tarball,) = folder.glob("*.tgz")
    run("npm", "install", "--silent", "--no-save", "--no-audit", "--ignore-scripts", tarball, cwd=folder)
    return command


def go(folder: Path) -> list[str]:
    """Build with the versions of plugins in go.mod."""
    bin_folder = folder / "bin"
    env = os.environ | {"GOBIN": str(bin_folder), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    run("go", "install", "tool", cwd=folder, env=env)
    run(BUF, "generate", "proto", "--path", f"proto/{INFERENCE}", cwd=folder, env=env)
    run("go", "build", "-o", "client", ".", cwd=folder)
    return [str(folder / "client")]


def go_program(folder: Path) -> list[str]:
    """Build a program that needs no generated code."""
    run("go", "build", "-o", "client", ".", cwd=folder)
    return [str(folder / "client")]


def node(folder: Path) -> list[str]:
    """Install the packages. No stubs are generated, because the program reads the proto file."""
    return [*node_sdk(folder), f"--proto={folder / 'proto'}"]


def node_sdk(folder: Path) -> list[str]:
    """Install a package that needs no generated code."""
    run("npm", "ci", "--ignore-scripts", cwd=folder)
    return ["node", str(folder / "client.js")]


def browser(folder: Path) -> list[str]:
    """Build nothing: the program needs Python alone."""
    return [sys.executable, str(folder / "client.py")]


def connect(folder: Path) -> list[str]:
    """Generate the stubs with a plugin among the packages, and with this project's `buf`."""
    command = node_sdk(folder)
    env = os.environ | {"PATH": f"{BUF.parent}:{os.environ['PATH']}"}
    run("npm", "run", "--silent", "generate", cwd=folder, env=env)
    return command


def java(folder: Path) -> list[str]:
    """Build with Maven, which keeps its downloads in its own cache."""
    run("mvn", "--quiet", "--batch-mode", f"-Dproto={folder / 'proto'}", "package", cwd=folder)
    return ["java", "-jar", str(folder / "target" / "client.jar")]


def go_tool(name: str) -> Callable[[Path], list[str]]:
    """Install the tool that go.mod names. There is no program in Go."""

    def build(folder: Path) -> list[str]:
        run("go", "install", "tool", cwd=folder, env=os.environ | {"GOBIN": str(folder / "bin")})
        return [str(folder / "bin" / name)]

    return build


def schemathesis(folder: Path) -> list[str]:
    """Install the tool. There is no program, only hooks, in the folder that the tool is given."""
    interpreter, _ = python_sdk(folder)
    return [str(Path(interpreter).parent / "st"), f"--config-file={folder / 'schemathesis.toml'}", "run"]


GRPCURL = Client("grpcurl", ("go",), go_tool("grpcurl"))
H2SPEC = Client("h2spec", ("go",), go_tool("h2spec"))
GRPC_INTEROP = Client("grpc_interop", ("go",), go_tool("client"))
GZIP_GO = Client("gzip_go", ("go",), go_program)
"""Takes the address of a server of gRPC's test service."""
CONNECT = Client("connect", ("node", "npm"), connect)
CLIENTS = (
    Client("python", (), python),
    Client("go", ("go",), go),
    Client("node", ("node", "npm"), node),
    CONNECT,
    Client("java", ("java", "javac", "mvn"), java),
)
OPENAI_PYTHON = Client("openai_python", (), python_sdk)
SDKS = (
    OPENAI_PYTHON,
    Client("openai_node", ("node", "npm"), node_sdk),
    Client("langchain", (), python_sdk),
    Client("litellm", (), python_sdk),
)
"""Clients that take the address of the HTTP API."""
HEALING = (
    Client("healing_python", (), healing_python, "python"),
    Client("healing_node", ("node", "npm"), healing_node, "js"),
)
"""Clients that take the addresses of the HTTP API of two frontends."""
BROWSER = Client("browser", ("chromium",), browser)
"""Takes a step, the address of the HTTP API, and the body of a request."""
SURFACE = Client("surface", (), schemathesis)
