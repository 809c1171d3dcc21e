"""Calls of libibverbs with what no correct program gives, by ctypes: pointers are numbers here.

Prints each call that did not fail as its manual page says, and ends with "all as expected" if there
is none. A crash ends the program otherwise.
"""

import ctypes as c
import errno
import mmap
import os
import struct
import sys

lib = c.CDLL("libibverbs.so.1", use_errno=True)
PTR = ["ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr", "ibv_create_cq",
       "ibv_create_qp", "ibv_create_srq", "ibv_create_ah", "ibv_create_comp_channel",
       "ibv_import_device", "ibv_reg_dmabuf_mr", "ibv_qp_to_qp_ex"]
for name in PTR:
    getattr(lib, name).restype = c.c_void_p
failures = []


def call(name, *arguments):
    c.set_errno(0)
    arguments = [c.c_void_p(a) if isinstance(a, (int, type(None))) else a for a in arguments]
    value = getattr(lib, name)(*arguments)
    return value, c.get_errno()


def refuses(what, name, *arguments, value=None, error=errno.EINVAL):
    """NULL, -1 or the errno itself, as the call's value says; each with errno."""
    got, number = call(name, *arguments)
    if value is None and name not in PTR:
        number = got if got == number else f"{got} with errno {number}"
    elif got != value:
        number = f"value {got}"
    if number != error:
        failures.append(f"{name}: {what}: {number}, not {error}")


def buffer(size):
    return c.create_string_buffer(size)


count = c.c_int()
devices = call("ibv_get_device_list", c.byref(count))[0]
assert devices and count.value == 2, count
first = c.c_void_p.from_address(devices).value
context = call("ibv_open_device", first)[0]
assert context, os.strerror(c.get_errno())

# Handles that are none.
garbage = c.addressof(c.create_string_buffer(b"\x5a" * 4096, 4096))
keep = c.create_string_buffer(b"\x5a" * 8192, 8192)
garbage = c.addressof(keep) + 1024 & ~63
for what, bad in [("NULL", None), ("garbage", garbage), ("unaligned", garbage + 3)]:
    refuses(what, "ibv_open_device", bad)
    refuses(what, "ibv_alloc_pd", bad)
    refuses(what, "ibv_close_device", bad, value=-1)
    refuses(what, "ibv_query_device", bad, buffer(400))
    refuses(what, "ibv_query_port", bad, c.c_uint8(1), buffer(64))
    refuses(what, "ibv_query_gid", bad, c.c_uint8(1), c.c_int(0), buffer(16), value=-1)
    refuses(what, "ibv_query_pkey", bad, c.c_uint8(1), c.c_int(0), buffer(2), value=-1)
    refuses(what, "ibv_create_comp_channel", bad)
    refuses(what, "ibv_create_cq", bad, c.c_int(1), None, None, c.c_int(0))
    refuses(what, "ibv_reg_mr", bad, keep, c.c_size_t(16), c.c_int(0))
    refuses(what, "ibv_create_qp", bad, buffer(64))
    refuses(what, "ibv_create_srq", bad, buffer(24))
    refuses(what, "ibv_create_ah", bad, buffer(32))
    refuses(what, "ibv_qp_to_qp_ex", bad)
    refuses(what, "ibv_get_cq_event", bad, buffer(8), buffer(8), value=-1)
    refuses(what, "ibv_get_async_event", bad, buffer(16), value=-1)
    for name in ["ibv_dealloc_pd", "ibv_dereg_mr", "ibv_destroy_cq", "ibv_destroy_qp",
                 "ibv_destroy_srq", "ibv_destroy_ah", "ibv_destroy_comp_channel"]:
        refuses(what, name, bad)
    refuses(what, "ibv_modify_qp", bad, buffer(144), c.c_int(1))
    refuses(what, "ibv_query_qp", bad, buffer(144), c.c_int(1), buffer(64))
    refuses(what, "ibv_modify_srq", bad, buffer(12), c.c_int(1))
    refuses(what, "ibv_query_srq", bad, buffer(12))
    refuses(what, "ibv_attach_mcast", bad, buffer(16), c.c_uint16(0))
    call("ibv_ack_cq_events", bad, c.c_uint(1))
    call("ibv_ack_async_event", None)

