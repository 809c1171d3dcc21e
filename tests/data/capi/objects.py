"""Objects that are gone, objects of another context, and the masks and flags of every call that makes
one. Each call with them is refused with the errno of the table; no one crashes."""

import os
import time

from verbs import *

lib.ibv_reg_mr_ex.restype = lib.ibv_qp_to_qp_ex.restype = c.c_void_p
failures = []
count = c.c_int()
devices = made("ibv_get_device_list", c.byref(count))
assert count.value == 2, count
P, I, U32, U64 = c.c_void_p, c.c_int, c.c_uint32, c.c_uint64


def extended(offset, result, *arguments):
    """A function of `struct verbs_context`, or of the `struct ibv_context` in it, by its context."""
    return lambda context, *given: c.CFUNCTYPE(result, *arguments, use_errno=True)(
        word(context - 320 + offset, P))(*given)


ALLOC_PARENT, DEALLOC_TD, ALLOC_TD = (
    extended(112, P, P, P), extended(120, I, P), extended(128, P, P, P))
CREATE_CQ, CREATE_QP, CREATE_SRQ = (extended(at, P, P, P) for at in (200, 264, 280))
ALLOC_MW, BIND_MW, DEALLOC_MW = (
    extended(320 + 64, P, P, I), extended(320 + 72, I, P, P, P), extended(320 + 80, I, P))
POLL, NOTIFY = extended(320 + 96, I, P, I, P), extended(320 + 104, I, P, I)
POST_SRQ_RECV, POST_SEND, POST_RECV = (
    extended(320 + at, I, P, P, P) for at in (168, 208, 216))


def run(what, *arguments):
    """A call by its name, or a function behind a context; its value, and errno."""
    if isinstance(what, str):
        return call(what, *arguments)
    c.set_errno(0)
    return what(*arguments), c.get_errno()


def refuses(why, error, what, *arguments):
    value, number = run(what, *arguments)
    # NULL or -1 with errno, the errno, or the negative errno.
    found = number if value in (None, -1) and number else abs(value or 0)
    if found != error or number != error:
        failures.append(f"{why}: {what}: {value}, errno {number}, not {error}")


def new(what, *arguments):
    value, number = run(what, *arguments)
    assert value, f"{what}: {os.strerror(number)}"
    return value


def gone(what, *arguments):
    value, number = run(what, *arguments)
    if value != 0:
        failures.append(f"{what}: {value}, errno {number}")


def packed(size, **members):
    """A structure with these members: `at` of an offset, with a format and a value."""
    structure = c.create_string_buffer(size)
    for offset, (kind, value) in members.items():
        struct.pack_into("<" + kind, structure, int(offset[2:]), value)
    return structure


def cq_attr(comp_mask=0, flags=0, wc_flags=0, cqe=4, vector=0, channel=0, parent=0):
    return packed(56, at0=("I", cqe), at16=("Q", channel), at24=("I", vector), at32=("Q", wc_flags),
                  at40=("I", comp_mask), at44=("I", flags), at48=("Q", parent))


def qp_attr(pd, cq, comp_mask=1, create_flags=0, ops=0, qp_type=RC, srq=0):
    return packed(136, at8=("Q", cq), at16=("Q", cq), at24=("Q", srq), at32=("I", 4), at36=("I", 4),
                  at40=("I", 1), at44=("I", 1), at52=("i", qp_type), at60=("I", comp_mask),
                  at64=("Q", pd), at80=("I", create_flags), at128=("Q", ops))


def srq_attr(pd, comp_mask=2, srq_type=0):
    return packed(64, at8=("I", 4), at12=("I", 1), at20=("I", comp_mask), at24=("i", srq_type),
                  at32=("Q", pd))


def plain_qp(cq, other=None, srq=0):
    words = struct.pack("<QQQQIIIIIiii", 0, cq, other or cq, srq, 4, 4, 1, 1, 0, RC, 1, 0)
    return c.create_string_buffer(words, len(words))


def own_address(context):
    return path(gid(context, 0))


MEMORY = c.create_string_buffer(4096)
SRQ = c.create_string_buffer(struct.pack("<QIII", 0, 4, 1, 0), 24)


def sends(qp):
    """Takes a queue pair of datagrams to RTS."""
    for fields, bits in [({"qp_state": INIT, "port_num": 1}, PKEY | PORT | QKEY),
                         ({"qp_state": RTR}, 0), ({"qp_state": RTS}, SQ_PSN)]:
        made("ibv_modify_qp", qp, attributes(**fields), c.c_int(STATE | bits))


