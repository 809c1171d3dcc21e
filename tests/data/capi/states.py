"""Each transition of a queue pair takes what the kernel's table has for it (`qp_state_table` of
drivers/infiniband/core/verbs.c) and nothing else, and a query gives back all that was set."""

import os

from verbs import *

context = made("ibv_open_device", first_device())
pd = made("ibv_alloc_pd", context)
cq = made("ibv_create_cq", context, c.c_int(16), None, None, c.c_int(0))
own = gid(context, 0)
table = [address for address in (gid(context, at) for at in range(16)) if address[:12] == own[:12]]
remote, another = (own[:15] + bytes([own[15] ^ bit]) for bit in (1, 3))
failures = []

# Attributes of a bit, with two values each.
VALUES = {
    CUR_STATE: None,
    ACCESS: [{"qp_access_flags": 7}, {"qp_access_flags": 15}],
    PKEY: [{"pkey_index": 0}] * 2,
    PORT: [{"port_num": 1}] * 2,
    QKEY: [{"qkey": 0x11111111}, {"qkey": 0x22222222}],
    AV: [{"ah_attr": path(remote, hop_limit=3, traffic_class=8)},
         {"ah_attr": path(another, hop_limit=5, traffic_class=4)}],
    MTU: [{"path_mtu": 3}, {"path_mtu": 2}],
    TIMEOUT: [{"timeout": 14}, {"timeout": 15}],
    RETRY: [{"retry_cnt": 6}, {"retry_cnt": 5}],
    RNR: [{"rnr_retry": 4}, {"rnr_retry": 3}],
    RQ_PSN: [{"rq_psn": 0x123456}] * 2,
    RD_ATOMIC: [{"max_rd_atomic": 2}, {"max_rd_atomic": 3}],
    ALT_PATH: [{"alt_ah_attr": path(remote, hop_limit=hops), "alt_pkey_index": 0, "alt_port_num": 1,
                "alt_timeout": hops + 10} for hops in (4, 5)],
    MIN_RNR: [{"min_rnr_timer": 12}, {"min_rnr_timer": 13}],
    SQ_PSN: [{"sq_psn": 0x654321}] * 2,
    DEST_RD_ATOMIC: [{"max_dest_rd_atomic": 5}, {"max_dest_rd_atomic": 6}],
    MIG_STATE: [{"path_mig_state": 2}, {"path_mig_state": 1}],
    DEST_QPN: [{"dest_qp_num": 0x77}] * 2,
    SQD_NOTIFY: [{"en_sqd_async_notify": 1}] * 2,
}
MIGRATION = ALT_PATH | MIG_STATE
# From, to, needed, and taken besides.
TABLE = {
    RC: [
        (RESET, INIT, PKEY | PORT | ACCESS, 0),
        (INIT, INIT, 0, PKEY | PORT | ACCESS),
        (INIT, RTR, AV | MTU | DEST_QPN | RQ_PSN | DEST_RD_ATOMIC | MIN_RNR,
         ALT_PATH | ACCESS | PKEY),
        (RTR, RTS, TIMEOUT | RETRY | RNR | SQ_PSN | RD_ATOMIC,
         CUR_STATE | MIGRATION | ACCESS | MIN_RNR),
        (RTS, RTS, 0, CUR_STATE | MIGRATION | ACCESS | MIN_RNR),
        (RTS, SQD, 0, SQD_NOTIFY),
        (SQD, SQD, 0, PORT | AV | TIMEOUT | RETRY | RNR | RD_ATOMIC | DEST_RD_ATOMIC | MIGRATION
         | ACCESS | PKEY | MIN_RNR),
        (SQD, RTS, 0, CUR_STATE | MIGRATION | ACCESS | MIN_RNR),
        (RTS, ERR, 0, 0),
        (ERR, RESET, 0, 0),
    ],
    UC: [
        (RESET, INIT, PKEY | PORT | ACCESS, 0),
        (INIT, INIT, 0, PKEY | PORT | ACCESS),
        (INIT, RTR, AV | MTU | DEST_QPN | RQ_PSN, ALT_PATH | ACCESS | PKEY),
        (RTR, RTS, SQ_PSN, CUR_STATE | MIGRATION | ACCESS),
        (RTS, RTS, 0, CUR_STATE | MIGRATION | ACCESS),
        (RTS, SQD, 0, SQD_NOTIFY),
        (SQD, SQD, 0, AV | MIGRATION | ACCESS | PKEY),
        (SQD, RTS, 0, CUR_STATE | MIGRATION | ACCESS),
        (RTS, ERR, 0, 0),
        (ERR, RESET, 0, 0),
    ],
    UD: [
        (RESET, INIT, PKEY | PORT | QKEY, 0),
        (INIT, INIT, 0, PKEY | PORT | QKEY),
        (INIT, RTR, 0, PKEY | QKEY),
        (RTR, RTS, SQ_PSN, CUR_STATE | QKEY),
        (RTS, RTS, 0, CUR_STATE | QKEY),
        (RTS, SQD, 0, SQD_NOTIFY),
        (SQD, SQD, 0, PKEY | QKEY),
        (SQD, RTS, 0, CUR_STATE | QKEY),
        (RTS, ERR, 0, 0),
        (ERR, RESET, 0, 0),
    ],
}


