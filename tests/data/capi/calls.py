"""Calls that few programs make, right and wrong: each has a table of arguments and what becomes of
them. What a right call gives is looked at behind its table."""

import errno
import mmap
import socket
import tempfile

from verbs import *

POINTERS = ["ibv_reg_mr_iova", "ibv_reg_mr_iova2", "ibv_create_ah_from_wc", "ibv_create_ah"]
for name in POINTERS:
    getattr(lib, name).restype = c.c_void_p
# -1 with errno; all others return the errno.
MINUS = ["ibv_init_ah_from_wc", "ibv_get_pkey_index", "ibv_read_sysfs_file", "ibv_get_device_index"]
DESTROYS = {"ibv_reg_mr_iova": "ibv_dereg_mr", "ibv_reg_mr_iova2": "ibv_dereg_mr",
            "ibv_create_ah_from_wc": "ibv_destroy_ah"}
failures = []


def expect(name, rows):
    """Rows of: what is given, the errno or 0, and the arguments."""
    for why, error, *arguments in rows:
        value, number = call(name, *arguments)
        if name in POINTERS:
            found = 0 if value else number
        elif name in MINUS:
            found = number if value == -1 else 0
        else:
            found = value
        if found != error:
            failures.append(f"{name}: {why}: {value}, errno {number}, not {error}")
        if name in POINTERS and value:
            made(DESTROYS[name], value)


def equal(what, found, wanted):
    if found != wanted:
        failures.append(f"{what}: {found}, not {wanted}")


U8, U16, U32, U64, SIZE, I = c.c_uint8, c.c_uint16, c.c_uint32, c.c_uint64, c.c_size_t, c.c_int
E, FAULT, NONE = errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP
count = c.c_int()
devices = made("ibv_get_device_list", c.byref(count))
listed = [word(devices + 8 * index, c.c_void_p) for index in range(count.value)]
context = made("ibv_open_device", listed[0])
pd = made("ibv_alloc_pd", context)
cq = made("ibv_create_cq", context, I(16), None, None, I(0))
rc = made("ibv_create_qp", pd, init(RC, cq, cq))
ud = made("ibv_create_qp", pd, init(UD, cq, cq))
garbage = c.create_string_buffer(b"\x5a" * 1024, 1024)
BAD = [("NULL", None), ("garbage", c.addressof(garbage) + 512 & ~63), ("a domain", pd)]
BAD_PDS = BAD[:2] + [("a context", context)]

# Memory under an address that the program chooses.
page = mmap.PAGESIZE
mapped = mmap.mmap(-1, 3 * page)
at = c.addressof(c.c_char.from_buffer(mapped))
c.CDLL(None).munmap(c.c_void_p(at + 2 * page), SIZE(page))
c.CDLL(None).mprotect(c.c_void_p(at + page), SIZE(page), I(mmap.PROT_READ))
LOCAL_WRITE, ON_DEMAND, PERSISTENT = 1, 1 << 6, 1 << 9
for name, bits in [("ibv_reg_mr_iova", I), ("ibv_reg_mr_iova2", U32)]:
    expect(name, [
        (why, E, bad, at, SIZE(16), U64(0), bits(0)) for why, bad in BAD_PDS
    ] + [
        ("an iova", 0, pd, at, SIZE(16), U64(0x1000), bits(LOCAL_WRITE)),
        ("iova 0", 0, pd, at, SIZE(16), U64(0), bits(LOCAL_WRITE)),
        ("an iova in a page", 0, pd, at + 7, SIZE(16), U64(0x1007), bits(LOCAL_WRITE)),
        ("another place in a page", E, pd, at, SIZE(16), U64(0x1007), bits(LOCAL_WRITE)),
        ("iova 0 for a byte in a page", E, pd, at + 7, SIZE(16), U64(0), bits(LOCAL_WRITE)),
        ("the last page", 0, pd, at, SIZE(16), U64(2**64 - page), bits(LOCAL_WRITE)),
        ("an iova that wraps", E, pd, at, SIZE(page + 1), U64(2**64 - page), bits(0)),
        ("an address that wraps", E, pd, 2**64 - 8, SIZE(16), U64(0), bits(0)),
        ("read-only memory to read", 0, pd, at + page, SIZE(16), U64(0), bits(0)),
        ("read-only memory to write", FAULT, pd, at + page, SIZE(16), U64(0), bits(LOCAL_WRITE)),
        ("up to a hole", 0, pd, at, SIZE(2 * page), U64(0), bits(0)),
        ("into a hole", FAULT, pd, at, SIZE(2 * page + 1), U64(0), bits(0)),
        ("no memory", FAULT, pd, None, SIZE(16), U64(0), bits(0)),
        ("all memory", E, pd, None, SIZE(2**64 - 1), U64(0), bits(ON_DEMAND)),
        ("REMOTE_WRITE alone", E, pd, at, SIZE(16), U64(0), bits(2)),
        ("REMOTE_ATOMIC alone", E, pd, at, SIZE(16), U64(0), bits(8)),
        ("FLUSH_PERSISTENT", NONE, pd, at, SIZE(16), U64(0), bits(PERSISTENT)),
    ] + [
        # The upper ten may be taken for nothing, the others not.
        (f"bit {bit}", 0 if 20 <= bit < 30 else E, pd, at, SIZE(16), U64(0), bits(1 << bit))
        for bit in range(10, 31)
    ])
