"""A ping-pong whose client ends right after its last completion, again and again: its peer sees no
error. Arguments: server or client, the other's address or `-`, rounds, and how the client ends. If
that is `quiet`, by exit(3) after messages that need not ask for acknowledgements; if it is `forked`,
so too, as the child of a program that has the device."""

import os
import socket
import sys
import time

from verbs import *

MESSAGES, SIZE, MEETING = 5, 64, 18600


class Side:
    def __init__(self):
        self.context = made("ibv_open_device", first_device())
        self.pd = made("ibv_alloc_pd", self.context)
        self.memory = c.create_string_buffer(SIZE)
        self.mr = made("ibv_reg_mr", self.pd, self.memory, c.c_size_t(SIZE), c.c_int(1))
        self.sge = c.create_string_buffer(
            struct.pack("<QII", c.addressof(self.memory), SIZE, word(self.mr + 36, c.c_uint32)))
        self.poll = poll_cq(self.context)
        self.send, self.recv = post_send(self.context), post_recv(self.context)
        self.wc = c.create_string_buffer(48)
        # The longest time between two polls.
        self.pause = 0

    def connect(self, link):
        self.cq = made("ibv_create_cq", self.context, c.c_int(64), None, None, c.c_int(0))
        wanted = init(RC, self.cq, self.cq, inline=SIZE, signal_all=0)
        self.qp = made("ibv_create_qp", self.pd, wanted)
        steps = [({"qp_state": INIT, "port_num": 1, "qp_access_flags": 1}, PKEY | PORT | ACCESS)]
        link.sendall(struct.pack("<16sI", gid(self.context, 0), word(self.qp + 52, c.c_uint32)))
        remote, number = struct.unpack("<16sI", link.recv(20, socket.MSG_WAITALL))
        steps.append(({"qp_state": RTR, "path_mtu": 3, "dest_qp_num": number, "min_rnr_timer": 12,
                       "ah_attr": path(remote), "max_dest_rd_atomic": 1},
                      AV | MTU | DEST_QPN | RQ_PSN | DEST_RD_ATOMIC | MIN_RNR))
        # A lost acknowledgement is an error within a second.
        steps.append(({"qp_state": RTS, "timeout": 14, "retry_cnt": 3, "rnr_retry": 7,
                       "max_rd_atomic": 1}, TIMEOUT | RETRY | RNR | SQ_PSN | RD_ATOMIC))
        for at, (fields, bits) in enumerate(steps):
            made("ibv_modify_qp", self.qp, attributes(**fields), c.c_int(STATE | bits))
            if at == 0:
                for _ in range(MESSAGES):
                    self.post_recv()
        # Both are ready.
        link.sendall(b".")
        assert link.recv(1) == b"."

    def post_recv(self):
        wr = c.create_string_buffer(struct.pack("<QQQi", 1, 0, c.addressof(self.sge), 1), 32)
        assert self.recv(self.qp, c.addressof(wr), c.addressof(c.c_void_p())) == 0

    def post_send(self, quiet=False):
        # IBV_WR_SEND; IBV_SEND_INLINE or IBV_SEND_SIGNALED.
        wr = c.create_string_buffer(
            struct.pack("<QQQiiI", 2, 0, c.addressof(self.sge), 1, 2, 8 if quiet else 2), 128)
        assert self.send(self.qp, c.addressof(wr), c.addressof(c.c_void_p())) == 0

    def wait(self, wanted, receives_only=False):
        """Polls until so many receives and sends have completed; returns statuses of errors."""
        wrong, last = [], time.monotonic()
        while wanted[1] > 0 or wanted[2] > 0 and not receives_only:
            now = time.monotonic()
            self.pause, last = max(self.pause, now - last), now
            if self.poll(self.cq, 1, c.addressof(self.wc)) == 1:
                wr_id, status = struct.unpack_from("<Qi", self.wc)
                wanted[wr_id] -= 1
                if status:
                    wrong.append(status)
                    break
        return wrong

    def errors_to_come(self):
        """The statuses of what completes until all tries are over."""
        wrong, end = [], time.monotonic() + 0.4
        while time.monotonic() < end:
            if self.poll(self.cq, 1, c.addressof(self.wc)) == 1:
                wrong.append(struct.unpack_from("<Qi", self.wc)[1])
        return wrong


def serve(link, quiet):
    side, wrong = Side(), []
    while True:
        try:
            meeting = link.accept()[0]
        except OSError:
            break
        if meeting.recv(1) != b"n":
            break
        side.connect(meeting)
        left = {1: 0, 2: 0}
        for _ in range(MESSAGES):
            left[1] += 1
            wrong += side.wait(left, receives_only=True)
            side.post_send(quiet)
            left[2] += not quiet
        # The last send may be unacknowledged, and the client is gone.
        wrong += side.wait(left)
        if quiet:
            meeting.recv(1)
            wrong += side.errors_to_come()
        made("ibv_destroy_qp", side.qp)
        made("ibv_destroy_cq", side.cq)
        meeting.close()
    print(f"{len(wrong)} errors {wrong[:5]}")


def ping(address, how):
    link = socket.create_connection((address, MEETING))
    link.sendall(b"n")
    side = Side()
    side.connect(link)
    for _ in range(MESSAGES):
        side.post_send()
        wrong = side.wait({1: 1, 2: 1})
        assert not wrong, f"{wrong}, not polled for {side.pause:.3f} s"
    if how == "_exit":
        os._exit(0)
    if how in ("exit", "quiet", "forked"):
        c.CDLL(None).exit(0)


role, address, rounds, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if role == "server":
    listener = socket.create_server(("", MEETING))
    sys.stderr.write("ready\n")
    sys.stderr.flush()
    serve(listener, how in ("quiet", "forked"))
else:
    parents = Side() if how == "forked" else None
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            ping(address, how)
            # As by return from main.
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with socket.create_connection((address, MEETING)) as link:
        link.sendall(b"e")
    print("done")
