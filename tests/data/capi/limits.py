"""Each number of objects that a device reports can be made at once, and one more is refused; after
one is given back another can be made."""

import time

from verbs import *

P = c.c_void_p

context = made("ibv_open_device", first_device())
attr = c.create_string_buffer(232)
made("ibv_query_device", context, attr)


def limit(offset):
    return struct.unpack_from("<i", attr, offset)[0]


memory = c.create_string_buffer(64)
pd = made("ibv_alloc_pd", context)
cq = made("ibv_create_cq", context, c.c_int(1), None, None, c.c_int(0))
own = gid(context, 0)
peer = c.create_string_buffer(path(own[:15] + bytes([own[15] ^ 1])), 32)
small = init(RC, cq, cq, depth=1)
srq_init = c.create_string_buffer(struct.pack("<QIII", 0, 1, 1, 0), 24)
alloc_mw = operation(context, 64, P, P, c.c_int)
dealloc_mw = operation(context, 80, c.c_int, P)


def run(what, *arguments):
    """A call by its name, or a function behind the context; its value, and errno."""
    if isinstance(what, str):
        return call(what, *arguments)
    c.set_errno(0)
    return what(*arguments), c.get_errno()


def limited(name, count, make, destroy):
    """`make` works so many times, and not once more."""
    start = time.monotonic()
    objects = [make() for _ in range(count)]
    assert all(value for value, _ in objects), (name, objects[-1])
    for _ in range(2):
        assert make() == (None, errno.ENOMEM), (name, make())
        value, number = destroy(objects.pop()[0])
        assert value == 0, (name, number)
        objects.append(make())
        assert objects[-1][0], (name, objects[-1])
    assert len({value for value, _ in objects}) == count
    for value, _ in objects:
        assert destroy(value)[0] == 0, name
    print(f"{name} {count}: {time.monotonic() - start:.1f} s")


# Offsets in `struct ibv_device_attr`, and how many exist already.
for name, offset, have, make, destroy in [
    ("max_qp", 108, 0, ("ibv_create_qp", pd, small), "ibv_destroy_qp"),
    ("max_cq", 128, 1, ("ibv_create_cq", context, c.c_int(1), None, None, c.c_int(0)),
     "ibv_destroy_cq"),
    ("max_mr", 136, 0, ("ibv_reg_mr", pd, memory, c.c_size_t(64), c.c_int(1)), "ibv_dereg_mr"),
    ("max_pd", 140, 1, ("ibv_alloc_pd", context), "ibv_dealloc_pd"),
    ("max_mw", 176, 0, (alloc_mw, pd, 2), dealloc_mw),
    ("max_ah", 200, 0, ("ibv_create_ah", pd, peer), "ibv_destroy_ah"),
    ("max_srq", 212, 0, ("ibv_create_srq", pd, srq_init), "ibv_destroy_srq"),
]:
    assert limit(offset) >= 4096, name
    limited(name, limit(offset) - have, lambda: run(*make), lambda one: run(destroy, one))

# Of numbers in one object the limit itself is taken, and one more is refused.
port = c.create_string_buffer(52)
made("ibv_query_port", context, c.c_uint8(1), port)
for what, makes, limits in [
    ("max_cqe", lambda n: call("ibv_create_cq", context, c.c_int(n), None, None, c.c_int(0)),
     limit(132)),
    ("max_qp_wr", lambda n: call("ibv_create_qp", pd, init(RC, cq, cq, depth=n)), limit(112)),
    ("max_srq_wr", lambda n: call("ibv_create_srq", pd, c.create_string_buffer(
        struct.pack("<QIII", 0, n, 1, 0), 24)), limit(216)),
    ("max_srq_sge", lambda n: call("ibv_create_srq", pd, c.create_string_buffer(
        struct.pack("<QIII", 0, 1, n, 0), 24)), limit(220)),
]:
    assert makes(limits + 1) == (None, errno.EINVAL), what
    value, number = makes(limits)
    assert value, (what, os.strerror(number))

# Groups: a datagram queue pair is in so many, and so many are in one.
def group(number):
    raw = bytes(10) + b"\xff\xff" + bytes([239, 1, number >> 8, number & 255])
    return c.create_string_buffer(raw, 16)


max_groups, max_members, max_total = limit(188), limit(192), limit(196)
assert max_total == max_groups * max_members
datagrams = made("ibv_create_qp", pd, init(UD, cq, cq, depth=1))
for number in range(max_groups):
    made("ibv_attach_mcast", datagrams, group(number), c.c_uint16(0))
assert call("ibv_attach_mcast", datagrams, group(max_groups), c.c_uint16(0))[0] == errno.ENOMEM
members = [made("ibv_create_qp", pd, init(UD, cq, cq, depth=1)) for _ in range(max_members)]
for one in members[1:]:
    made("ibv_attach_mcast", one, group(0), c.c_uint16(0))
assert call("ibv_attach_mcast", members[0], group(0), c.c_uint16(0))[0] == errno.ENOMEM
made("ibv_detach_mcast", members[1], group(0), c.c_uint16(0))
made("ibv_attach_mcast", members[0], group(0), c.c_uint16(0))
made("ibv_detach_mcast", datagrams, group(1), c.c_uint16(0))
made("ibv_attach_mcast", datagrams, group(max_groups), c.c_uint16(0))
print("all as expected")