class Objects:
    """One of each kind, in a context of its own. The queue pair of datagrams can send."""

    def __init__(self, index):
        self.context = made("ibv_open_device", word(devices + 8 * index, P))
        self.pd = made("ibv_alloc_pd", self.context)
        self.mr = made("ibv_reg_mr", self.pd, MEMORY, c.c_size_t(4096), c.c_int(1))
        self.mw = new(ALLOC_MW, self.context, self.pd, 1)
        self.channel = made("ibv_create_comp_channel", self.context)
        self.cq = made("ibv_create_cq", self.context, c.c_int(4), None, None, c.c_int(0))
        self.srq = made("ibv_create_srq", self.pd, SRQ)
        self.qp = made("ibv_create_qp", self.pd, plain_qp(self.cq))
        self.datagrams = made("ibv_create_qp", self.pd, init(UD, self.cq, self.cq, depth=4))
        sends(self.datagrams)
        self.ah = made("ibv_create_ah", self.pd, own_address(self.context))
        self.td = new(ALLOC_TD, self.context, self.context, packed(4))
        self.parent = new(ALLOC_PARENT, self.context, self.context,
                          packed(48, at0=("Q", self.pd), at8=("Q", self.td)))

    def give_back(self):
        """In reverse; each that is given back is refused in every call that takes it."""
        for kind, (destroy, calls) in reversed(CALLS.items()):
            if kind == "cq":
                # It uses the queue and the domain.
                gone("ibv_destroy_qp", self.datagrams)
            handle = getattr(self, kind)
            gone(*destroy(self, handle))
            for error, *rest in [(errno.EINVAL, *destroy(self, handle)), *calls(self, handle)]:
                refuses(f"a {kind} that is gone", error, *rest)


E = errno.EINVAL
bad = c.c_void_p()
# How it is destroyed, and which calls take it.
CALLS = {
    "context": (lambda o, h: ("ibv_close_device", h), lambda o, h: [
        (E, "ibv_alloc_pd", h), (E, "ibv_query_device", h, packed(400)),
        (E, "ibv_query_port", h, c.c_uint8(1), packed(64)),
        (E, "ibv_query_gid", h, c.c_uint8(1), c.c_int(0), packed(16)),
        (E, "ibv_create_comp_channel", h), (E, "ibv_get_async_event", h, packed(16)),
        (E, "ibv_create_cq", h, c.c_int(1), None, None, c.c_int(0))]),
    "pd": (lambda o, h: ("ibv_dealloc_pd", h), lambda o, h: [
        (E, "ibv_reg_mr", h, MEMORY, c.c_size_t(16), c.c_int(1)), (E, "ibv_create_srq", h, SRQ),
        (E, "ibv_create_qp", h, plain_qp(o.cq)), (E, "ibv_create_ah", h, own_address(o.context)),
        (E, ALLOC_MW, o.context, h, 1),
        (E, ALLOC_PARENT, o.context, o.context, packed(48, at0=("Q", h)))]),
    "mr": (lambda o, h: ("ibv_dereg_mr", h), lambda o, h: [
        (E, "ibv_rereg_mr", h, c.c_int(4), None, None, c.c_size_t(0), c.c_int(1))]),
    "mw": (lambda o, h: (DEALLOC_MW, o.context, h), lambda o, h: []),
    "channel": (lambda o, h: ("ibv_destroy_comp_channel", h), lambda o, h: [
        (E, "ibv_get_cq_event", h, packed(8), packed(8)),
        (E, "ibv_create_cq", o.context, c.c_int(1), None, h, c.c_int(0)),
        (E, CREATE_CQ, o.context, o.context, cq_attr(channel=h))]),
    "cq": (lambda o, h: ("ibv_destroy_cq", h), lambda o, h: [
        (E, "ibv_resize_cq", h, c.c_int(8)), (E, POLL, o.context, h, 1, packed(48)),
        (E, NOTIFY, o.context, h, 0), (E, "ibv_create_qp", o.pd, plain_qp(h))]),
    "srq": (lambda o, h: ("ibv_destroy_srq", h), lambda o, h: [
        (E, "ibv_modify_srq", h, packed(12), c.c_int(2)), (E, "ibv_query_srq", h, packed(12)),
        (E, POST_SRQ_RECV, o.context, h, packed(32), c.addressof(bad)),
        (E, "ibv_create_qp", o.pd, plain_qp(o.cq, srq=h))]),
    "qp": (lambda o, h: ("ibv_destroy_qp", h), lambda o, h: [
        (E, "ibv_modify_qp", h, attributes(qp_state=ERR), c.c_int(STATE)),
        (E, "ibv_query_qp", h, packed(144), c.c_int(-1), packed(64)),
        (E, POST_SEND, o.context, h, packed(128), c.addressof(bad)),
        (E, POST_RECV, o.context, h, packed(32), c.addressof(bad)),
        (E, "ibv_attach_mcast", h, packed(16), c.c_uint16(0)), (E, "ibv_qp_to_qp_ex", h),
        (E, BIND_MW, o.context, h, o.mw, packed(48))]),
    "ah": (lambda o, h: ("ibv_destroy_ah", h), lambda o, h: [
        (E, POST_SEND, o.context, o.datagrams, datagram(h), c.addressof(bad))]),
    "td": (lambda o, h: (DEALLOC_TD, o.context, h), lambda o, h: [
        (E, ALLOC_PARENT, o.context, o.context, packed(48, at0=("Q", o.pd), at8=("Q", h)))]),
    "parent": (lambda o, h: ("ibv_dealloc_pd", h), lambda o, h: [
        (E, "ibv_reg_mr", h, MEMORY, c.c_size_t(16), c.c_int(1)),
        (E, CREATE_CQ, o.context, o.context, cq_attr(comp_mask=2, parent=h))]),
}


