#!/bin/bash
# Linux 6.18: RTM_GETQDISC for one queueing discipline gets no answer but "done", unless the request
# has NLM_F_ECHO.
#
# rtnetlink(7) and libraries know NLM_F_ECHO for requests that change something. RTM_GETLINK and
# RTM_GETROUTE for one object answer without it. RTM_GETQDISC for one acknowledges with 0, and sends
# the discipline to those who listen to the group RTNLGRP_TC (`tc_get_qdisc` of sch_api.c notifies).
# A dump (NLM_F_DUMP), which `tc` uses, is answered as usual.
#
# Seen (Linux 6.18, pyroute2 0.7.12 for the messages):
#   link: answer RTM_NEWLINK
#   qdisc: no answer
#   qdisc with NLM_F_ECHO: answer RTM_NEWQDISC
#
# It fails if that changes. It needs root, python3 with venv, PyPI, and sch_tbf.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyroute2==0.7.12
cat > "$folder/ask.py" <<'PYTHON'
import socket
from pyroute2 import IPRoute
from pyroute2.netlink import NLM_F_ACK, NLM_F_ECHO, NLM_F_REQUEST
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_GETQDISC, RTM_NEWLINK, RTM_NEWQDISC
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

NAMES = {RTM_NEWLINK: "RTM_NEWLINK", RTM_NEWQDISC: "RTM_NEWQDISC"}

with IPRoute() as setup:
    setup.link("add", ifname="v0", kind="veth", peer={"ifname": "v1"})
    index = setup.link_lookup(ifname="v0")[0]
    setup.tc("add", "tbf", index, 0x10000, rate=1000000, burst=10000, latency=10000)

def ask(what, message, kind, flags):
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    link.bind((0, 0))
    message["header"]["type"] = kind
    message["header"]["flags"] = NLM_F_REQUEST | NLM_F_ACK | flags
    message["header"]["sequence_number"] = 1
    message.encode()
    link.send(message.data)
    answers, done = [], False
    while not done:
        data = link.recv(65536)
        while data:
            length = int.from_bytes(data[:4], "little")
            of = int.from_bytes(data[4:6], "little")
            if of == 2:
                assert int.from_bytes(data[16:20], "little") == 0, "refused"
                done = True
            else:
                answers.append(NAMES.get(of, str(of)))
            data = data[(length + 3) & ~3:]
    print(f"{what}: answer {answers[0]}" if answers else f"{what}: no answer")

def link():
    message = ifinfmsg()
    message["index"] = index
    return message

def qdisc():
    message = tcmsg()
    message["index"], message["handle"], message["parent"] = index, 0, 0xFFFFFFFF
    return message

ask("link", link(), RTM_GETLINK, 0)
ask("qdisc", qdisc(), RTM_GETQDISC, 0)
ask("qdisc with NLM_F_ECHO", qdisc(), RTM_GETQDISC, NLM_F_ECHO)
PYTHON
unshare --net "$folder/venv/bin/python" "$folder/ask.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
link: answer RTM_NEWLINK
qdisc: no answer
qdisc with NLM_F_ECHO: answer RTM_NEWQDISC
SEEN
