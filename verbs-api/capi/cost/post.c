/*
 * Posts WRITEs of 64 bytes and polls for their completions, as often as the argument says, by the
 * C ABI. `cargo xtask instructions` counts it beside benches/src/bin/post.rs, which does the same by
 * the Rust API: the two queue pairs of one device are each other's peers.
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* WRITEs in flight; divides the argument. */
#define BURST 64

#define CHECK(true)                                                                                \
	do {                                                                                       \
		if (!(true)) {                                                                     \
			fprintf(stderr, "line %d: not so: %s\n", __LINE__, #true);                 \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

static void connect_qp(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	CHECK(ibv_modify_qp(qp, &attr,
			    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = peer;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = gid;
	attr.ah_attr.port_num = 1;
	CHECK(ibv_modify_qp(qp, &attr,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				    IBV_QP_MIN_RNR_TIMER) == 0);
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 20;
	attr.retry_cnt = 7;
	attr.max_rd_atomic = 1;
	CHECK(ibv_modify_qp(qp, &attr,
			    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

int main(int argc, char **argv)
{
	static uint8_t memory[128];
	long count = argc == 2 ? atol(argv[1]) : 0;
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(count > 0 && list && list[0]);
	struct ibv_context *context = ibv_open_device(list[0]);
	CHECK(context);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(pd && cq);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory),
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .cap = { 64, 1, 1, 1, 0 }, .qp_type = IBV_QPT_RC
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init), *peer = ibv_create_qp(pd, &init);
	union ibv_gid gid;
	CHECK(qp && peer && ibv_query_gid(context, 1, 0, &gid) == 0);
	connect_qp(qp, peer->qp_num, gid);
	connect_qp(peer, qp->qp_num, gid);
	struct ibv_sge sge = { (uintptr_t)memory, 64, mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
					.send_flags = IBV_SEND_SIGNALED };
	wr.wr.rdma.remote_addr = (uintptr_t)memory + 64;
	wr.wr.rdma.rkey = mr->rkey;
	memset(memory, 7, 64);
	for (long at = 0; at < count; at += BURST) {
		for (long to = 0; to < BURST; to++) {
			wr.wr_id = (uint64_t)(at + to);
			CHECK(ibv_post_send(qp, &wr, &bad) == 0);
		}
		/* The device's own thread completes them: no poll is in vain. */
		usleep(20000);
		for (long to = 0; to < BURST; to++) {
			struct ibv_wc wc;
			int found;
			while ((found = ibv_poll_cq(cq, 1, &wc)) == 0)
				usleep(20000);
			CHECK(found == 1 && wc.status == IBV_WC_SUCCESS &&
			      wc.wr_id == (uint64_t)(at + to));
		}
	}
	CHECK(memory[127] == 7);
	return 0;
}