def datagram(ah, behind=0):
    # `struct ibv_send_wr`: the next, opcode SEND, and the handle in its union. Nobody receives it.
    return packed(128, at8=("Q", behind), at28=("i", 2), at40=("Q", ah), at48=("I", 0xFFFFFE))


sets = [Objects(0), Objects(0), Objects(1)]
own = sets[0]

# Of another context: of the same device, and of another one.
for other in sets[1:]:
    foreign = f"of context {sets.index(other)}"
    c_own = own.context
    for what, arguments in [
        ("ibv_create_qp", (own.pd, plain_qp(other.cq, own.cq))),
        ("ibv_create_qp", (own.pd, plain_qp(own.cq, other.cq))),
        ("ibv_create_qp", (own.pd, plain_qp(own.cq, srq=other.srq))),
        ("ibv_create_qp", (other.pd, plain_qp(own.cq))),
        (CREATE_QP, (c_own, c_own, qp_attr(other.pd, own.cq))),
        (CREATE_QP, (c_own, c_own, qp_attr(other.pd, other.cq))),
        (CREATE_SRQ, (c_own, c_own, srq_attr(other.pd))),
        ("ibv_create_cq", (c_own, c.c_int(4), None, other.channel, c.c_int(0))),
        (CREATE_CQ, (c_own, c_own, cq_attr(channel=other.channel))),
        (CREATE_CQ, (c_own, c_own, cq_attr(comp_mask=2, parent=other.parent))),
        (ALLOC_PARENT, (c_own, c_own, packed(48, at0=("Q", other.pd)))),
        (ALLOC_PARENT, (c_own, c_own, packed(48, at0=("Q", own.pd), at8=("Q", other.td)))),
        ("ibv_rereg_mr", (own.mr, c.c_int(2), other.pd, None, c.c_size_t(0), c.c_int(0))),
    ]:
        refuses(foreign, E, what, *arguments)

# Address handles of another context or domain: neither posting takes them, and a list is posted as
# far as the first.
parent_ah = made("ibv_create_ah", own.parent, own_address(own.context))
other_pd = made("ibv_alloc_pd", own.context)
other_ah = made("ibv_create_ah", other_pd, own_address(own.context))
built = new(CREATE_QP, own.context, own.context, qp_attr(own.pd, own.cq, 1 | 64, ops=4, qp_type=UD))
sends(built)


def build(ah):
    """The errno of `ibv_wr_complete` after `ibv_wr_send` to this handle."""
    built_by = lambda offset, result, *kinds: operation(built, offset, result, P, *kinds)
    built_by(320, None)(built)
    c.c_uint32.from_address(built + 176).value = 2
    built_by(240, None)(built)
    built_by(272, None, P, U32, U32)(built, ah, 0xFFFFFE, 0)
    return built_by(328, I)(built)


def completions(wanted):
    """The statuses of so many completions, and of any more that there are."""
    wc, found, until = packed(48), [], time.monotonic() + 5
    while time.monotonic() < until:
        if run(POLL, own.context, own.cq, 1, c.addressof(wc))[0] == 1:
            found.append(struct.unpack_from("<i", wc, 8)[0])
        elif len(found) >= wanted:
            break
    return found


