#!/bin/sh
# RDMA in a container of Docker without any privilege. The host runs rocinante-agent.
#
#     docker network create rdma
#     docker.sh IMAGE WORD...           # docker.sh localhost/rocinante devices
set -eu
exec docker run --rm --network "${NETWORK:-rdma}" \
    --volume /run/rocinante:/run/rocinante:ro --env ROCINANTE_AGENT=/run/rocinante/agent.sock \
    --user 1000 --cap-drop all --security-opt no-new-privileges "$@"
