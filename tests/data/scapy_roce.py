"""What scapy makes of the RoCEv2 packets in a capture: one JSON object per line, the first about scapy itself.

Run as a process of its own, because scapy is under the GPL: nothing of ours imports it.
"""

import json
import sys
import zlib

import scapy
from scapy.contrib.roce import AETH, BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.utils import rdpcap


def icrc_of_ipv6(packet):
    """The formula over scapy's own layers, for versions whose RoCE layer knows IPv4 only (before 2.6)."""
    ip, udp, data = packet[IPv6].copy(), packet[UDP].copy(), bytes(packet[UDP].payload)
    ip.tc, ip.fl, ip.hlim, udp.chksum = 0xFF, 0xFFFFF, 0xFF, 0xFFFF
    ip.remove_payload()
    udp.remove_payload()
    covered = b"\xff" * 8 + bytes(ip) + bytes(udp) + data[:4] + b"\xff" + data[5:-4]
    return (zlib.crc32(covered) & 0xFFFFFFFF).to_bytes(4, "little")


def describe(packet, knows_ipv6):
    bth = packet[BTH]
    if IP in packet or knows_ipv6:
        icrc = bth.compute_icrc(b"")
    else:
        icrc = icrc_of_ipv6(packet)
    fields = {
        name: getattr(bth, name)
        for name in (
            "opcode", "solicited", "migreq", "padcount", "version", "pkey", "fecn", "becn",
            "resv6", "dqpn", "ackreq", "resv7", "psn",
        )
    }
    fields["icrc"] = icrc.hex()
    if AETH in packet:
        fields["syndrome"], fields["msn"] = packet[AETH].syndrome, packet[AETH].msn
    return fields


def main():
    knows_ipv6 = "IPv6" in vars(sys.modules["scapy.contrib.roce"])
    names = BTH.fields_desc[0].i2s
    print(json.dumps({
        "version": scapy.VERSION,
        "knows_ipv6": knows_ipv6,
        "opcodes": {str(value): name for value, name in names.items()},
    }))
    for packet in rdpcap(sys.argv[1]):
        print(json.dumps(describe(packet, knows_ipv6)))


main()