def values(bits, turn, state):
    found = {"cur_qp_state": state} if bits & CUR_STATE else {}
    for bit, choices in VALUES.items():
        if bits & bit and choices:
            found.update(choices[turn])
    return found


def modify(qp, to, bits, fields):
    return call("ibv_modify_qp", qp, attributes(qp_state=to, **fields), c.c_int(STATE | bits))[0]


for qp_type, rows in TABLE.items():
    qp = made("ibv_create_qp", pd, init(qp_type, cq, cq))
    is_set = {}
    for turn, (state, to, needed, besides) in enumerate(rows):
        turn, where = turn % 2, f"type {qp_type}, {state} to {to}"

        def refused(what, bits, fields):
            got = modify(qp, to, bits, fields)
            if got != errno.EINVAL or query(qp)["qp_state"] != state:
                failures.append(f"{where}: {what}: {got}")

        for bit in VALUES:
            if needed & bit:
                refused(f"without bit {bit:x}", needed & ~bit, values(needed & ~bit, turn, state))
            elif not besides & bit:
                with_it = needed | bit
                refused(f"with bit {bit:x}", with_it, values(with_it, turn, state))
        if besides & CUR_STATE:
            wrong = values(needed, turn, state) | {"cur_qp_state": SQE if state != SQE else RTS}
            refused("another state", needed | CUR_STATE, wrong)
            refused("a state that is none", needed | CUR_STATE, wrong | {"cur_qp_state": 99})
        if besides & MIG_STATE:
            wrong = values(needed, turn, state) | {"path_mig_state": 3}
            refused("a migration that is none", needed | MIG_STATE, wrong)
        if besides & ALT_PATH:
            good = values(needed | ALT_PATH, turn, state)
            for what, wrong in [("port 2", {"alt_port_num": 2}), ("timeout 32", {"alt_timeout": 32}),
                                ("P_Key 1", {"alt_pkey_index": 1}),
                                ("no address", {"alt_ah_attr": bytes(32)})]:
                refused(what, needed | ALT_PATH, good | wrong)
        bits = needed | besides
        fields = values(bits, turn, state)
        got = modify(qp, to, bits, fields)
        if got:
            failures.append(f"{where}: {os.strerror(got)}")
            break
        fields.pop("cur_qp_state", None)
        is_set = {} if to == RESET else is_set | fields
        found = query(qp)
        expected = is_set | {"qp_state": to, "cur_qp_state": to}
        wrong = {name: found[name] for name in expected if found[name] != expected[name]}
        if to == RESET and any(value not in (0, bytes(32)) for value in found.values()):
            wrong = found
        if wrong:
            failures.append(f"{where}: a query gives {wrong}, not {expected}")
    made("ibv_destroy_qp", qp)
for failure in failures:
    print(failure)
print("all as expected" if not failures else f"{len(failures)} failures")
