"""Builds each client with its language's own tools, from the published proto files, in the user's cache folder.

Downloads and builds stay there, so that a second run needs neither. Nothing of it is in this tree,
and the folder may be deleted at any time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO = HERE.parent.parent / "proto"
INFERENCE = "unbroken/v1/inference.proto"
CACHE = Path.home() / ".cache" / "unbroken" / "clients"
BUF = Path(sys.executable).parent / "buf"
BUILD_S_MAX = 300.0
"""With all downloads, on a machine that has something else to do."""


@dataclass(frozen=True)
class Client:
    """A program in a folder of this name, and how it is made."""

    name: str
    tools: tuple[str, ...]
    build: Callable[[Path], list[str]]
    """Makes it in the folder it gets, and returns the command, which lacks the address only."""

    @property
    def program(self) -> Path:
        """Where its program is."""
        return HERE / self.name

    @property
    def missing(self) -> list[str]:
        """Of its tools, those that this machine lacks."""
        return [tool for tool in self.tools if shutil.which(tool) is None]

    def command(self) -> list[str]:
        """Its command, made anew if the program or the proto files have changed. Raises CalledProcessError."""
        return self.build(fresh_copy(self.program))


def fresh_copy(program: Path) -> Path:
    """A folder that has the program's files, and what was made of the very same ones and the proto file before."""
    paths = sorted(path for path in (*program.iterdir(), *program.glob("src/**/*")) if path.is_file())
    sources = {path.relative_to(program): path.read_bytes() for path in paths}
    content = [str(path).encode() + data for path, data in sources.items()]
    digest = hashlib.sha256(b"".join((*content, (PROTO / INFERENCE).read_bytes()))).hexdigest()
    folder = CACHE / f"{program.name}-{digest[:16]}"
    for path, data in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    """Run a tool to its end. Raises CalledProcessError, and shows what the tool said."""
    subprocess.run(command, cwd=cwd, env=env, check=True, timeout=BUILD_S_MAX)


def python(folder: Path) -> list[str]:
    """An environment of its own: nothing of ours is in reach."""
    command = python_sdk(folder)
    if not (folder / "unbroken" / "v1" / "inference_pb2_grpc.py").exists():
        outs = ("--python_out=.", "--grpc_python_out=.")
        run(command[0], "-m", "grpc_tools.protoc", f"-I{PROTO}", *outs, INFERENCE, cwd=folder)
    return command


def python_sdk(folder: Path) -> list[str]:
    """The same, of a package that brings all there is to it."""
    interpreter, installed = folder / "venv" / "bin" / "python", folder / ".installed"
    if not installed.exists():
        run(sys.executable, "-m", "venv", "--clear", folder / "venv", cwd=folder)
        run(interpreter, "-m", "pip", "install", "--quiet", "-r", "requirements.txt", cwd=folder)
        installed.touch()
    return [str(interpreter), str(folder / "client.py")]


def go(folder: Path) -> list[str]:
    """The plugins' versions are those of go.mod, like all others."""
    bin_folder = folder / "bin"
    env = os.environ | {"GOBIN": str(bin_folder), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    run("go", "install", "tool", cwd=folder, env=env)
    run(BUF, "generate", PROTO, "--path", PROTO / INFERENCE, cwd=folder, env=env)
    run("go", "build", "-o", "client", ".", cwd=folder)
    return [str(folder / "client")]


def npm_ci(folder: Path) -> None:
    """Install the packages of the lock file."""
    if not (folder / "node_modules" / ".package-lock.json").exists():  # What npm writes last.
        run("npm", "ci", "--ignore-scripts", cwd=folder)


def node(folder: Path) -> list[str]:
    """There are no stubs: the program reads the proto file."""
    npm_ci(folder)
    return ["node", str(folder / "client.js"), f"--proto={PROTO}"]


def connect(folder: Path) -> list[str]:
    """The plugin is one of the packages, like what it generates for; `buf` is ours."""
    npm_ci(folder)
    if not (folder / "gen" / "unbroken").exists():
        shutil.copytree(PROTO, folder / "proto", dirs_exist_ok=True)
        env = os.environ | {"PATH": f"{BUF.parent}:{os.environ['PATH']}"}
        run("npm", "run", "--silent", "generate", cwd=folder, env=env)
    return ["node", str(folder / "client.js")]


def node_sdk(folder: Path) -> list[str]:
    """Of a package that brings all there is to it."""
    npm_ci(folder)
    return ["node", str(folder / "client.js")]


def java(folder: Path) -> list[str]:
    """Maven keeps what it downloads where it always does."""
    jar = folder / "target" / "client.jar"
    if not jar.exists():
        run("mvn", "--quiet", "--batch-mode", f"-Dproto={PROTO}", "package", cwd=folder)
    return ["java", "-jar", str(jar)]


def grpcurl(folder: Path) -> list[str]:
    """There is no program: the tool is one."""
    run("go", "install", "tool", cwd=folder, env=os.environ | {"GOBIN": str(folder / "bin")})
    return [str(folder / "bin" / "grpcurl")]


def schemathesis(folder: Path) -> list[str]:
    """There is no program but hooks, which it finds where it is told to look."""
    interpreter, _ = python_sdk(folder)
    return [str(Path(interpreter).parent / "st"), f"--config-file={folder / 'schemathesis.toml'}", "run"]


GRPCURL = Client("grpcurl", ("go",), grpcurl)
CLIENTS = (
    Client("python", (), python),
    Client("go", ("go",), go),
    Client("node", ("node", "npm"), node),
    Client("connect", ("node", "npm"), connect),
    Client("java", ("java", "mvn"), java),
)
OPENAI_PYTHON = Client("openai_python", (), python_sdk)
SDKS = (
    OPENAI_PYTHON,
    Client("openai_node", ("node", "npm"), node_sdk),
    Client("langchain", (), python_sdk),
    Client("litellm", (), python_sdk),
)
"""They take the address of the HTTP API."""
SURFACE = Client("surface", (), schemathesis)
