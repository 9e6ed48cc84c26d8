#!/usr/bin/env bash
# Serves nano through SGLang with RedKnot, asks it questions with and without reuse, and stops everything again.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'TEXT'
usage: scripts/serve_demo.sh [--profile NAME] [--tp-size N] [--store DIR] [--port N] [-- OPTIONS]

Builds artifacts of examples/corpus where DIR has none, starts SGLang's server on a free loopback port, asks the same
questions with reuse off and auto, prints the time to the first token of both as the client saw it, and stops the server.

  --profile NAME   reuse profile of the server (default: rowsparse)
  --tp-size N      tensor-parallel ranks (default: 1)
  --store DIR      artifact store (default: out/serve-demo/store)
  --port N         port of the server (default: a free one)
  -- OPTIONS       for the questions; see python -m examples.ask_server --help

Environment: VENV_SGLANG is the virtual environment with SGLang (default: .venv-sglang).
TEXT
}

fail() {
    echo "serve_demo: $1" >&2
    exit "${2:-2}"
}

profile=rowsparse tp_size=1 port='' store=out/serve-demo/store
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        --profile | --tp-size | --port | --store)
            (($# > 1)) || fail "$1 needs a value"
            name=${1#--} && declare "${name//-/_}=$2" && shift 2 ;;
        *) fail "unknown option $1; see --help" ;;
    esac
done

python=${VENV_SGLANG:-.venv-sglang}/bin/python
[[ -x $python ]] || fail "$python is missing; 'make venv-sglang' makes the environment (or set VENV_SGLANG)"
"$python" -c 'import sglang, openai' 2>/dev/null || fail "$python has no sglang; 'make venv-sglang' installs it"

server='' client=''
stop() {
    trap - EXIT INT TERM HUP
    [[ -z $client ]] || kill "$client" 2>/dev/null || true
    [[ -n $server ]] || return 0
    kill -TERM -- "-$server" 2>/dev/null || return 0
    for _ in {1..50}; do
        kill -0 -- "-$server" 2>/dev/null || return 0
        sleep 0.2
    done
    kill -KILL -- "-$server" 2>/dev/null || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

out=$(dirname "$store")
mkdir -p "$out"
echo "building what $store lacks of examples/corpus"
"$python" -m redknot build examples/corpus --store "$store" --profile "$profile" --tp-size "$tp_size" \
    || fail "the artifacts could not be built" 1

[[ -n $port ]] || port=$("$python" -c 'from eval.engines.launched import free_port; print(free_port())')
log=$out/server.log
echo "starting the server on 127.0.0.1:$port; it writes to $log"
setsid "$python" -m sglang.launch_server --model-path nano --device cpu \
    --enable-redknot --redknot-store "$store" --redknot-profile "$profile" --tp-size "$tp_size" \
    --host 127.0.0.1 --port "$port" >"$log" 2>&1 </dev/null &
server=$!
disown "$server"  # or bash reports how it ended
until (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    kill -0 "$server" 2>/dev/null || fail "the server ended: $(tail -n 1 "$log")" 1
    sleep 0.5
done

"$python" -m examples.ask_server --url "http://127.0.0.1:$port" "$@" &
client=$!
status=0
wait "$client" || status=$?
client=''
exit "$status"