# Numbers out of range.
refuses("port 2", "ibv_query_port", context, c.c_uint8(2), buffer(64))
refuses("port 0", "ibv_query_port", context, c.c_uint8(0), buffer(64))
refuses("no room", "ibv_query_device", context, None)
refuses("index -1", "ibv_query_gid", context, c.c_uint8(1), c.c_int(-1), buffer(16), value=-1)
refuses("index 9999", "ibv_query_gid", context, c.c_uint8(1), c.c_int(9999), buffer(16), value=-1)
refuses("port 2", "ibv_query_gid", context, c.c_uint8(2), c.c_int(0), buffer(16), value=-1)
refuses("index 1", "ibv_query_pkey", context, c.c_uint8(1), c.c_int(1), buffer(2), value=-1)
refuses("depth 0", "ibv_create_cq", context, c.c_int(0), None, None, c.c_int(0))
refuses("depth -1", "ibv_create_cq", context, c.c_int(-1), None, None, c.c_int(0))
refuses("too deep", "ibv_create_cq", context, c.c_int(0x7FFFFFFF), None, None, c.c_int(0))
refuses("vector 1", "ibv_create_cq", context, c.c_int(1), None, None, c.c_int(1))

pd = call("ibv_alloc_pd", context)[0]
assert pd, os.strerror(c.get_errno())
memory = buffer(4096)
for what, access in [("REMOTE_WRITE alone", 2), ("REMOTE_ATOMIC alone", 8), ("bit 18", 1 << 18)]:
    refuses(what, "ibv_reg_mr", pd, memory, c.c_size_t(4096), c.c_int(access))
refuses("the end of the address space", "ibv_reg_mr", pd, (1 << 64) - 4096, c.c_size_t(8192),
        c.c_int(1))
refuses("FLUSH_PERSISTENT", "ibv_reg_mr", pd, memory, c.c_size_t(4096), c.c_int(1 << 9),
        error=errno.EOPNOTSUPP)
mr = call("ibv_reg_mr", pd, memory, c.c_size_t(4096), c.c_int(0x100003))[0]
assert mr, "relaxed ordering"
refuses("a region in it", "ibv_dealloc_pd", pd, error=errno.EBUSY)
refuses("a region as a domain", "ibv_dealloc_pd", mr)

cq = call("ibv_create_cq", context, c.c_int(16), None, None, c.c_int(0))[0]
assert cq


def init(qp_type, send_wr=1, send_cq=cq):
    # qp_context, send_cq, recv_cq, srq, five capabilities, qp_type, sq_sig_all.
    words = struct.pack("<QQQQIIIIIiii", 0, send_cq or 0, cq, 0, send_wr, 1, 1, 1, 0, qp_type, 0, 0)
    return c.create_string_buffer(words, len(words))


refuses("type XRC", "ibv_create_qp", pd, init(9), error=errno.EOPNOTSUPP)
refuses("type RAW_PACKET", "ibv_create_qp", pd, init(8), error=errno.EOPNOTSUPP)
refuses("type 77", "ibv_create_qp", pd, init(77), error=errno.EOPNOTSUPP)
refuses("no queue", "ibv_create_qp", pd, init(2, send_cq=None))
refuses("too many requests", "ibv_create_qp", pd, init(2, send_wr=1 << 30))
refuses("NULL", "ibv_create_qp", pd, None)
qp = call("ibv_create_qp", pd, init(2))[0]
assert qp, os.strerror(c.get_errno())
refuses("a queue pair uses it", "ibv_destroy_cq", cq, error=errno.EBUSY)

# What several queue pairs use is in use until the last has gone, whichever goes first.
for order in [(0, 1, 2), (2, 0, 1), (1, 2, 0)]:
    send, recv = (call("ibv_create_cq", context, c.c_int(16), None, None, c.c_int(0))[0]
                  for _ in range(2))
    depth = c.create_string_buffer(struct.pack("<QIII", 0, 4, 1, 0), 24)
    srq = call("ibv_create_srq", pd, depth)[0]
    of_all = struct.pack("<QQQQIIIIIiii", 0, send, recv, srq, 1, 0, 1, 0, 0, 2, 0, 0)
    pairs = [call("ibv_create_qp", pd, c.create_string_buffer(of_all, len(of_all)))[0]
             for _ in order]
    wrong = struct.pack("<QQQQIIIIIiii", 0, send, recv, srq, 1 << 30, 0, 1, 0, 0, 2, 0, 0)
    assert send and recv and srq and all(pairs), os.strerror(c.get_errno())
    for gone in order:
        for name, it in [("ibv_destroy_cq", send), ("ibv_destroy_cq", recv),
                         ("ibv_destroy_srq", srq)]:
            refuses("queue pairs use it", name, it, error=errno.EBUSY)
        refuses("too many requests", "ibv_create_qp", pd, c.create_string_buffer(wrong, len(wrong)))
        assert call("ibv_destroy_qp", pairs[gone])[0] == 0
    for name, it in [("ibv_destroy_cq", send), ("ibv_destroy_cq", recv), ("ibv_destroy_srq", srq)]:
        if call(name, it)[0]:
            failures.append(f"{name}: used by no queue pair, and refused")
