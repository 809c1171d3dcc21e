"""What the scripts beside this one share: calls of libibverbs by ctypes, where pointers are numbers."""

import ctypes as c
import errno
import os
import struct

lib = c.CDLL("libibverbs.so.1", use_errno=True)
for name in ["get_device_list", "open_device", "alloc_pd", "reg_mr", "create_cq", "create_qp",
             "create_srq", "create_ah", "create_comp_channel"]:
    getattr(lib, f"ibv_{name}").restype = c.c_void_p
lib.ibv_query_gid_table = lib._ibv_query_gid_table
lib.ibv_query_gid_table.restype = c.c_ssize_t

# A name of a private node only.
dlvsym = c.CDLL(None).dlvsym
dlvsym.restype, dlvsym.argtypes = c.c_void_p, [c.c_void_p, c.c_char_p, c.c_char_p]
lib.ibv_query_gid_type = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint8, c.c_uint, c.c_void_p)(
    dlvsym(lib._handle, b"ibv_query_gid_type", b"IBVERBS_PRIVATE_34"))

# Bits of `enum ibv_qp_attr_mask`.
STATE, CUR_STATE, SQD_NOTIFY, ACCESS, PKEY, PORT, QKEY, AV, MTU, TIMEOUT, RETRY, RNR = (
    1 << bit for bit in range(12))
RQ_PSN, RD_ATOMIC, ALT_PATH, MIN_RNR, SQ_PSN, DEST_RD_ATOMIC, MIG_STATE = (
    1 << bit for bit in range(12, 19))
DEST_QPN = 1 << 20
RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
RC, UC, UD = 2, 3, 4


def call(name, *arguments):
    """The value of a call, and errno."""
    c.set_errno(0)
    arguments = [c.c_void_p(a) if isinstance(a, (int, type(None))) else a for a in arguments]
    value = getattr(lib, name)(*arguments)
    return value, c.get_errno()


def made(name, *arguments):
    """An object, or 0 of a call that returns such."""
    value, number = call(name, *arguments)
    is_object = getattr(lib, name).restype is c.c_void_p
    assert value if is_object else value == 0, f"{name}: {value}, {os.strerror(number)}"
    return value


def word(address, kind=c.c_int):
    return kind.from_address(address).value


def first_device():
    count = c.c_int()
    devices = made("ibv_get_device_list", c.byref(count))
    return word(devices, c.c_void_p)


def gid(context, index):
    """The GID at an index as bytes, zeroes for a hole."""
    found = c.create_string_buffer(16)
    made("ibv_query_gid", context, c.c_uint8(1), c.c_int(index), found)
    return found.raw


def init(qp_type, send_cq, recv_cq, depth=16, inline=0, signal_all=1):
    # qp_context, send_cq, recv_cq, srq, five capabilities, qp_type, sq_sig_all.
    words = struct.pack("<QQQQIIIIIiii", 0, send_cq, recv_cq, 0, depth, depth, 1, 1,
                        inline, qp_type, signal_all, 0)
    return c.create_string_buffer(words, len(words))


def path(remote, sgid_index=0, hop_limit=1, traffic_class=0):
    """`struct ibv_ah_attr`."""
    return struct.pack("<16sIBBBxHBBBBB", remote, 0, sgid_index, hop_limit, traffic_class, 0, 0, 0,
                       0, 1, 1).ljust(32, b"\0")


# Offsets and formats of `struct ibv_qp_attr`.
FIELDS = {
    "qp_state": (0, "i"), "cur_qp_state": (4, "i"), "path_mtu": (8, "i"), "path_mig_state": (12, "i"),
    "qkey": (16, "I"), "rq_psn": (20, "I"), "sq_psn": (24, "I"), "dest_qp_num": (28, "I"),
    "qp_access_flags": (32, "I"), "ah_attr": (56, "32s"), "alt_ah_attr": (88, "32s"),
    "pkey_index": (120, "H"), "alt_pkey_index": (122, "H"), "en_sqd_async_notify": (124, "B"),
    "max_rd_atomic": (126, "B"), "max_dest_rd_atomic": (127, "B"), "min_rnr_timer": (128, "B"),
    "port_num": (129, "B"), "timeout": (130, "B"), "retry_cnt": (131, "B"), "rnr_retry": (132, "B"),
    "alt_port_num": (133, "B"), "alt_timeout": (134, "B"),
}


def attributes(**values):
    attr = c.create_string_buffer(144)
    for name, value in values.items():
        offset, kind = FIELDS[name]
        struct.pack_into("<" + kind, attr, offset, value)
    return attr


def query(qp):
    attr, made_with = c.create_string_buffer(144), c.create_string_buffer(64)
    made("ibv_query_qp", qp, attr, c.c_int(-1), made_with)
    for path_at in (56, 88):
        # Between the members of `struct ibv_global_route` and the next, and at the end.
        attr[path_at + 23] = attr[path_at + 31] = 0
    return {name: struct.unpack_from("<" + kind, attr, offset)[0]
            for name, (offset, kind) in FIELDS.items()}


def operation(context, offset, result, *arguments):
    """A function behind a pointer of `struct ibv_context`."""
    return c.CFUNCTYPE(result, *arguments, use_errno=True)(word(context + offset, c.c_void_p))


def poll_cq(context):
    return operation(context, 96, c.c_int, c.c_void_p, c.c_int, c.c_void_p)


def post_send(context):
    return operation(context, 208, c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)


def post_recv(context):
    return operation(context, 216, c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)