mr = made("ibv_reg_mr_iova2", pd, at, SIZE(16), U64(0x1000), U32(LOCAL_WRITE))
equal("the address of a region with an iova", word(mr + 16, c.c_void_p), at)
equal("its length", word(mr + 24, SIZE), 16)
made("ibv_dereg_mr", mr)

# The way back to the sender of a datagram.
own = gid(context, 0)[-4:]
peer, group, nowhere = own[:3] + b"\x63", bytes([239, 1, 2, 3]), bytes([192, 0, 2, 7])


def mapped_to(ip):
    """The GID of an address of IPv4."""
    return b"\0" * 10 + b"\xff\xff" + ip


def completion(flags=1, sl=0):
    # `struct ibv_wc`.
    return c.create_string_buffer(struct.pack("<QIIIIIIIIHHBB", 0, 0, 0, 0, 40, 0, 0, 0, flags, 0,
                                              5, sl, 3).ljust(48, b"\0"), 48)


def header(source, target, tos=0x68, ttl=9, first=b"\0" * 20):
    """The 40 bytes before a datagram of IPv4."""
    words = struct.pack(">BBHHHBBH4s4s", 0x45, tos, 60, 0, 0, ttl, 17, 0, source, target)
    total = sum(struct.unpack(">10H", words))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return c.create_string_buffer(
        first + words[:10] + struct.pack(">H", ~total & 0xFFFF) + words[12:], 40)


def header6(source, target, word=0x60A00000 | 0x12345, following=17):
    return c.create_string_buffer(
        struct.pack(">IHBB16s16s", word, 8, following, 33, source, target), 40)


attr, wc, grh = c.create_string_buffer(32), completion(), header(peer, own)
foreign = socket.inet_pton(socket.AF_INET6, "2001:db8::7")
expect("ibv_init_ah_from_wc", [
    (why, E, bad, U8(1), wc, grh, attr) for why, bad in BAD
] + [
    ("from a peer", 0, context, U8(1), wc, grh, attr),
    ("to a group", 0, context, U8(1), wc, header(peer, group), attr),
    ("without a GRH", 0, context, U8(1), completion(flags=0), grh, attr),
    ("port 0", E, context, U8(0), wc, grh, attr),
    ("port 2", E, context, U8(2), wc, grh, attr),
    ("no completion", E, context, U8(1), None, grh, attr),
    ("no header", E, context, U8(1), wc, None, attr),
    ("no room", E, context, U8(1), wc, grh, None),
    ("to another", E, context, U8(1), wc, header(peer, peer), attr),
    ("IPv6 without an address", E, context, U8(1), wc, header6(foreign, foreign), attr),
    ("neither IPv4 nor IPv6", errno.EPROTONOSUPPORT, context, U8(1), wc, bytes(40), attr),
])
for what, flags, wanted in [
    ("a peer", 1, (mapped_to(peer), 0, 0, 9, 0x68, 5, 7, 3, 0, 1, 1)),
    ("no GRH", 0, (bytes(16), 0, 0, 0, 0, 5, 7, 3, 0, 0, 1)),
]:
    c.memset(attr, 0xFF, 32)
    made("ibv_init_ah_from_wc", context, U8(1), completion(flags, sl=7), grh, attr)
    equal(f"the way to {what}", struct.unpack_from("<16sIBBBxHBBBBB", attr), wanted)
expect("ibv_create_ah_from_wc", [
    (why, E, bad, wc, grh, U8(1)) for why, bad in BAD_PDS
] + [
    ("to a peer", 0, pd, wc, grh, U8(1)),
    ("without a GRH", E, pd, completion(flags=0), grh, U8(1)),
    ("port 2", E, pd, wc, grh, U8(2)),
    ("no completion", E, pd, None, grh, U8(1)),
    ("no header", E, pd, wc, None, U8(1)),
    ("to no way", errno.ENETUNREACH, pd, wc, header(nowhere, own), U8(1)),
    ("to another", E, pd, wc, header(peer, peer), U8(1)),
])
expect("ibv_create_ah", [
    ("of another family", E, pd, path(socket.inet_pton(socket.AF_INET6, "2001:db8::7"))),
    ("no way", errno.ENETUNREACH, pd, path(mapped_to(nowhere))),
])
expect("ibv_resolve_eth_l2_from_gid", [
    ("a path", -NONE, context, path(gid(context, 0)), c.create_string_buffer(6), None)])

