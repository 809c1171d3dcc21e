#!/bin/bash
# tshark 4.0.17 (Debian 12): a CNP, RoCEv2's notification of congestion, has an unknown opcode.
#
# The opcode of a CNP is 0x81 (IBTA annex A17; scapy.contrib.roce). tshark names the opcodes of
# reliable connections, and this one "Unknown OpCode": a statistic by its names misses the
# notifications for which such traces are made.
#
# Seen:
#   RRoCE RC Acknowledge QP=0x000011
#   RRoCE Unknown OpCodeQP=0x000011
#
# It fails if that changes. It needs apt, python3 with venv, PyPI, and the libraries of tshark,
# which `apt-get install tshark` brings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
cd "$folder"

version=4.0.17-0+deb12u3
apt-get -q download tshark=$version libwireshark16=$version libwiretap13=$version \
    libwsutil14=$version >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" unpacked; done
LD_LIBRARY_PATH=$(echo "$folder"/unpacked/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH

python3 -m venv scapy
scapy/bin/pip install -q scapy==2.7.0
scapy/bin/python - 2>/dev/null <<'PYTHON'
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.utils import wrpcap
from scapy.contrib.roce import AETH, BTH, cnp

def frame(bth):
    ether = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    return ether / IP(src="10.0.0.1", dst="10.0.0.2") / UDP(sport=49152, dport=4791) / bth

acknowledgement = BTH(opcode=0x11, dqpn=0x11, psn=1) / AETH(syndrome=0x1f, msn=1)
wrpcap("trace.pcap", [frame(acknowledgement), frame(cnp(dqpn=0x11))])
PYTHON
unpacked/usr/bin/tshark -r trace.pcap -T fields -e _ws.col.Protocol -e _ws.col.Info \
    -E separator=/s 2>/dev/null | sed 's/ *$//' | tee seen
diff seen - <<'SEEN'
RRoCE RC Acknowledge QP=0x000011
RRoCE Unknown OpCodeQP=0x000011
SEEN
