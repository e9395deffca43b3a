#!/usr/bin/env bash
# The peer that the bench compares with: NVIDIA Dynamo with its own mocker, isolated from everything else on this machine.
#
#   bench/peer/dynamo.sh install GGUF  installs its virtual environment and a tokeniser for it below $PEER_HOME, once
#   bench/peer/dynamo.sh check         fails with the reason if the peer cannot be started
#   bench/peer/dynamo.sh up [R]        starts etcd, two mockers that are R times as fast as by default (1.0) and a
#                                      frontend; prints {"url": …, "pid": of the frontend, "workers": [pids], "version": …}
#   bench/peer/dynamo.sh down          stops what `up` started
set -euo pipefail

readonly VERSION=1.6.1
readonly PEER_HOME=${PEER_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/unbroken/peer}
readonly HTTP_PORT=${PEER_HTTP_PORT:-18000} ETCD_PORT=${PEER_ETCD_PORT:-12379}
readonly WORKERS=2 UP_POLLS_MAX=120 DOWN_POLLS_MAX=50
readonly PYTHON=$PEER_HOME/venv/bin/python MODEL=$PEER_HOME/model RUN=$PEER_HOME/run
readonly URL=http://127.0.0.1:$HTTP_PORT
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE

fail() {
  echo "error: $*" >&2
  exit 1
}

install() {
  [ ! -e "$PEER_HOME/installed-$VERSION" ] || return 0
  mkdir -p "$PEER_HOME"
  python3 -m venv "$PEER_HOME/venv"
  # ai-dynamo is installed without its dependencies, which include GPU engines. The frontend and the mocker need only these.
  "$PYTHON" -m pip install --quiet --disable-pip-version-check "ai-dynamo-runtime==$VERSION" aiohttp certifi gguf \
    'kubernetes<33' msgspec numpy prometheus-client pyyaml pyzmq redis tokenizers tqdm transformers zstandard
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps "ai-dynamo==$VERSION"
  "$PYTHON" "$HERE/tokenizer.py" "${1:?a GGUF file, for its tokeniser}" "$MODEL"
  touch "$PEER_HOME/installed-$VERSION"
}

check() {
  [ -e "$PEER_HOME/installed-$VERSION" ] || fail "the peer is not installed: make peer"
  command -v etcd >/dev/null || fail "the peer needs etcd: make etcd"
}

up() {
  local speedup=${1:-1.0} workers=() number
  check
  down
  mkdir -p "$RUN"
  start etcd etcd --data-dir "$RUN/etcd" --listen-peer-urls http://127.0.0.1:0 \
    --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT"
  wait_until "http://127.0.0.1:$ETCD_PORT/health" true
  export ETCD_ENDPOINTS=http://127.0.0.1:$ETCD_PORT DYN_LOG=error
  for number in $(seq "$WORKERS"); do
    start "worker$number" "$PYTHON" -m dynamo.mocker --model-path "$MODEL" --model-name mocker --speedup-ratio "$speedup" \
      --max-num-seqs 1024 --num-gpu-blocks-override 65536
    workers+=("$(cat "$RUN/worker$number.pid")")
  done
  start frontend "$PYTHON" -m dynamo.frontend --http-port "$HTTP_PORT" --migration-limit 3
  wait_until "$URL/v1/models" mocker
  printf '{"url": "%s", "pid": %s, "workers": [%s, %s], "version": "%s"}\n' \
    "$URL" "$(cat "$RUN/frontend.pid")" "${workers[@]}" "$VERSION"
}

start() { # NAME COMMAND…
  local name=$1
  shift
  setsid "$@" >"$RUN/$name.log" 2>&1 </dev/null &
  echo $! >"$RUN/$name.pid"
}

wait_until() { # URL WORD-IN-ITS-ANSWER
  for _ in $(seq "$UP_POLLS_MAX"); do
    ! curl --silent --fail --max-time 2 "$1" | grep --quiet "$2" || return 0
    sleep 0.25
  done
  tail -n 3 "$RUN"/*.log >&2
  down
  fail "the peer did not come up: no $2 at $1"
}

down() {
  local file pid
  for file in "$RUN"/*.pid; do
    [ -e "$file" ] || continue
    pid=$(cat "$file")
    kill -KILL "$pid" 2>/dev/null || true
    for _ in $(seq "$DOWN_POLLS_MAX"); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    rm "$file"
  done
  rm -rf "$RUN/etcd"
}

case ${1:-} in
  install | check | up | down) "$@" ;;
  *) fail "usage: $0 install GGUF | check | up [R] | down" ;;
esac