refuses("not made with operations", "ibv_qp_to_qp_ex", qp, error=errno.EOPNOTSUPP)
refuses("RESET to RTS", "ibv_modify_qp", qp, c.create_string_buffer(struct.pack("<i", 3), 144),
        c.c_int(1))
refuses("state 99", "ibv_modify_qp", qp, c.create_string_buffer(struct.pack("<i", 99), 144),
        c.c_int(1))
refuses("an unknown bit", "ibv_modify_qp", qp, buffer(144), c.c_int(1 << 30))
refuses("NULL", "ibv_modify_qp", qp, None, c.c_int(1))
refuses("only datagrams", "ibv_attach_mcast", qp, buffer(16), c.c_uint16(0))
refuses("no path", "ibv_create_ah", pd, buffer(32))
refuses("depth 0", "ibv_create_srq", pd, buffer(24))
refuses("not supported", "ibv_import_device", c.c_int(0), error=errno.EOPNOTSUPP)
refuses("not supported", "ibv_reg_dmabuf_mr", pd, error=errno.EOPNOTSUPP)

# What a device is told of memory that it will touch.
advise_mr = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int, c.c_uint32, c.c_void_p, c.c_uint32)(
    c.c_void_p.from_address(context - 320 + 8).value)
PREFETCH, PREFETCH_WRITE, NO_FAULT = range(3)
other_pd = call("ibv_alloc_pd", context)[0]
read_only = call("ibv_reg_mr", pd, memory, c.c_size_t(4096), c.c_int(0))[0]
others = call("ibv_reg_mr", other_pd, memory, c.c_size_t(4096), c.c_int(1))[0]
gone = mmap.mmap(-1, 8192)
gone_at = c.addressof(c.c_char.from_buffer(gone))
unmapped = call("ibv_reg_mr", pd, gone_at, c.c_size_t(8192), c.c_int(1))[0]
assert read_only and others and unmapped
c.CDLL(None).munmap(c.c_void_p(gone_at), c.c_size_t(8192))
start = c.addressof(memory)


def key(region):
    return c.c_uint32.from_address(region + 36).value


good = (start, 4096, key(mr))
for what, domain, advice, flags, elements, error in [
    ("to read", pd, PREFETCH, 0, [good], 0),
    ("to write, and wait", pd, PREFETCH_WRITE, 1, [good, (start + 5, 7, key(mr))], 0),
    ("without faults", pd, NO_FAULT, 0, [good], 0),
    ("read-only memory to read", pd, PREFETCH, 0, [(start, 4096, key(read_only))], 0),
    ("NULL", None, PREFETCH, 0, [good], errno.EINVAL),
    ("advice 3", pd, 3, 0, [good], errno.EINVAL),
    ("advice -1", pd, -1, 0, [good], errno.EINVAL),
    ("flag 2", pd, PREFETCH, 2, [good], errno.EINVAL),
    ("no list", pd, PREFETCH, 0, None, errno.EINVAL),
    ("an empty list", pd, PREFETCH, 0, [], errno.EINVAL),
    ("a key of none", pd, PREFETCH, 0, [(start, 4096, 0xDEADBEEF)], errno.ENOENT),
    ("a key of another domain", pd, PREFETCH, 0, [(start, 4096, key(others))], errno.ENOENT),
    ("the second is bad", pd, PREFETCH, 0, [good, (start, 4096, key(others))], errno.ENOENT),
    ("behind the end", pd, PREFETCH, 0, [(start + 1, 4096, key(mr))], errno.EFAULT),
    ("before the start", pd, PREFETCH, 0, [(start - 1, 16, key(mr))], errno.EFAULT),
    ("the end of the address space", pd, PREFETCH, 0, [((1 << 64) - 8, 16, key(mr))],
     errno.EFAULT),
    ("read-only memory to write", pd, PREFETCH_WRITE, 0, [(start, 4096, key(read_only))],
     errno.EINVAL),
    ("memory that is gone", pd, PREFETCH, 0, [(gone_at, 8192, key(unmapped))], errno.EFAULT),
]:
    packed = b"".join(struct.pack("<QII", *element) for element in elements or [])
    elements_at = c.create_string_buffer(packed, len(packed) + 1)
    at, count = (None, 1) if elements is None else (c.addressof(elements_at), len(elements))
    got = advise_mr(domain, advice, flags, at, count)
    if got != error:
        failures.append(f"ibv_advise_mr: {what}: {got}, not {error}")
