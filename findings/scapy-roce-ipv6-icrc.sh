#!/bin/bash
# scapy 2.5.0 (PyPI, and Debian 12), scapy.contrib.roce: over IPv6 the ICRC of every packet is 0.
#
# A BTH over IPv4 gets the ICRC of IBTA A17. The same BTH over IPv6 gets four zero bytes, without an
# error: scapy logs "The underlayer protocol IPv6 is not supported". Receivers that check the ICRC
# drop such packets.
# Version 2.7.0 computes it.
#
# Seen (Python 3.11):
#   2.5.0: IPv4 236f2ad7, IPv6 00000000
#   2.7.0: IPv4 236f2ad7, IPv6 ca669085
#
# It fails if that changes. It needs python3 with venv, and PyPI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/icrc.py" <<'PYTHON'
import logging
logging.getLogger("scapy").setLevel(logging.ERROR)
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw
from scapy.contrib.roce import BTH

def icrc(ip):
    packet = ip / UDP(sport=49152, dport=4791) / BTH(opcode=4, dqpn=0x11, psn=1) / Raw(b"abcd")
    return bytes(packet)[-4:].hex()

print("IPv4", icrc(IP(src="10.0.0.1", dst="10.0.0.2")) + ", IPv6",
      icrc(IPv6(src="fd00::1", dst="fd00::2")))
PYTHON

for version in 2.5.0 2.7.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "scapy==$version"
    echo "$version: $("$folder/$version/bin/python" "$folder/icrc.py" 2>/dev/null)"
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
2.5.0: IPv4 236f2ad7, IPv6 00000000
2.7.0: IPv4 236f2ad7, IPv6 ca669085
SEEN
