"""Python's pyverbs over a reliable connection: two of it WRITE into each other's memory, and compare.

Without an argument it waits for the other on TCP port 18515, else it connects to that address.
"""

import socket
import struct
import sys

from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR
import pyverbs.enums as e

ROUNDS, SIZE = 200, 3000

names = [device.name.decode() for device in get_device_list()]
assert names[0] == 'roce0', names
context = Context(name=names[0])
pd, cq = PD(context), CQ(context, 16)
access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
out, into = MR(pd, SIZE, access), MR(pd, SIZE, access)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1)))
gid = context.query_gid(1, 0)

if len(sys.argv) > 1:
    peer = socket.create_connection((sys.argv[1], 18515))
else:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(('', 18515))
    listener.listen()
    peer = listener.accept()[0]


def swap(own):
    peer.sendall(own)
    other = b''
    while len(other) < len(own):
        more = peer.recv(len(own) - len(other))
        assert more, 'the other has ended'
        other += more
    return other


FORMAT = '<IIQ40s'
own = struct.pack(FORMAT, qp.qp_num, into.rkey, into.buf, gid.gid.encode())
qpn, rkey, address, there = struct.unpack(FORMAT, swap(own))
attr = QPAttr(port_num=1)
attr.dest_qp_num, attr.path_mtu, attr.qp_access_flags = qpn, e.IBV_MTU_4096, access
attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 7, 7, 12
route = GlobalRoute(dgid=GID(there.rstrip(b'\0').decode()), sgid_index=0)
attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
qp.to_rts(attr)
swap(b'ready')

for turn in range(ROUNDS):
    mine = bytes((turn * 7 + at) & 0xff for at in range(SIZE))
    out.write(mine, SIZE)
    send = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(out.buf, SIZE, out.lkey)],
                  send_flags=e.IBV_SEND_SIGNALED)
    send.set_wr_rdma(rkey, address)
    qp.post_send(send)
    count = 0
    while count == 0:
        count, completions = cq.poll(1)
    assert completions[0].status == e.IBV_WC_SUCCESS, completions[0]
    swap(b'written')
    assert into.read(SIZE, 0) == mine
    swap(b'read')

for thing in [qp, out, into, cq, pd, context]:
    thing.close()
print(f'{ROUNDS} iters in some seconds')
