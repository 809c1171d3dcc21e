/*
 * A program that was built with an older or a newer header than the library's, or that finds the
 * library by dlopen(3) and dlvsym(3). Two of them send each other messages over a reliable
 * connection and compare each byte.
 *
 *   cc -DOLDER | -DNEWER | -DDLVSYM client.c (-libverbs | -ldl)
 *   client            waits for the other on TCP port 18515
 *   client ADDRESS    connects to it
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORT 18515
#define ROUNDS 1000
#define SIZE 4000

#define CHECK(true)                                                                                \
	do {                                                                                       \
		if (!(true)) {                                                                     \
			fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #true,             \
				strerror(errno));                                                  \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* The functions, by their names and version nodes. */
#undef ibv_reg_mr
#undef ibv_query_port
#define FUNCTIONS                                                                                  \
	F(ibv_get_device_list, "IBVERBS_1.1", struct ibv_device **, (int *))                       \
	F(ibv_free_device_list, "IBVERBS_1.1", void, (struct ibv_device **))                       \
	F(ibv_open_device, "IBVERBS_1.1", struct ibv_context *, (struct ibv_device *))             \
	F(ibv_close_device, "IBVERBS_1.1", int, (struct ibv_context *))                            \
	F(ibv_query_device, "IBVERBS_1.1", int, (struct ibv_context *, struct ibv_device_attr *))  \
	F(ibv_query_port, "IBVERBS_1.1", int,                                                      \
	  (struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *))                         \
	F(ibv_query_gid, "IBVERBS_1.1", int, (struct ibv_context *, uint8_t, int, union ibv_gid *)) \
	F(ibv_alloc_pd, "IBVERBS_1.1", struct ibv_pd *, (struct ibv_context *))                    \
	F(ibv_dealloc_pd, "IBVERBS_1.1", int, (struct ibv_pd *))                                   \
	F(ibv_reg_mr, "IBVERBS_1.1", struct ibv_mr *, (struct ibv_pd *, void *, size_t, int))      \
	F(ibv_dereg_mr, "IBVERBS_1.1", int, (struct ibv_mr *))                                     \
	F(ibv_create_cq, "IBVERBS_1.1", struct ibv_cq *,                                           \
	  (struct ibv_context *, int, void *, struct ibv_comp_channel *, int))                     \
	F(ibv_destroy_cq, "IBVERBS_1.1", int, (struct ibv_cq *))                                   \
	F(ibv_create_qp, "IBVERBS_1.1", struct ibv_qp *,                                           \
	  (struct ibv_pd *, struct ibv_qp_init_attr *))                                            \
	F(ibv_modify_qp, "IBVERBS_1.1", int, (struct ibv_qp *, struct ibv_qp_attr *, int))         \
	F(ibv_destroy_qp, "IBVERBS_1.1", int, (struct ibv_qp *))

#define F(name, node, type, arguments) static type(*p_##name) arguments;
FUNCTIONS
#undef F

static void find_functions(void)
{
#ifdef DLVSYM
	void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
#define F(name, node, type, arguments) CHECK((p_##name = dlvsym(library, #name, node)));
	FUNCTIONS
#undef F
	CHECK(!dlvsym(library, "ibv_open_device", "IBVERBS_1.99"));
	CHECK(!dlvsym(library, "ibv_no_such_function", "IBVERBS_1.1"));
#else
#define F(name, node, type, arguments) p_##name = (void *)name;
	FUNCTIONS
#undef F
#endif
}

