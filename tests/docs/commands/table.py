"""Where each command of the pages is run, or why no test can run it."""

from dataclasses import dataclass

COMPOSE = "needs a Docker engine; that what it names is in docker-compose.yml is tested"
IMAGE = "needs NVIDIA's release container and a network to it"
NO_COPY = "would install into the environment of the tests; what it installs is installed there from the start"
NAMED = "stands for the command in general: its --help is tried, and the pages have it with options elsewhere"


@dataclass(frozen=True)
class Place:
    """file: the file that runs the command. has: what that file contains; by default the command as the table names it.

    why_not: why the command is not run as it stands.
    """

    file: str
    has: str = ""
    why_not: str = ""


TRIED = {
    "unbroken keys new --keys-file keys.toml --tenant acme": Place("tests/cli/test_keys.py", 'run("new"'),
    "unbroken keys list --keys-file keys.toml": Place("tests/cli/test_keys.py", 'run("list"'),
    "unbroken keys revoke --keys-file keys.toml 1f2e3d4c": Place("tests/cli/test_keys.py", 'run("revoke"'),
    'DYN_CHAT_API_KEY="$KEY" unbroken chat': Place("tests/cli/chat/test_chat.py", "DYN_CHAT_API_KEY"),
    "unbroken certs certs --host llm.example": Place("tests/cli/certs/test_command.py", "--host=llm.example"),
    "DYN_TLS_CERT_PATH=certs/edge.pem": Place("tests/docs/commands/test_up.py"),
    "curl --cacert certs/ca.pem": Place("tests/docs/commands/test_up.py"),
    "unbroken chat --url https": Place("tests/docs/commands/test_up.py"),
    "unbroken up --certs certs": Place("tests/docs/commands/test_up.py"),
    "unbroken registry --peer-cert": Place("tests/integration/access/test_peer_tls.py", "--peer-cert="),
    "unbroken worker --peer-cert": Place("tests/integration/access/test_peer_tls.py", "--peer-cert="),
    "unbroken frontend --peer-cert": Place("tests/integration/access/test_peer_tls.py", "--peer-cert="),
    "unbroken drain --peer-cert": Place("tests/integration/access/test_peer_tls.py", '"drain"'),
    # A part that only one command of the pages contains, or a whole command: where it is run. The commands for grpcurl
    # and `buf curl` have a table of their own, in tests/clients/test_commands.py.
    "curl -sN localhost": Place("tests/docs/commands/test_make_up.py"),
    "make up": Place("tests/docs/commands/test_make_up.py"),
    "DYN_UP_REGISTRY_PORT=50060 make up": Place("tests/docs/commands/test_make_up.py"),
    "Tell me about the sea.": Place("tests/docs/commands/test_make_up.py"),
    "The capital of France is": Place("tests/docs/commands/test_make_up.py"),
    "x-on-disconnect: continue": Place("tests/docs/commands/test_up.py"),
    "/v1/streams/": Place("tests/docs/commands/test_up.py"),
    ".venv/bin/unbroken chat": Place("tests/docs/commands/test_make_up.py"),
    "/cancel": Place("tests/docs/commands/test_make_up.py"),
    ".venv/bin/unbroken up --engine mocker": Place("tests/docs/commands/test_up.py"),
    "DYN_PROCESSES=2 unbroken up": Place("tests/docs/commands/test_up.py"),
    "DYN_STALL_MS=3000 unbroken up": Place("tests/docs/commands/test_up.py"),
    "unbroken up --engine trtllm --model /model --workers 1": Place("tests/docs/commands/test_up.py"),
    "curl localhost:8000/busy_threshold": Place("tests/docs/commands/test_up.py"),
    "curl localhost:8000/busy_threshold -d": Place("tests/docs/commands/test_up.py"),
    "unbroken registry --listen": Place("tests/docs/commands/test_machines.py"),
    "unbroken worker --listen": Place("tests/docs/commands/test_machines.py"),
    "unbroken frontend --http-listen": Place("tests/docs/commands/test_machines.py"),
    "unbroken frontend --processes 4": Place("tests/docs/commands/test_machines.py"),
    "unbroken drain INSTANCE": Place("tests/docs/commands/test_machines.py"),
    "unbroken frontend": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    "unbroken worker": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    "unbroken registry": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    "unbroken keys": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    "unbroken certs": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    "unbroken up": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    "unbroken drain": Place("tests/cli/test_cli.py", "test_every_command_has_help", NAMED),
    ". .venv/bin/activate": Place("tests/docs/commands/test_small.py"),
    "ulimit -n": Place("tests/docs/commands/test_small.py"),
    ".venv/bin/python -m bench.hold": Place("tests/docs/commands/test_small.py"),
    ".venv/bin/python -m bench.scale": Place("tests/docs/commands/test_small.py"),
    "python -m bench.prompts": Place("tests/bench/test_prompts.py"),
    "make test": Place(".ci/run", "make lint test test-clients"),
    "make lint": Place(".ci/run", "make lint test test-clients"),
    "make test-clients": Place(".ci/run", "make lint test test-clients"),
    "make surface": Place(
        "tests/clients/test_surface.py", "SURFACE_TIMES", "takes some 15 minutes; it is run in small"
    ),
    "make simulate": Place("tests/simulation/test_campaign.py", "SEEDS", "takes some ten minutes; 200 seeds are run"),
    "python -m simulation seed": Place(
        "tests/simulation/test_campaign.py", 'simulate("seed"', "is run for another seed"
    ),
    "make pages": Place(
        "tests/docs/test_tables.py", "`make pages`", "would write into this tree; what it writes is compared"
    ),
    "make stubs": Place("tests/test_packaging.py", "services.stubs", "would write into this tree; the stubs are tried"),
    "make record-proto": Place("Makefile", "proto-released/*", "is for a release; lint compares with what it records"),
    "unbroken models pull": Place(
        "Makefile", "models pull $(MODEL)", "is run by `make model`, which `make test` needs"
    ),
    "make install": Place("Makefile", "up: install model", "is run by each of the others"),
    "make install-dev": Place("Makefile", "test: install-dev", "is run by `make test`"),
    "make bench": Place(".ci/run", "bench-small", "takes half an hour; CI runs it in small"),
    "make hold": Place("tests/docs/commands/test_small.py", "bench.hold", "takes minutes; it is run in small"),
    "make scale": Place("tests/docs/commands/test_small.py", "bench.scale", "takes minutes; it is run in small"),
    "make attacks": Place(
        "tests/http/h2/attacked/test_memory.py", "ATTACKS", "takes two minutes; each attack is tested without a plane"
    ),
    "make storm": Place(
        "tests/integration/admission/test_storm.py", "A storm of requests", "takes minutes; a smaller one is tested"
    ),
    ".venv/bin/pip install -e '.[huggingface]'": Place("Makefile", "'.[llamacpp,huggingface,certs]'", NO_COPY),
    "pip install 'unbroken[certs]'": Place("Makefile", "'.[llamacpp,certs]'", NO_COPY),
    "docker compose up": Place("tests/compose/project.py", '"up", "--detach", "--wait"'),
    "docker compose stop": Place("tests/compose/test_compose.py", 'compose("stop")'),
    "docker kill": Place("tests/compose/test_compose.py", 'docker("kill"'),
    "make compose-test": Place("tests/compose/test_compose.py", why_not="needs a Docker engine"),
    "docker compose --profile llamacpp up": Place("tests/docs/commands/test_containers.py", why_not=COMPOSE),
    "docker compose --profile trtllm up": Place("tests/docs/commands/test_containers.py", why_not=COMPOSE),
    "docker compose up frontend trtllm-1": Place("tests/docs/commands/test_containers.py", why_not=COMPOSE),
    "docker build -f": Place("tests/docs/commands/test_containers.py", why_not=IMAGE),
    "docker run --rm --gpus all --network host": Place(
        "tests/docs/commands/test_machines.py",
        why_not="needs a GPU; what runs in the container is run, on a fake TensorRT-LLM",
    ),
    "/gpu/smoke.py": Place(
        "tests/docs/commands/test_containers.py",
        why_not="needs a GPU; the script in the container is run, on a fake TensorRT-LLM",
    ),
    "mkdir -p /tmp/stubs/python": Place("tests/clients/test_stubs.py", "grpc_tools.protoc"),
    "python3 -m venv /tmp/stubs/venv": Place("tests/clients/test_stubs.py", "grpc_tools.protoc"),
    "/tmp/stubs/venv/bin/pip install": Place("tests/clients/test_stubs.py", "grpc_tools.protoc"),
    "python -m grpc_tools.protoc": Place("tests/clients/test_stubs.py", "grpc_tools.protoc"),
    "go install tool": Place("tests/clients/test_stubs.py"),
    "buf generate proto": Place("tests/clients/test_stubs.py", "go install tool"),
    "mvn --quiet": Place("tests/clients/test_stubs.py", "mvn"),
    "cp -R proto": Place("tests/clients/test_stubs.py", "npm ci"),
    "npm ci": Place("tests/clients/test_stubs.py"),
    "buf curl": Place("tests/clients/test_commands.py", "BUF", "stands for those in the blocks"),
    "from openai import OpenAI": Place("tests/clients/test_sdks.py"),
    "pip install ./clients/python": Place(
        "tests/clients/support/toolchains.py", '"--no-deps", wheel', "the wheel that it builds is installed and tried"
    ),
    "npm install ./clients/js": Place(
        "tests/clients/support/toolchains.py",
        '"--no-save"',
        "the package is installed as the tarball that it publishes",
    ),
}
