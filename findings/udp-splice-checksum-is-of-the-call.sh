#!/bin/bash
# Linux 6.18: which bytes of a page that was spliced into a UDP socket arrive depends on
# UDP_SEGMENT.
#
# An empty sendmsg(2) with MSG_MORE begins a message. vmsplice(2) and splice(2) end it by a page,
# which the kernel takes by reference. If the page changes before the message is read:
# - with UDP_SEGMENT the message arrives, and has the new bytes;
# - without it, the kernel has made the checksum within the call, also on loopback: the message is
#   dropped when it is read: poll(2) says that there is one, recv(2) finds none (EAGAIN), and
#   Udp: InCsumErrors of /proc/net/snmp counts it.
#
# Seen (Linux 6.18.44, Python 3.11.7, its standard library alone):
#   UDP_SEGMENT none, page stays: readable, 1, 0 errors
#   UDP_SEGMENT none, page changes: readable, nothing, 1 errors
#   UDP_SEGMENT 2048, page stays: readable, 1, 0 errors
#   UDP_SEGMENT 2048, page changes: readable, 2, 0 errors
#
# It fails if that changes. It needs root (a network namespace of its own), python3 and iproute2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/ask.py" <<'PYTHON'
import ctypes, mmap, os, select, socket, struct

UDP_SEGMENT, UDP_GRO, PAGE = 103, 104, 4096
libc = ctypes.CDLL(None, use_errno=True)

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]

def errors():
    names, values = [l.split()[1:] for l in open("/proc/net/snmp") if l.startswith("Udp:")]
    return int(dict(zip(names, values))["InCsumErrors"])

def arrives(segment, changes):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    s.bind(("127.0.0.1", 0))
    s.setblocking(False)
    page = mmap.mmap(-1, PAGE)
    page[:] = b"1" * PAGE
    read, write = os.pipe()
    control = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", segment))] if segment else []
    s.sendmsg([], control, socket.MSG_MORE, s.getsockname())
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    assert libc.vmsplice(write, ctypes.byref(Vector(at, PAGE)), 1, 0) == PAGE
    assert libc.splice(read, None, s.fileno(), None, PAGE, 0) == PAGE
    if changes:
        ctypes.memset(at, ord("2"), PAGE)
    before = errors()
    readable = bool(select.select([s], [], [], 5)[0])
    try:
        got = s.recv(65536)[:1]
    except BlockingIOError:
        got = None
    return readable, got, errors() - before

for segment in (0, PAGE // 2):
    for changes in (False, True):
        readable, first, errors_now = arrives(segment, changes)
        print(f"UDP_SEGMENT {segment or 'none'}, page {'changes' if changes else 'stays'}: "
              f"{'readable' if readable else 'not readable'}, "
              f"{first.decode() if first else 'nothing'}, {errors_now} errors")
PYTHON
unshare --net bash -c "ip link set lo up && exec python3 $folder/ask.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
UDP_SEGMENT none, page stays: readable, 1, 0 errors
UDP_SEGMENT none, page changes: readable, nothing, 1 errors
UDP_SEGMENT 2048, page stays: readable, 1, 0 errors
UDP_SEGMENT 2048, page changes: readable, 2, 0 errors
SEEN