/* Asks by structures of other lengths than the library's; what lies behind them stays. */
static void ask(struct ibv_context *context)
{
#ifdef OLDER
	/* The first header had 48 bytes of a port, and no length is passed. */
	struct {
		uint8_t port[48];
		uint8_t behind[64];
	} port;
	memset(&port, 0x5a, sizeof(port));
	CHECK(p_ibv_query_port(context, 1, (void *)&port) == 0);
	CHECK(port.port[0] == IBV_PORT_ACTIVE && port.port[1] == 0);
	for (size_t at = 0; at < sizeof(port.behind); at++)
		CHECK(port.behind[at] == 0x5a);
	/* The first extended attributes ended with their mask, the next with paging. */
	size_t lengths[] = { sizeof(struct ibv_device_attr) + 4, sizeof(struct ibv_device_attr) + 4 + 28 };
	for (int i = 0; i < 2; i++) {
		uint8_t device[1024];
		size_t length = (lengths[i] + 7) & ~(size_t)7;
		memset(device, 0x5a, sizeof(device));
		struct verbs_context *verbs = verbs_get_ctx(context);
		CHECK(verbs && verbs->query_device_ex);
		CHECK(verbs->query_device_ex(context, NULL, (void *)device, length) == 0);
		CHECK(((struct ibv_device_attr *)device)->phys_port_cnt == 1);
		for (size_t at = length; at < sizeof(device); at++)
			CHECK(device[at] == 0x5a);
	}
#else
	(void)context;
#endif
#ifdef NEWER
	/* Structures that have more at their ends, which becomes zero. */
	struct verbs_context *verbs = verbs_get_ctx_op(context, query_device_ex);
	CHECK(verbs && verbs->query_port);
	struct {
		struct ibv_port_attr port;
		uint8_t more[128];
		uint8_t behind[64];
	} port;
	memset(&port, 0x5a, sizeof(port));
	CHECK(verbs->query_port(context, 1, &port.port, sizeof(port.port) + sizeof(port.more)) == 0);
	CHECK(port.port.state == IBV_PORT_ACTIVE);
	struct {
		struct ibv_device_attr_ex device;
		uint8_t more[256];
		uint8_t behind[64];
	} device;
	memset(&device, 0x5a, sizeof(device));
	CHECK(verbs->query_device_ex(context, NULL, &device.device,
				     sizeof(device.device) + sizeof(device.more)) == 0);
	CHECK(device.device.orig_attr.phys_port_cnt == 1);
	for (int at = 0; at < 64; at++) {
		CHECK(port.behind[at] == 0x5a && device.behind[at] == 0x5a);
		CHECK(device.more[192 + at] == 0 && port.more[64 + at] == 0);
	}
	/* A question that the library does not know. */
	struct ibv_query_device_ex_input input = { .comp_mask = 1 };
	CHECK(verbs->query_device_ex(context, &input, &device.device, sizeof(device.device)) ==
	      EINVAL);
	/* Objects with attributes that the library does not know are refused, not half made. */
	struct ibv_cq_init_attr_ex cq = { .cqe = 4, .comp_mask = 1u << 20 };
	CHECK(!ibv_create_cq_ex(context, &cq) && (errno == EINVAL || errno == EOPNOTSUPP));
	struct ibv_qp_init_attr_ex qp = { .comp_mask = 1u << 30, .qp_type = IBV_QPT_RC };
	CHECK(!ibv_create_qp_ex(context, &qp) && (errno == EINVAL || errno == EOPNOTSUPP));
	/* A member of a later table of functions is behind this one's end. */
	CHECK(verbs->sz <= sizeof(struct verbs_context) + 64);
#endif
}

struct end {
	uint32_t qpn, psn;
	union ibv_gid gid;
};

static struct end swap_ends(const char *address, struct end own)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	int on = 1, s = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(s >= 0);
	if (address) {
		CHECK(inet_pton(AF_INET, address, &to.sin_addr) == 1);
		CHECK(connect(s, (void *)&to, sizeof(to)) == 0);
	} else {
		CHECK(setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
		CHECK(bind(s, (void *)&to, sizeof(to)) == 0 && listen(s, 1) == 0);
		CHECK((s = accept(s, NULL, NULL)) >= 0);
	}
	struct end other;
	CHECK(write(s, &own, sizeof(own)) == sizeof(own));
	CHECK(recv(s, &other, sizeof(other), MSG_WAITALL) == sizeof(other));
	return other;
}

