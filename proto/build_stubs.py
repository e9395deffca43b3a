"""Generates the gRPC stubs when the package is built: `proto/unbroken/v1/*.proto` → `services/stubs/*_pb2*.py[i]`.

The stubs are not committed, so they cannot differ from the proto files. hatchling runs this module for every wheel and
editable install. `python proto/build_stubs.py` runs it by hand.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
STUBS = ROOT / "services" / "stubs"


def generate() -> None:
    """Write the stubs. The descriptors keep the proto files' names, so reflection shows `unbroken/v1/….proto`."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as scratch:
        outs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
        sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
        plugin = shutil.which("protoc-gen-mypy_grpc")
        if plugin is None:
            raise RuntimeError("protoc-gen-mypy_grpc is missing: pip install mypy-protobuf")
        include = Path(protoc.__file__).parent / "_proto"
        status = protoc.main(
            ["protoc", f"-I{PROTO}", f"-I{include}", f"--plugin=protoc-gen-mypy_grpc={plugin}", *outs, *sources]
        )
        if status != 0:
            raise RuntimeError(f"protoc failed with status {status}")
        for path in sorted(Path(scratch, "unbroken", "v1").iterdir()):
            _move(path)


def _move(path: Path) -> None:
    """Move a generated file to services/stubs, and replace the proto package in its imports by `services.stubs`."""
    text = path.read_text()
    text = re.sub(r"from unbroken\.v1 import", "from services.stubs import", text)
    text = re.sub(r"\bunbroken\.v1\.(\w+_pb2)\b", r"services.stubs.\1", text)
    text = re.sub(r"^import unbroken\.v1$", "", text, flags=re.MULTILINE)
    (STUBS / path.name).write_text(text)


if __name__ == "__main__":
    generate()
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
        """Runs `generate` when hatchling builds a wheel, editable ones included."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Generate the stubs. hatchling calls this before it collects files."""
            if self.target_name == "wheel":
                generate()