for why, ah, error in [("its own", own.ah, 0), ("of a parent domain", parent_ah, 0),
                       ("of another domain", other_ah, E)] + [
                           (f"of context {sets.index(other)}", other.ah, E)
                           for other in sets[1:]]:
    last = datagram(ah)
    first = datagram(own.ah, c.addressof(last))
    bad.value = 1
    found = run(POST_SEND, own.context, own.datagrams, first, c.addressof(bad))[0]
    is_bad = bad.value == (c.addressof(last) if error else 1)
    posted = [0] if error else [0, 0]
    if (found, is_bad, completions(len(posted))) != (error, True, posted):
        failures.append(f"a handle {why}: {found}, {is_bad}")
    found = build(ah)
    posted = [] if error else [0]
    if (found, completions(len(posted))) != (error, posted):
        failures.append(f"ibv_wr_complete, a handle {why}: {found}")
gone("ibv_destroy_qp", built)
for ah in [parent_ah, other_ah]:
    gone("ibv_destroy_ah", ah)
gone("ibv_dealloc_pd", other_pd)

# Masks, flags and kinds, bit by bit. What is known is taken.
NONE, context = errno.EOPNOTSUPP, own.context
for bits, error, make in [
    (range(2, 32), E, lambda bit: (CREATE_CQ, context, context, cq_attr(comp_mask=bit))),
    (range(1, 32), NONE, lambda bit: (CREATE_CQ, context, context, cq_attr(1, flags=bit))),
    (range(7, 64), NONE, lambda bit: (CREATE_CQ, context, context, cq_attr(wc_flags=bit))),
    (range(0, 31), E, lambda bit: (CREATE_CQ, context, context, cq_attr(vector=bit))),
    ([1, 3, 4, 5, *range(7, 32)], NONE,
     lambda bit: (CREATE_QP, context, context, qp_attr(own.pd, own.cq, 1 | bit))),
    (range(0, 32), NONE,
     lambda bit: (CREATE_QP, context, context, qp_attr(own.pd, own.cq, 1 | 4, create_flags=bit))),
    (range(13, 64), NONE,
     lambda bit: (CREATE_QP, context, context, qp_attr(own.pd, own.cq, 1 | 64, ops=bit))),
    (range(2, 32), NONE,
     lambda bit: (CREATE_SRQ, context, context, srq_attr(own.pd, 2 | bit))),
    (range(0, 31), NONE,
     lambda bit: (CREATE_SRQ, context, context, srq_attr(own.pd, 1 | 2, srq_type=bit))),
    (range(0, 32), E, lambda bit: (ALLOC_TD, context, context, packed(4, at0=("I", bit)))),
    (range(2, 32), NONE, lambda bit: (
        ALLOC_PARENT, context, context, packed(48, at0=("Q", own.pd), at16=("I", bit)))),
    (range(2, 64), NONE, lambda bit: (
        "ibv_reg_mr_ex", own.pd, packed(72, at0=("Q", 4096), at8=("i", 1), at16=("Q", 2 | bit),
                                        at32=("Q", c.addressof(MEMORY))))),
    (range(2, 31), E, lambda bit: (ALLOC_MW, context, own.pd, bit)),
]:
    for bit in bits:
        what, *arguments = make(1 << bit)
        refuses(f"bit {bit} of {arguments[-1]}", error, what, *arguments)
for qp_type in [-1, 0, 1, *range(5, 16), 0xFF]:
    refuses(f"type {qp_type}", NONE, CREATE_QP, context, context,
            qp_attr(own.pd, own.cq, qp_type=qp_type))
for why, what, attr in [("no domain", CREATE_QP, qp_attr(own.pd, own.cq, 0)),
                        ("no domain", CREATE_SRQ, srq_attr(own.pd, 0)),
                        ("nothing", CREATE_QP, None), ("nothing", CREATE_SRQ, None),
                        ("nothing", CREATE_CQ, None), ("nothing", ALLOC_TD, None),
                        ("nothing", ALLOC_PARENT, None)]:
    refuses(why, E, what, context, context, attr)
for what, attr, destroy in [
    (CREATE_CQ, cq_attr(1 | 2, flags=1, wc_flags=0x7F, parent=own.parent), "ibv_destroy_cq"),
    (CREATE_QP, qp_attr(own.pd, own.cq, 1 | 4 | 64, ops=0xFF), "ibv_destroy_qp"),
    (CREATE_SRQ, srq_attr(own.pd, 1 | 2), "ibv_destroy_srq"),
]:
    gone(destroy, new(what, context, context, attr))

# All goes, and is refused from then on; the others stay as they were.
for objects in sets:
    objects.give_back()
for failure in failures:
    print(failure)
print("all as expected" if not failures else f"{len(failures)} failures")
