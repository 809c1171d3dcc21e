"""Objects up to the limit of the container: its errno, and all goes on when some are given back."""

import errno
import struct
import sys

from verbs import c, call, first_device, made

ENTRIES, HANDLES = 16, 1


def queried(context):
    """max_mr_size, max_qp, max_cq and max_pd of a device."""
    attr = c.create_string_buffer(232)
    made("ibv_query_device", context, attr)
    size, = struct.unpack_from("<Q", attr, 80)
    return [size] + [struct.unpack_from("<i", attr, at)[0] for at in (108, 128, 140)]


def refused(number, name, *arguments):
    value, got = call(name, *arguments)
    assert (value or None, got) == (None, number), (name, value, errno.errorcode.get(got, got))


def queue():
    return "ibv_create_cq", context, c.c_int(ENTRIES), 0, 0, c.c_int(0)


objects, mr_bytes = map(int, sys.argv[1:])
device = first_device()
context = made("ibv_open_device", device)
# Before it is open in earnest, and then.
for _ in range(2):
    assert queried(context) == [mr_bytes] + [objects] * 3, queried(context)
    domain = made("ibv_alloc_pd", context)
    memory = c.create_string_buffer(2 * mr_bytes)
    refused(errno.ENOMEM, "ibv_reg_mr", domain, memory, c.c_size_t(mr_bytes + 1), c.c_int(1))
    region = made("ibv_reg_mr", domain, memory, c.c_size_t(mr_bytes), c.c_int(1))
    refused(errno.ENOMEM, "ibv_reg_mr", domain, memory, c.c_size_t(1), c.c_int(1))
    queues = [made(*queue()) for _ in range(objects - 2)]
    for _ in range(3):
        refused(errno.EAGAIN, *queue())
        refused(errno.EAGAIN, "ibv_alloc_pd", context)
        refused(errno.EAGAIN, "ibv_reg_mr", domain, memory, c.c_size_t(0), c.c_int(0))
    made("ibv_destroy_cq", queues.pop())
    queues.append(made(*queue()))
    refused(errno.EAGAIN, *queue())
    # Another context of the device counts by itself.
    other = made("ibv_open_device", device)
    refused(errno.EAGAIN, "ibv_alloc_pd", other)
    made("ibv_close_device", other)
    made("ibv_dereg_mr", region)
    for one in queues:
        made("ibv_destroy_cq", one)
    made("ibv_dealloc_pd", domain)
made("ibv_close_device", context)
print("done")