# Groups.
mgid = mapped_to(group)
attach = [(f"once {again}", 0, ud, mgid, U16(0)) for again in range(2)]
expect("ibv_attach_mcast", attach)
expect("ibv_detach_mcast", [
    (why, E, bad, mgid, U16(0)) for why, bad in BAD
] + [
    ("no GID", E, ud, None, U16(0)),
    ("no group", E, ud, gid(context, 0), U16(0)),
    ("another group", E, ud, mgid[:-1] + b"\4", U16(0)),
    ("of a connection", E, rc, mgid, U16(0)),
    ("what is attached", 0, ud, mgid, U16(0)),
    ("what is not", E, ud, mgid, U16(0)),
])

# Questions.
expect("ibv_get_pkey_index", [
    (why, E, bad, U8(1), U16(0xFFFF)) for why, bad in BAD
] + [
    ("the default key", 0, context, U8(1), U16(0xFFFF)),
    ("its limited form", E, context, U8(1), U16(socket.htons(0x7FFF))),
    ("key 0", E, context, U8(1), U16(0)),
    ("port 0", E, context, U8(0), U16(0xFFFF)),
    ("port 2", E, context, U8(2), U16(0xFFFF)),
])
expect("ibv_get_device_index", [(why, E, bad) for why, bad in BAD])
indexes = [call("ibv_get_device_index", device)[0] for device in listed]
equal("the numbers of the devices", indexes, list(range(len(listed))))
speed = U64(77)
expect("ibv_query_port_speed", [
    (why, E, bad, U32(1), c.byref(speed)) for why, bad in BAD
] + [
    ("port 0", E, context, U32(0), c.byref(speed)),
    ("port 257", E, context, U32(257), c.byref(speed)),
    ("no room", E, context, U32(1), None),
])
equal("the speed of a wrong call", speed.value, 77)
expect("ibv_query_port_speed", [("the port", 0, context, U32(1), c.byref(speed))])
# The link is a veth, of 10 Gb/s.
equal("the port's speed", speed.value, 100)
for flags in [0, 1, 2, 3, 4, 1 << 31]:
    for operation in [0, 2, 4, 99, -1]:
        expect("ibv_query_qp_data_in_order", [("nothing is told", 0, rc, I(operation), U32(flags))])
ece = c.create_string_buffer(struct.pack("<III", 0x15B3, 1, 0), 12)
for name in ["ibv_query_ece", "ibv_set_ece"]:
    expect(name, [("refused", NONE, qp, ece) for qp in [rc, ud]])
equal("the options that nobody has", struct.unpack("<III", ece), (0x15B3, 1, 0))

# A file of a folder, without its last newline; none that has more than there is room for.
room = c.create_string_buffer(b"\x5a" * 16, 16)
with tempfile.TemporaryDirectory() as folder:
    for name, text in [("none", b""), ("line", b"4\n"), ("lines", b"1\n2\n"), ("word", b"seven"),
                       ("full", b"15 characters..\n"), ("over", b"16 characters...")]:
        with open(f"{folder}/{name}", "wb") as file:
            file.write(text)
    folder = folder.encode()
    expect("ibv_read_sysfs_file", [
        ("no folder", E, None, b"line", room, SIZE(16)),
        ("no name", E, folder, None, room, SIZE(16)),
        ("no room", E, folder, b"line", None, SIZE(16)),
        ("room for nothing", E, folder, b"line", room, SIZE(0)),
        ("no such file", errno.ENOENT, folder, b"other", room, SIZE(16)),
        ("a folder", errno.EISDIR, folder, b".", room, SIZE(16)),
        ("too long", errno.ENOSPC, folder, b"over", room, SIZE(16)),
        ("too long for no zero", errno.ENOSPC, folder, b"word", room, SIZE(5)),
        ("endless", errno.ENOSPC, b"/dev", b"zero", room, SIZE(16)),
    ])
    for name, size, wanted in [
        (b"none", 16, b""), (b"line", 16, b"4"), (b"line", 2, b"4"), (b"lines", 16, b"1\n2"),
        (b"word", 16, b"seven"), (b"word", 6, b"seven"), (b"full", 16, b"15 characters.."),
    ]:
        c.memset(room, 0x5A, 16)
        value, number = call("ibv_read_sysfs_file", folder, name, room, SIZE(size))
        equal(f"{name} in {size} bytes", (value, room.value), (len(wanted), wanted))
        equal(f"what is behind {name}", room.raw[size:], b"\x5a" * (16 - size))

for failure in failures:
    print(failure)
print("all as expected" if not failures else f"{len(failures)} failures")
