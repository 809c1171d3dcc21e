"""libibverbs in a process that runs out of something, by ctypes. The argument says of what.

Each call gives an object or an errno; nothing crashes, hangs or prints, and what is there goes on.
"""

import ctypes as c
import errno
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time

lib = c.CDLL("libibverbs.so.1", use_errno=True)
for name in ["get_device_list", "open_device", "alloc_pd", "reg_mr", "create_cq", "create_qp",
             "create_srq", "create_comp_channel"]:
    getattr(lib, "ibv_" + name).restype = c.c_void_p


def call(name, *arguments):
    c.set_errno(0)
    arguments = [c.c_void_p(a) if a is None or a > 1 << 32 else c.c_int(a) for a in arguments]
    return getattr(lib, name)(*arguments)


def opened(index=0):
    devices = call("ibv_get_device_list", None)
    assert devices
    context = call("ibv_open_device", c.c_void_p.from_address(devices + 8 * index).value)
    call("ibv_free_device_list", devices)
    return context


def queues(context, most):
    """Queues until there are no more; what the last call said."""
    made = []
    while len(made) < most:
        cq = call("ibv_create_cq", context, 4096, None, None, 0)
        if not cq:
            break
        made.append(cq)
    number = c.get_errno()
    for cq in made:
        assert lib.ibv_destroy_cq(c.c_void_p(cq)) == 0
    return len(made), number


def descriptors():
    context = opened()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    channels = []
    while (channel := call("ibv_create_comp_channel", context)):
        channels.append(channel)
        assert len(channels) < 64
    assert c.get_errno() == errno.EMFILE, c.get_errno()
    # A second device cannot be opened, and says so; the list is as before, or says why not.
    other = opened_or_errno(1)
    assert other == errno.EMFILE, other
    assert lib.ibv_destroy_comp_channel(c.c_void_p(channels.pop())) == 0
    channel = call("ibv_create_comp_channel", context)
    assert channel, os.strerror(c.get_errno())
    for channel in channels + [channel]:
        assert lib.ibv_destroy_comp_channel(c.c_void_p(channel)) == 0
    assert queues(context, 3)[0] == 3


def opened_or_errno(index):
    devices = call("ibv_get_device_list", None)
    if not devices:
        return c.get_errno()
    context = call("ibv_open_device", c.c_void_p.from_address(devices + 8 * index).value)
    return 0 if context and call("ibv_create_cq", context, 1, None, None, 0) else c.get_errno()


def no_descriptor_at_all():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 64))
    assert opened_or_errno(0) == errno.EMFILE
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    assert opened_or_errno(0) == 0


def memory():
    context = opened()
    assert queues(context, 1)[0] == 1
    pd = call("ibv_alloc_pd", context)
    srq = lib.ibv_create_srq(c.c_void_p(pd), struct.pack("<QIII4x", 0, 1, 32, 0))
    region = c.create_string_buffer(64)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
    made, number = queues(context, 1000)
    assert made < 1000 and number == errno.ENOMEM, (made, number)
    cq = call("ibv_create_cq", context, 1 << 20, None, None, 0)
    assert not cq and c.get_errno() == errno.ENOMEM, c.get_errno()
    assert queues(context, 1)[0] == 1
    # As many elements as fit, each of 32 pieces.
    change = struct.pack("<III", 1 << 15, 32, 0)
    assert lib.ibv_modify_srq(c.c_void_p(srq), change, c.c_int(1)) == errno.ENOMEM
    regions = []
    while (mr := call("ibv_reg_mr", pd, c.addressof(region), 64, 0)):
        regions.append(mr)
    assert c.get_errno() == errno.ENOMEM, c.get_errno()
    assert len(regions) > 1000
    for mr in regions:
        assert lib.ibv_dereg_mr(c.c_void_p(mr)) == 0
    assert queues(context, 1)[0] == 1


def memory_at_the_beginning():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), -1))
    number = opened_or_errno(0)
    assert number in (errno.ENOMEM, errno.EAGAIN), number


