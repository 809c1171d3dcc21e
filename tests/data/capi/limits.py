"""Each number of objects that a device reports can be made at once, and one more is refused where the
number is a limit."""

import time

from verbs import *

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
# Offsets in `struct ibv_device_attr`; those that exist already; whether one more is refused.
for name, offset, have, make, destroy, is_limit in [
    ("max_qp", 108, 0, ("ibv_create_qp", pd, small), "ibv_destroy_qp", True),
    ("max_cq", 128, 1, ("ibv_create_cq", context, c.c_int(1), None, None, c.c_int(0)),
     "ibv_destroy_cq", True),
    ("max_mr", 136, 0, ("ibv_reg_mr", pd, memory, c.c_size_t(64), c.c_int(1)), "ibv_dereg_mr",
     True),
    ("max_pd", 140, 1, ("ibv_alloc_pd", context), "ibv_dealloc_pd", False),
    ("max_srq", 212, 0, ("ibv_create_srq", pd, srq_init), "ibv_destroy_srq", True),
    ("max_ah", 200, 0, ("ibv_create_ah", pd, peer), "ibv_destroy_ah", False),
]:
    start, count = time.monotonic(), limit(offset)
    assert count >= 4096, (name, count)
    objects = [made(*make) for _ in range(count - have)]
    assert len(set(objects)) == count - have
    if is_limit:
        value, number = call(*make)
        assert not value and number in (errno.ENOMEM, errno.EINVAL), (name, value, number)
    for one in objects:
        made(destroy, one)
    print(f"{name} {count}: {time.monotonic() - start:.1f} s")
print("all as expected")
