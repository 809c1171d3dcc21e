#!/bin/sh
# RDMA in a container of podman without any privilege. The host runs rocinante-agent, and has the
# agent's cdi.json as /etc/cdi/rocinante.json, mode 0644.
#
#     podman network create rdma
#     podman.sh IMAGE WORD...           # podman.sh localhost/rocinante devices
set -eu
exec podman run --rm --network "${NETWORK:-rdma}" --device rocinante.dev/hca=0 \
    --user 1000 --cap-drop all --security-opt no-new-privileges "$@"