for name, handle in [("ibv_dereg_mr", read_only), ("ibv_dereg_mr", others),
                     ("ibv_dereg_mr", unmapped), ("ibv_dealloc_pd", other_pd)]:
    got, _ = call(name, handle)
    if got != 0:
        failures.append(f"{name}: {got}")
# Handles of other kinds, each to each call.
channel = call("ibv_create_comp_channel", context)[0]
srq = call("ibv_create_srq", pd, c.create_string_buffer(struct.pack("<QIII", 0, 4, 1, 0), 24))[0]
assert channel and srq
handles = {"context": context, "pd": pd, "mr": mr, "cq": cq, "qp": qp, "channel": channel,
           "srq": srq, "device": first}
TAKES = [
    ("pd", "ibv_dealloc_pd", [], None), ("mr", "ibv_dereg_mr", [], None),
    ("cq", "ibv_destroy_cq", [], None), ("qp", "ibv_destroy_qp", [], None),
    ("srq", "ibv_destroy_srq", [], None), ("channel", "ibv_destroy_comp_channel", [], None),
    ("device", "ibv_open_device", [], None), ("context", "ibv_alloc_pd", [], None),
    ("pd", "ibv_reg_mr", [memory, c.c_size_t(16), c.c_int(0)], None),
    ("pd", "ibv_create_srq", [buffer(24)], None), ("pd", "ibv_create_qp", [init(2)], None),
    ("pd", "ibv_create_ah", [buffer(32)], None),
    ("cq", "ibv_resize_cq", [c.c_int(8)], None),
    ("qp", "ibv_query_qp", [buffer(144), c.c_int(1), buffer(64)], None),
    ("qp", "ibv_modify_qp", [buffer(144), c.c_int(1)], None),
    ("srq", "ibv_query_srq", [buffer(12)], None),
    ("srq", "ibv_modify_srq", [buffer(12), c.c_int(2)], None),
    ("channel", "ibv_get_cq_event", [buffer(8), buffer(8)], -1),
    ("mr", "ibv_rereg_mr", [c.c_int(4), pd, memory, c.c_size_t(16), c.c_int(1)], -1),
]
for kind, name, arguments, value in TAKES:
    for other, handle in handles.items():
        if other != kind:
            refuses(f"a {other}", name, handle, *arguments, value=value)
# No room for what the call gives back.
refuses("no room", "ibv_get_cq_event", channel, None, None, value=-1)
refuses("no room", "ibv_get_async_event", context, None, value=-1)
refuses("no room", "ibv_query_qp", qp, None, c.c_int(1), buffer(64))
refuses("no room", "ibv_query_srq", srq, None)
# Bits that no mask has, and values that no attribute has.
for bit in [19, *range(21, 31)]:
    refuses(f"bit {bit}", "ibv_modify_qp", qp, buffer(144), c.c_int(1 << bit | 1))
for bit in range(2, 31):
    refuses(f"bit {bit}", "ibv_modify_srq", srq, buffer(12), c.c_int(1 << bit))
for flags in [0, 8, 1 << 30]:
    refuses(f"flags {flags}", "ibv_rereg_mr", mr, c.c_int(flags), None, None, c.c_size_t(0),
            c.c_int(0), value=-1)
refuses("no memory", "ibv_rereg_mr", mr, c.c_int(1), None, None, c.c_size_t(0), c.c_int(0),
        value=-1)
for bit in range(10, 20):
    refuses(f"bit {bit}", "ibv_reg_mr", pd, memory, c.c_size_t(4096), c.c_int(1 << bit))
refuses("a limit above its depth", "ibv_modify_srq", srq,
        c.create_string_buffer(struct.pack("<III", 0, 0, 1 << 20), 12), c.c_int(2))
refuses("depth 0", "ibv_resize_cq", cq, c.c_int(0))
refuses("depth -1", "ibv_resize_cq", cq, c.c_int(-1))
refuses("events of no kind", "ibv_attach_mcast", qp, None, c.c_uint16(0))
for what, handle in [("ibv_destroy_srq", srq), ("ibv_destroy_comp_channel", channel)]:
    if call(what, handle)[0] != 0:
        failures.append(what)

# In the order that suits, all goes.
for name, handle in [("ibv_destroy_qp", qp), ("ibv_destroy_cq", cq), ("ibv_dereg_mr", mr),
                     ("ibv_dealloc_pd", pd), ("ibv_close_device", context)]:
    got, _ = call(name, handle)
    if got != 0:
        failures.append(f"{name}: {got}")
call("ibv_free_device_list", devices)
print("\n".join(failures) or "all as expected")
sys.exit(bool(failures))
