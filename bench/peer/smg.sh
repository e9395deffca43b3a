#!/usr/bin/env bash
# The second peer that the bench compares with: SMG, a gateway in Rust that passes bytes through, isolated from everything else.
#
#   bench/peer/smg.sh install     installs its virtual environment below $PEER_HOME, once
#   bench/peer/smg.sh check       fails with the reason if it cannot be started
#   bench/peer/smg.sh up URL…     starts it before the servers at these addresses; prints {"url": …, "pid": …, "version": …}
#   bench/peer/smg.sh down        stops what `up` started
set -euo pipefail

readonly VERSION=1.13.0
readonly PEER_HOME=${PEER_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/unbroken/peer}
readonly HTTP_PORT=${SMG_HTTP_PORT:-18100} METRICS_PORT=${SMG_METRICS_PORT:-18101}
readonly UP_POLLS_MAX=120 DOWN_POLLS_MAX=50
readonly VENV=$PEER_HOME/smg-venv RUN=$PEER_HOME/run-smg URL=http://127.0.0.1:$HTTP_PORT
readonly PID=$RUN/smg.pid

fail() {
  echo "error: $*" >&2
  exit 1
}

install() {
  [ ! -e "$PEER_HOME/installed-smg-$VERSION" ] || return 0
  mkdir -p "$PEER_HOME"
  python3 -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "smg==$VERSION"
  touch "$PEER_HOME/installed-smg-$VERSION"
}

check() {
  [ -e "$PEER_HOME/installed-smg-$VERSION" ] || fail "SMG is not installed: make peer-smg"
}

# The cheapest way for it to choose a server: by turns. By default it compares prompts.
up() { # URL…
  check
  down
  mkdir -p "$RUN"
  setsid "$VENV/bin/smg" launch --host 127.0.0.1 --port "$HTTP_PORT" --worker-urls "$@" --policy round_robin \
    --prometheus-host 127.0.0.1 --prometheus-port "$METRICS_PORT" --log-level error >"$RUN/smg.log" 2>&1 </dev/null &
  echo $! >"$PID"
  for _ in $(seq "$UP_POLLS_MAX"); do
    if curl --silent --fail --max-time 2 "$URL/v1/models" | grep --quiet mocker; then
      printf '{"url": "%s", "pid": %s, "version": "%s"}\n' "$URL" "$(cat "$PID")" "$VERSION"
      return
    fi
    sleep 0.25
  done
  tail -n 3 "$RUN/smg.log" >&2
  down
  fail "SMG did not come up: no mocker at $URL/v1/models"
}

down() {
  [ -e "$PID" ] || return 0
  local pid
  pid=$(cat "$PID")
  kill -KILL "$pid" 2>/dev/null || true
  for _ in $(seq "$DOWN_POLLS_MAX"); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  rm "$PID"
}

case ${1:-} in
  install | check | up | down) "$@" ;;
  *) fail "usage: $0 install | check | up URL… | down" ;;
esac
