#!/bin/bash
# iproute2 6.1.0 (Debian 12): `tc -j class show` prints the classes of htb as text, with status 0.
#
# `tc -j qdisc show` of the same device is JSON, also of htb. A program that reads both by a JSON
# parser fails on the classes, which have the figures of a rate limit.
#
# Seen:
#   qdisc: JSON
#   class: not JSON, status 0: class htb 1:10 root prio 0 rate 500Mbit ceil 500Mbit ...
#
# It fails if that changes. It needs root (or a user namespace), apt, python3, and sch_htb.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
cd "$folder"

apt-get -q download iproute2=6.1.0-3 >/dev/null 2>&1
dpkg -x iproute2_*.deb unpacked
export PATH="$folder/unpacked/sbin:$folder/unpacked/bin:$PATH"
tc -V | grep -q 'iproute2-6\.1\.0'

unshare --net bash -euc '
    ip link add name v0 type veth peer name v1
    tc qdisc add dev v0 root handle 1: htb default 20
    tc class add dev v0 parent 1: classid 1:10 htb rate 500mbit
    tc -j qdisc show dev v0 > qdisc
    tc -j class show dev v0 > class
'
python3 -m json.tool < qdisc >/dev/null && echo "qdisc: JSON"
if python3 -m json.tool < class >/dev/null 2>&1; then
    echo "class: JSON"
    exit 1
fi
echo "class: not JSON, status 0: $(head -1 class)"
grep -q '^class htb 1:10 root prio 0 rate 500Mbit' class
