#!/bin/sh
# Runs the kit's own import, then imports dedup-gate's credential and workflows into n8n.
#
#   import.sh -c COMMAND    the kit's command, as its entrypoint /bin/sh would be given it
#
# It is in dedup-gate's image, beside the workflows, and runs in n8n's before each start of n8n: the first one, and
# any later one, when n8n may still be running. Where the kit's own import fails, this fails as without dedup-gate.
# Where only the rest fails, n8n starts all the same: it may have other work, and a workflow without its credential is
# refused by the gate, so it does nothing twice.
set -eu

/bin/sh "$@"

# Each time, so that another key arrives. Node writes the JSON, since a key may hold quotation marks; and no file
# ever holds the key.
import_credential() {
  node -p 'JSON.stringify([{
    id: "dedupGateHdrAuth",
    name: "dedup-gate API key",
    type: "httpHeaderAuth",
    data: { name: "X-API-Key", value: process.env.DEDUP_GATE_API_KEY },
  }])' | n8n import:credentials --input=/dev/stdin
}

# Only those that n8n does not have: imported again, a workflow would lose its changes, and be unpublished.
import_workflows() {
  # n8n writes the list into its log, which must be readable here whatever the kit's settings say of it.
  known=$(N8N_LOG_LEVEL=info N8N_LOG_FORMAT=text N8N_LOG_OUTPUT=console N8N_LOG_SCOPES='' \
    n8n list:workflow --onlyId) || return
  missing=$(mktemp -d) || return
  for workflow in "$(dirname "$0")"/n8n-workflows/*.json; do
    id=$(node -p 'require(process.argv[1]).id' "$workflow") || return
    printf '%s\n' "$known" | grep -qxF "$id" || cp "$workflow" "$missing" || return
  done
  # It can be removed where it is empty.
  rmdir "$missing" 2>/dev/null || n8n import:workflow --separate --input="$missing"
}

if ! { import_credential && import_workflows; }; then
  echo "dedup-gate: its credential or workflows could not be imported; n8n starts without the change" >&2
fi
