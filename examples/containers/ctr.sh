#!/bin/sh
# RDMA in a container of containerd without any capability. The host runs rocinante-agent, and has a
# network in /etc/cni/net.d, and its plugins in /opt/cni/bin.
#
#     ctr.sh IMAGE NAME WORD...         # ctr.sh localhost/rocinante:latest one /rocinante devices
#
# Before containerd 1.7 ctr cannot choose the user; from then on add `--user 1000`. It lets no
# process gain privileges, unless `--allow-new-privs` is there.
set -eu
drop=
for name in AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW \
    SETFCAP SETGID SETPCAP SETUID SYS_CHROOT; do
    drop="$drop --cap-drop CAP_$name"
done
# shellcheck disable=SC2086 # one word for each
exec ctr run --rm --cni $drop --env ROCINANTE_AGENT=/run/rocinante/agent.sock \
    --mount type=bind,src=/run/rocinante,dst=/run/rocinante,options=rbind:ro "$@"