def closed_descriptors():
    context = opened()
    channel = call("ibv_create_comp_channel", context)
    cq = call("ibv_create_cq", context, 16, None, channel, 0)
    assert cq
    os.closerange(3, 256)
    time.sleep(0.05)
    for _ in range(3):
        call("ibv_create_comp_channel", context)
        call("ibv_create_cq", context, 16, None, None, 0)
        assert call("ibv_get_device_list", None)


def reused_descriptors():
    """The program closes what it did not open, and its next files have the numbers."""
    context = opened()
    channels = [call("ibv_create_comp_channel", context) for _ in range(2)]
    pd = call("ibv_alloc_pd", context)
    cqs = [call("ibv_create_cq", context, 16, None, channel, 0) for channel in channels]
    srq = lib.ibv_create_srq(c.c_void_p(pd), struct.pack("<QIII4x", 0, 4, 1, 0))
    pairs = [(cq, queue_pair(pd, cq, shared)) for cq in cqs for shared in (0, srq)]
    assert pd and srq and all(qp for _, qp in pairs)
    os.closerange(3, 65)
    # Files, and pipes and sockets from which a read or write would not come back.
    content = bytes(range(200))
    files = [os.memfd_create("mine") for _ in range(40)]
    ends = [end for _ in range(5) for end in os.pipe()]
    sockets = [end for _ in range(5) for end in socket.socketpair()]
    for file in files:
        os.pwrite(file, content, 0)
    for writer in ends[1::2]:
        os.write(writer, content)
    for end in sockets:
        end.send(content)
    assert max(files) < 65
    # Completions and events, by which descriptors become readable and are read again.
    for cq, qp in pairs:
        word = c.c_void_p.from_address(context + 104).value
        assert c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int)(word)(cq, 0) == 0
        for state in (init_attributes(), struct.pack("<i", 6).ljust(144, b"\0")):
            mask = 1 if len(state.rstrip(b"\0")) == 1 else 1 | 1 << 3 | 1 << 4 | 1 << 5
            assert lib.ibv_modify_qp(c.c_void_p(qp), state, c.c_int(mask)) == 0
        post_recv = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)(
            c.c_void_p.from_address(context + 216).value)
        request, bad = c.create_string_buffer(32), c.c_void_p()
        post_recv(qp, c.addressof(request), c.addressof(bad))
    time.sleep(0.1)
    for name, objects in [("qp", [qp for _, qp in pairs]), ("srq", [srq]), ("cq", cqs),
                          ("comp_channel", channels)]:
        for made in objects:
            got = getattr(lib, "ibv_destroy_" + name)(c.c_void_p(made))
            assert got == 0, (name, os.strerror(got))
    assert lib.ibv_dealloc_pd(c.c_void_p(pd)) == 0 and lib.ibv_close_device(c.c_void_p(context)) == 0
    for file in files:
        assert os.pread(file, 300, 0) == content, (file, os.pread(file, 300, 0))
        assert os.lseek(file, 0, os.SEEK_CUR) == 0, file
    for reader in ends[::2]:
        assert os.read(reader, 300) == content, reader
    for end in sockets:
        assert end.recv(300) == content, end


def queue_pair(pd, cq, srq):
    # qp_context, send_cq, recv_cq, srq, five capabilities, qp_type, sq_sig_all.
    init = struct.pack("<QQQQIIIIIiii", 0, cq, cq, srq, 4, 4, 1, 1, 0, 2, 1, 0)
    return lib.ibv_create_qp(c.c_void_p(pd), init)


def init_attributes():
    attributes = bytearray(144)
    attributes[0], attributes[129] = 1, 1
    return bytes(attributes)


def forks():
    contexts = [opened(0), opened(1)]
    ends = threading.Event()

    def make():
        while not ends.is_set():
            for context in contexts:
                queues(context, 2)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            # It lists, destroys what is its parent's, or only ends.
            if turn % 3 == 0:
                assert call("ibv_get_device_list", None)
            elif turn % 3 == 1:
                assert lib.ibv_close_device(c.c_void_p(contexts[0])) == 0
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, turn
    ends.set()
    for thread in threads:
        thread.join()


globals()[sys.argv[1]]()
print("as expected")