static void connect_qp(struct ibv_qp *qp, uint32_t psn, struct end other)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR,
				    .path_mtu = IBV_MTU_1024,
				    .dest_qp_num = other.qpn,
				    .rq_psn = other.psn,
				    .max_dest_rd_atomic = 1,
				    .min_rnr_timer = 12,
				    .ah_attr = { .is_global = 1,
						 .grh = { .dgid = other.gid, .hop_limit = 1 },
						 .port_num = 1 } };
	CHECK(p_ibv_modify_qp(qp, &attr,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				      IBV_QP_MIN_RNR_TIMER) == 0);
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.sq_psn = psn;
	attr.max_rd_atomic = 1;
	CHECK(p_ibv_modify_qp(qp, &attr,
			      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void complete(struct ibv_cq *cq, int opcode, uint32_t size)
{
	struct ibv_wc wc;
	int count;
	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	CHECK(count == 1 && wc.status == IBV_WC_SUCCESS && (int)wc.opcode == opcode);
	CHECK(opcode != IBV_WC_RECV || wc.byte_len == size);
}

int main(int argc, char **argv)
{
	const char *address = argc > 1 ? argv[1] : NULL;
	int number = 0;
	find_functions();
	struct ibv_device **list = p_ibv_get_device_list(&number);
	CHECK(list && number == 2);
	struct ibv_context *context = p_ibv_open_device(list[0]);
	CHECK(context);
	p_ibv_free_device_list(list);
	ask(context);

	static uint8_t memory[2][SIZE];
	struct ibv_pd *pd = p_ibv_alloc_pd(context);
	CHECK(pd);
	struct ibv_mr *mr = p_ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	struct ibv_cq *sent = p_ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_cq *came = p_ibv_create_cq(context, 4, NULL, NULL, 0);
	CHECK(sent && came);
	struct ibv_qp_init_attr init = { .send_cq = sent,
					 .recv_cq = came,
					 .cap = { 2, 2, 1, 1, 0 },
					 .qp_type = IBV_QPT_RC };
	struct ibv_qp *qp = p_ibv_create_qp(pd, &init);
	CHECK(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CHECK(p_ibv_modify_qp(qp, &attr,
			      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				      IBV_QP_ACCESS_FLAGS) == 0);
	struct ibv_sge in = { (uintptr_t)memory[0], SIZE, mr->lkey };
	struct ibv_sge out = { (uintptr_t)memory[1], SIZE, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	CHECK(ibv_post_recv(qp, &recv, &bad_recv) == 0);
	struct end own = { qp->qp_num, (uint32_t)getpid() & 0xffffff, { { 0 } } };
	CHECK(p_ibv_query_gid(context, 1, 0, &own.gid) == 0);
	connect_qp(qp, own.psn, swap_ends(address, own));

	for (unsigned round = 0; round < ROUNDS; round++) {
		if (!address) {
			complete(came, IBV_WC_RECV, SIZE);
			memcpy(memory[1], memory[0], SIZE);
			CHECK(ibv_post_recv(qp, &recv, &bad_recv) == 0);
		} else {
			for (unsigned at = 0; at < SIZE; at++)
				memory[1][at] = (uint8_t)(round * 31 + at * 7);
		}
		CHECK(ibv_post_send(qp, &send, &bad_send) == 0);
		complete(sent, IBV_WC_SEND, SIZE);
		if (address) {
			complete(came, IBV_WC_RECV, SIZE);
			CHECK(memcmp(memory[0], memory[1], SIZE) == 0);
			memset(memory[0], 0, SIZE);
			CHECK(ibv_post_recv(qp, &recv, &bad_recv) == 0);
		}
	}
	CHECK(p_ibv_destroy_qp(qp) == 0 && p_ibv_destroy_cq(sent) == 0);
	CHECK(p_ibv_destroy_cq(came) == 0 && p_ibv_dereg_mr(mr) == 0);
	CHECK(p_ibv_dealloc_pd(pd) == 0 && p_ibv_close_device(context) == 0);
	printf("%d iters in some seconds\n", ROUNDS);
	return 0;
}
