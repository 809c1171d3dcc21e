// A call that is refused returns what its manual page says, has it in errno, and changes nothing:
// what it named does afterwards all that it did before. A call that succeeds leaves errno alone.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "check.h"

enum { KEPT = 77, DEPTH = 32 };

// For a call that returns 0 or the errno, one that returns -1, and one that returns a pointer.
#define REFUSED(error, call) CHECK((errno = 0, call) == error && errno == error)
#define MINUS(error, call) CHECK((errno = 0, call) == -1 && errno == error)
#define NONE(error, call) CHECK((errno = 0, !(call)) && errno == error)
#define DONE(call) CHECK((errno = KEPT, call) == 0 && errno == KEPT)
#define MADE(to, call) CHECK((errno = KEPT, (to = call)) && errno == KEPT)

static struct ibv_context *context, *other;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;
// Connected with each other; `to` receives from `srq`.
static struct ibv_qp *from, *to;
static char memory[4096];
static union ibv_gid own;
static struct ibv_td_init_attr none;

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

// The next completion's status; -1 if there is none for a while.
static int status_within(double seconds)
{
	struct ibv_wc wc;
	double until = now() + seconds;
	do
		if (ibv_poll_cq(cq, 1, &wc) == 1)
			return wc.status;
	while (now() < until);
	return -1;
}

static void completes(int count)
{
	while (count--)
		CHECK(status_within(30) == IBV_WC_SUCCESS);
	CHECK(status_within(0.02) == -1);
}

static struct ibv_send_wr write_of(struct ibv_sge *sge, unsigned rkey, struct ibv_send_wr *next)
{
	*sge = (struct ibv_sge){ (uintptr_t)memory, 8, mr->lkey };
	return (struct ibv_send_wr){ .next = next, .sg_list = sge, .num_sge = 1,
				     .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
				     .wr.rdma = { (uintptr_t)memory + 64, rkey } };
}

static int writes_to(unsigned rkey)
{
	struct ibv_sge sge;
	struct ibv_send_wr wr = write_of(&sge, rkey, NULL), *bad;
	CHECK(!ibv_post_send(from, &wr, &bad));
	return status_within(30);
}

static struct ibv_qp *pair(struct ibv_srq *takes_from)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .srq = takes_from, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { DEPTH, DEPTH, 1, 1, 16 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_BIND_MW |
				  IBV_QP_EX_WITH_LOCAL_INV,
	};
	struct ibv_qp *made;
	MADE(made, ibv_create_qp_ex(context, &init));
	return made;
}

enum { INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
       RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
	     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
       RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
	     IBV_QP_MAX_QP_RD_ATOMIC };

static enum ibv_qp_state state(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	DONE(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

// A change that is refused leaves each attribute.
static void refuses(struct ibv_qp *qp, struct ibv_qp_attr *wrong, int mask)
{
	struct ibv_qp_attr was, is;
	struct ibv_qp_init_attr init;
	DONE(ibv_query_qp(qp, &was, mask, &init));
	REFUSED(EINVAL, ibv_modify_qp(qp, wrong, mask));
	DONE(ibv_query_qp(qp, &is, mask, &init));
#define SAME(field) !memcmp(&was.field, &is.field, sizeof is.field)
	CHECK(SAME(qp_state) && SAME(path_mtu) && SAME(qkey) && SAME(rq_psn) && SAME(sq_psn) &&
	      SAME(dest_qp_num) && SAME(qp_access_flags) && SAME(pkey_index) && SAME(port_num) &&
	      SAME(min_rnr_timer) && SAME(max_rd_atomic) && SAME(timeout) && SAME(retry_cnt) &&
	      SAME(rnr_retry) && SAME(max_dest_rd_atomic) && SAME(ah_attr.is_global) &&
	      SAME(ah_attr.grh.dgid) && SAME(ah_attr.grh.sgid_index) && SAME(ah_attr.port_num));
}

// A field that no queue pair can have is refused at each step, and the step can be taken
// afterwards.
static void connect_to(struct ibv_qp *qp, struct ibv_qp *peer)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 7 };
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = own, .hop_limit = 64 } },
	};
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
				   .rnr_retry = 7, .max_rd_atomic = 1 };
#define BAD(attr, mask, field, value)                                                              \
	do {                                                                                       \
		struct ibv_qp_attr wrong = attr;                                                   \
		wrong.field = value;                                                               \
		refuses(qp, &wrong, mask);                                                         \
	} while (0)
	BAD(init, INIT, pkey_index, 1);
	BAD(init, INIT, port_num, 0);
	BAD(init, INIT, port_num, 2);
	refuses(qp, &rtr, RTR);
	DONE(ibv_modify_qp(qp, &init, INIT));
	refuses(qp, &rts, RTS);
	BAD(rtr, RTR, path_mtu, 6);
	BAD(rtr, RTR, path_mtu, 0);
	BAD(rtr, RTR, min_rnr_timer, 32);
	BAD(rtr, RTR, max_dest_rd_atomic, 129);
	BAD(rtr, RTR, ah_attr.is_global, 0);
	BAD(rtr, RTR, ah_attr.port_num, 0);
	BAD(rtr, RTR, ah_attr.port_num, 2);
	BAD(rtr, RTR, ah_attr.grh.sgid_index, 255);
	// Of a number of 24 bits the others do not count.
	rtr.dest_qp_num |= 0xab000000;
	rtr.rq_psn = 0xcd000000;
	DONE(ibv_modify_qp(qp, &rtr, RTR));
	BAD(rts, RTS, timeout, 32);
	BAD(rts, RTS, retry_cnt, 8);
	BAD(rts, RTS, rnr_retry, 8);
	BAD(rts, RTS, max_rd_atomic, 129);
	rts.sq_psn = 0xef000000;
	DONE(ibv_modify_qp(qp, &rts, RTS));
	refuses(qp, &rtr, RTR);
}

static void post_to_srq(int count)
{
	struct ibv_sge sge = { (uintptr_t)memory, 64, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	while (count--)
		CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
}

static void send_one(void)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	CHECK(!ibv_post_send(from, &wr, &bad));
	completes(2);
}

static void begin(void)
{
	struct ibv_device **devices;
	alarm(120); // Ends a call that sleeps for ever.
	MADE(devices, ibv_get_device_list(NULL));
	MADE(context, ibv_open_device(devices[0]));
	MADE(other, ibv_open_device(devices[0]));
	DONE(ibv_query_gid(context, 1, 0, &own));
	MADE(pd, ibv_alloc_pd(context));
	MADE(channel, ibv_create_comp_channel(context));
	MADE(cq, ibv_create_cq(context, 256, (void *)1, channel, 0));
	struct ibv_srq_init_attr init = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	MADE(srq, ibv_create_srq(pd, &init));
	MADE(mr, ibv_reg_mr(pd, memory, sizeof memory,
			    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND));
	from = pair(NULL);
	to = pair(srq);
	connect_to(from, to);
	connect_to(to, from);
	CHECK(writes_to(mr->rkey) == IBV_WC_SUCCESS);
}

static void what_is_used_stays_and_works(void)
{
	struct ibv_srq_attr limit = { .srq_limit = 2 }, is;
	struct ibv_async_event event;
	struct ibv_cq *of;
	void *its;
	post_to_srq(3);
	DONE(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	CHECK(!ibv_req_notify_cq(cq, 0));
	for (int twice = 0; twice < 2; twice++) {
		REFUSED(EBUSY, ibv_destroy_srq(srq));
		REFUSED(EBUSY, ibv_destroy_cq(cq));
		REFUSED(EBUSY, ibv_destroy_comp_channel(channel));
		REFUSED(EBUSY, ibv_dealloc_pd(pd));
	}
	struct ibv_srq_attr wrong = { .srq_limit = DEPTH + 1000, .max_wr = 1 << 30 };
	REFUSED(EINVAL, ibv_modify_srq(srq, &wrong, IBV_SRQ_LIMIT));
	REFUSED(EINVAL, ibv_modify_srq(srq, &wrong, IBV_SRQ_MAX_WR));
	DONE(ibv_query_srq(srq, &is));
	CHECK(is.srq_limit == 2 && is.max_wr == DEPTH);
	REFUSED(EINVAL, ibv_resize_cq(cq, 0));
	// The event of the limit, and that of the completions.
	send_one();
	send_one();
	struct pollfd readable = { context->async_fd, POLLIN, 0 };
	CHECK(poll(&readable, 1, 30000) == 1);
	DONE(ibv_get_async_event(context, &event));
	CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	ibv_ack_async_event(&event);
	DONE(ibv_get_cq_event(channel, &of, &its));
	CHECK(of == cq && its == (void *)1);
	ibv_ack_cq_events(cq, 1);
	struct ibv_mr *another;
	MADE(another, ibv_reg_mr(pd, memory, 64, 0));
	DONE(ibv_dereg_mr(another));
	// A parent domain, and its thread domain.
	struct ibv_td *td;
	MADE(td, ibv_alloc_td(context, &none));
	struct ibv_parent_domain_init_attr of_both = { .pd = pd, .td = td };
	struct ibv_pd *parent;
	MADE(parent, ibv_alloc_parent_domain(context, &of_both));
	REFUSED(EBUSY, ibv_dealloc_td(td));
	MADE(another, ibv_reg_mr(parent, memory, 64, 0));
	REFUSED(EBUSY, ibv_dealloc_pd(parent));
	DONE(ibv_dereg_mr(another));
	DONE(ibv_dealloc_pd(parent));
	DONE(ibv_dealloc_td(td));
}

static void a_queue_pair_in_a_group_stays(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp;
	union ibv_gid groups[2] = { { .raw = { [10] = 0xff, 0xff, 239, 7, 7, 7 } },
				    { .raw = { [10] = 0xff, 0xff, 239, 7, 7, 8 } } };
	MADE(qp, ibv_create_qp(pd, &init));
	REFUSED(EINVAL, ibv_detach_mcast(qp, &groups[0], 0));
	DONE(ibv_attach_mcast(qp, &groups[0], 0));
	REFUSED(EINVAL, ibv_attach_mcast(qp, &own, 0));
	REFUSED(EINVAL, ibv_detach_mcast(qp, &groups[1], 0));
	REFUSED(EINVAL, ibv_attach_mcast(from, &groups[1], 0));
	REFUSED(EBUSY, ibv_destroy_qp(qp));
	CHECK(state(qp) == IBV_QPS_RESET);
	DONE(ibv_attach_mcast(qp, &groups[1], 0));
	DONE(ibv_detach_mcast(qp, &groups[0], 0));
	REFUSED(EBUSY, ibv_destroy_qp(qp));
	DONE(ibv_detach_mcast(qp, &groups[1], 0));
	DONE(ibv_destroy_qp(qp));
}

static void regions_and_windows(void)
{
	// A card and Soft-RoCE take the low 8 bits of a key; the program reads the key after it.
	struct ibv_mw *mw;
	MADE(mw, ibv_alloc_mw(pd, IBV_MW_TYPE_2));
	unsigned old = mw->rkey;
	struct ibv_send_wr bind = { .opcode = IBV_WR_BIND_MW,
				    .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_mw_bind_info shows = { mr, (uintptr_t)memory + 64, 8, IBV_ACCESS_REMOTE_WRITE };
	bind.bind_mw.mw = mw;
	bind.bind_mw.rkey = 0x12345600 | (old + 0x35) % 256;
	bind.bind_mw.bind_info = shows;
	unsigned key = (old & ~0xffu) | (bind.bind_mw.rkey & 0xff);
	CHECK(!ibv_post_send(to, &bind, &bad));
	completes(1);
	CHECK(mw->rkey == key);
	REFUSED(EINVAL, ibv_dereg_mr(mr));
	struct ibv_mw_bind again = { .bind_info = shows };
	CHECK(ibv_bind_mw(to, mw, &again) == EINVAL); // The header's own function.
	MINUS(EINVAL, ibv_rereg_mr(mr, 8, NULL, NULL, 0, 0));
	MINUS(EINVAL, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0));
	MINUS(EINVAL, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
				   IBV_ACCESS_REMOTE_WRITE));
	MINUS(EBUSY, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 1));
	MINUS(EINVAL, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, pd, 0, 1));
	struct ibv_pd *apart;
	MADE(apart, ibv_alloc_pd(context));
	MINUS(EBUSY, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, apart, NULL, 0, 0));
	DONE(ibv_dealloc_pd(apart));
	CHECK(mw->rkey == key && writes_to(key) == IBV_WC_SUCCESS);
	CHECK(writes_to(mr->rkey) == IBV_WC_SUCCESS);
	// Three of one window in a list: the last one's key is its key.
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(to);
	unsigned next = (key & ~0xffu) | (key + 1) % 256;
	for (int aborted = 1; aborted >= 0; aborted--) {
		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_local_inv(ex, key);
		ibv_wr_bind_mw(ex, mw, 0xab00 | (next & 0xff), &shows);
		ibv_wr_local_inv(ex, next);
		ibv_wr_bind_mw(ex, mw, next + 1, &shows);
		if (aborted) {
			ibv_wr_abort(ex);
			CHECK(mw->rkey == key);
			completes(0);
		} else
			CHECK(!ibv_wr_complete(ex));
	}
	completes(4);
	CHECK(mw->rkey == ((key & ~0xffu) | (next + 1) % 256));
	CHECK(writes_to(mw->rkey) == IBV_WC_SUCCESS);
	DONE(ibv_dealloc_mw(mw));
	NONE(EINVAL, ibv_alloc_mw(pd, 3));
	NONE(EINVAL, ibv_reg_mr(pd, memory, 64, IBV_ACCESS_REMOTE_WRITE));
	struct ibv_ah_attr path = { .is_global = 1, .port_num = 1, .grh = { .dgid = own } };
	struct ibv_ah *ah;
	for (int port = 0; port < 4; port++) {
		path.port_num = port;
		if (port == 1)
			continue;
		NONE(EINVAL, ibv_create_ah(pd, &path));
	}
	path.port_num = 1;
	MADE(ah, ibv_create_ah(pd, &path));
	DONE(ibv_destroy_ah(ah));
}

// Of a list those before the first mistake are posted, and the program is told where that is.
static void lists_are_posted_as_far_as_they_go(void)
{
	struct ibv_sge sge;
	struct ibv_send_wr wr[DEPTH + 8], *bad;
	for (int mistake = 0; mistake < 20; mistake += 19)
		for (int kind = 0; kind < 3; kind++) {
			for (int at = 0; at < 24; at++)
				wr[at] = write_of(&sge, mr->rkey, at < 23 ? &wr[at + 1] : NULL);
			if (kind == 0)
				wr[mistake].opcode = 99;
			else
				wr[mistake].num_sge = kind == 1 ? 1000 : -1;
			bad = NULL;
			REFUSED(EINVAL, ibv_post_send(from, wr, &bad));
			CHECK(bad == &wr[mistake]);
			completes(mistake);
		}
	// `to` waits for the receives of its queue; receives of `from` are never taken.
	struct ibv_recv_wr recv[DEPTH + 8], *bad_recv;
	struct ibv_sge room = { (uintptr_t)memory, 64, mr->lkey };
	for (int at = 0; at < DEPTH + 8; at++)
		recv[at] = (struct ibv_recv_wr){ .next = at < DEPTH + 7 ? &recv[at + 1] : NULL,
						 .sg_list = &room, .num_sge = 1 };
	recv[19].num_sge = 1000;
	REFUSED(EINVAL, ibv_post_recv(from, recv, &bad_recv));
	CHECK(bad_recv == &recv[19]);
	REFUSED(EINVAL, ibv_post_srq_recv(srq, recv, &bad_recv));
	CHECK(bad_recv == &recv[19]);
	recv[19].num_sge = 1;
	// 19 are there, and one is of the test before.
	REFUSED(ENOMEM, ibv_post_recv(from, recv, &bad_recv));
	CHECK(bad_recv == &recv[DEPTH - 19]);
	REFUSED(ENOMEM, ibv_post_srq_recv(srq, recv, &bad_recv));
	CHECK(bad_recv == &recv[DEPTH - 20]);
	send_one();
	post_to_srq(1);
	REFUSED(EINVAL, context->ops.post_recv(NULL, recv, &bad_recv));
	CHECK(bad_recv == recv);
	REFUSED(EINVAL, ibv_post_recv(to, recv, &bad_recv)); // It has none of its own, full or not.
	REFUSED(EINVAL, context->ops.post_srq_recv(NULL, recv, &bad_recv));
	REFUSED(EINVAL, context->ops.post_send(NULL, wr, &bad));
	CHECK(bad == wr);
}

// What is built by calls is posted whole, or not at all.
static void a_built_list_is_posted_or_not(void)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(from);
	// How many requests, which of them is wrong, and the errno.
	static const int cases[][3] = { { DEPTH + 1, -1, ENOMEM }, { 3 * DEPTH, -1, ENOMEM },
					{ 20, 19, EINVAL },	   { 2, 1, EINVAL },
					{ DEPTH, DEPTH - 1, EINVAL }, { 1, -1, 0 },
					{ 20, -1, 0 },		   { DEPTH, -1, 0 } };
	for (unsigned which = 0; which < sizeof cases / sizeof *cases; which++) {
		const int *it = cases[which];
		ibv_wr_start(ex);
		for (int at = 0; at < it[0]; at++) {
			ex->wr_id = at;
			ex->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + 64);
			if (at == it[1]) {
				static char much[64];
				ibv_wr_set_inline_data(ex, much, sizeof much);
			} else
				ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
		}
		if (it[2])
			REFUSED(it[2], ibv_wr_complete(ex));
		else
			CHECK(!ibv_wr_complete(ex));
		completes(it[2] ? 0 : it[0]);
	}
	// A mistake that a call has made ends with its list.
	ibv_wr_start(ex);
	ibv_wr_bind_mw(ex, NULL, 0, NULL);
	REFUSED(EINVAL, ibv_wr_complete(ex));
	REFUSED(EINVAL, ibv_wr_complete(ex));
	CHECK(writes_to(mr->rkey) == IBV_WC_SUCCESS);
}

// Each call that only asks, and each that is not supported.
static void questions(void)
{
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	struct ibv_gid_entry entry;
	union ibv_gid gid;
	__be16 pkey;
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_grh grh = { 0 };
	struct ibv_ah_attr ah;
	uint32_t number;
	REFUSED(EINVAL, ibv_query_device(context, NULL));
	REFUSED(EINVAL, ibv_query_port(context, 2, &port));
	MINUS(EINVAL, ibv_query_gid(context, 1, -1, &gid));
	MINUS(EINVAL, ibv_query_pkey(context, 1, 1, &pkey));
	MINUS(EINVAL, ibv_get_pkey_index(context, 1, 0x1234));
	REFUSED(EINVAL, ibv_query_gid_ex(context, 1, 9999, &entry, 0));
	REFUSED(EOPNOTSUPP, ibv_query_gid_ex(context, 1, 0, &entry, 1));
	errno = 0;
	CHECK(ibv_query_gid_table(context, &entry, 0, 0) == -EINVAL && errno == EINVAL);
	MINUS(EINVAL, ibv_init_ah_from_wc(context, 2, &wc, &grh, &ah));
	REFUSED(EOPNOTSUPP, ibv_get_srq_num(srq, &number));
	REFUSED(EINVAL, ibv_query_srq(srq, NULL));
	REFUSED(EINVAL, ibv_query_qp(from, NULL, 0, NULL));
	struct ibv_qp_init_attr plain = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					  .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp *without;
	MADE(without, ibv_create_qp(pd, &plain));
	NONE(EOPNOTSUPP, ibv_qp_to_qp_ex(without));
	DONE(ibv_destroy_qp(without));
	CHECK((errno = 0, ibv_poll_cq(cq, -1, &wc)) == -EINVAL && errno == EINVAL);
	NONE(EINVAL, ibv_create_cq(context, 0, NULL, NULL, 0));
	NONE(EINVAL, ibv_create_cq(other, 1, NULL, channel, 0));
	// A queue that is refused does not use its channel, nor an object its domain.
	struct ibv_comp_channel *unused;
	struct ibv_pd *empty;
	MADE(unused, ibv_create_comp_channel(context));
	MADE(empty, ibv_alloc_pd(context));
	NONE(EINVAL, ibv_create_cq(context, 0, NULL, unused, 0));
	NONE(EINVAL, ibv_create_cq(context, 1 << 30, NULL, unused, 0));
	NONE(EINVAL, ibv_create_cq(context, 1, NULL, unused, 1));
	NONE(EINVAL, ibv_create_srq(empty, &(struct ibv_srq_init_attr){ 0 }));
	NONE(EINVAL, ibv_reg_mr(empty, memory, 64, IBV_ACCESS_REMOTE_WRITE));
	NONE(EINVAL, ibv_alloc_mw(empty, 3));
	NONE(EINVAL, ibv_create_ah(empty, &(struct ibv_ah_attr){ 0 }));
	NONE(EINVAL, ibv_create_qp(empty, &(struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC }));
	struct ibv_qp_init_attr many = { .send_cq = cq, .recv_cq = cq, .srq = srq,
					 .qp_type = IBV_QPT_RC, .cap = { 1, 5, 1, 2, 1 << 30 } };
	NONE(EINVAL, ibv_create_qp(pd, &many));
	CHECK(many.cap.max_recv_wr == 5 && many.cap.max_recv_sge == 2);
	DONE(ibv_destroy_comp_channel(unused));
	DONE(ibv_dealloc_pd(empty));
	DONE(ibv_query_device(context, &attr));
	DONE(ibv_query_port(context, 1, &port));
	DONE(ibv_query_pkey(context, 1, 0, &pkey));
	DONE(ibv_get_pkey_index(context, 1, 0xffff));
	DONE(ibv_query_gid_ex(context, 1, 0, &entry, 0));
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
}

// The way back to the sender of a datagram of IPv6; `calls.py` has those of IPv4. One to a group is
// answered from an own address of its family.
static void ways_back(void)
{
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_grh grh = { .version_tclass_flow = htobe32(6u << 28 | 0x68 << 20 | 0x12345),
			       .hop_limit = 9,
			       .sgid = { .raw = { 0xfd, [15] = 7 } } };
	struct ibv_ah_attr way;
	union ibv_gid six;
	int at = 0;
	do
		DONE(ibv_query_gid(context, 1, ++at, &six));
	while (six.raw[0] == 0);
	for (int group = 0; group < 2; group++) {
		grh.dgid = six;
		if (group)
			grh.dgid = (union ibv_gid){ .raw = { 0xff, 0x15, [15] = 1 } };
		DONE(ibv_init_ah_from_wc(context, 1, &wc, &grh, &way));
		CHECK(way.is_global && way.grh.sgid_index == at);
		CHECK(way.grh.traffic_class == 0x68 && way.grh.flow_label == 0x12345);
		CHECK(way.grh.hop_limit == 9);
		CHECK(!memcmp(&way.grh.dgid, &grh.sgid, sizeof grh.sgid));
	}
}

// An object of another context is refused; whatever was named can be given back afterwards.
static void of_two_contexts(void)
{
	struct ibv_td *td[2];
	struct ibv_pd *empty, *foreign;
	struct ibv_comp_channel *unused;
	struct ibv_cq *queue;
	struct ibv_srq *shared;
	MADE(td[0], ibv_alloc_td(context, &none));
	MADE(td[1], ibv_alloc_td(other, &none));
	MADE(empty, ibv_alloc_pd(context));
	MADE(foreign, ibv_alloc_pd(other));
	MADE(unused, ibv_create_comp_channel(other));
	MADE(queue, ibv_create_cq(other, 4, NULL, NULL, 0));
	MADE(shared, ibv_create_srq(foreign, &(struct ibv_srq_init_attr){ .attr = { 4, 1, 0 } }));
	for (int which = 0; which < 6; which++) {
		struct ibv_parent_domain_init_attr both = { .pd = which & 1 ? foreign : empty,
							    .td = td[!(which & 1)] };
		NONE(EINVAL, ibv_alloc_parent_domain(context, &both));
		NONE(EINVAL, ibv_create_cq(context, 4, NULL, unused, 0));
		struct ibv_qp_init_attr init = { .send_cq = which % 3 == 0 ? queue : cq,
						 .recv_cq = which % 3 == 1 ? queue : cq,
						 .srq = which % 3 == 2 ? shared : srq,
						 .qp_type = IBV_QPT_RC, .cap = { 1, 0, 1, 0, 0 } };
		NONE(EINVAL, ibv_create_qp(empty, &init));
	}
	DONE(ibv_destroy_srq(shared));
	DONE(ibv_destroy_cq(queue));
	DONE(ibv_destroy_comp_channel(unused));
	DONE(ibv_dealloc_pd(foreign));
	DONE(ibv_dealloc_pd(empty));
	DONE(ibv_dealloc_td(td[1]));
	DONE(ibv_dealloc_td(td[0]));
}

// A queue with too much in it keeps its depth. One that overflowed says so again and again.
static void a_queue_with_too_much(void)
{
	struct ibv_poll_cq_attr plain = { 0 };
	for (int deep = 8, is; deep > 0; deep -= 7) {
		struct ibv_cq_init_attr_ex attr = { .cqe = deep, .flags =
			IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS };
		struct ibv_cq_ex *ex;
		struct ibv_qp *qp;
		NONE(EOPNOTSUPP, ibv_create_cq_ex(context, &attr));
		attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
		MADE(ex, ibv_create_cq_ex(context, &attr));
		struct ibv_cq *narrow = ibv_cq_ex_to_cq(ex);
		struct ibv_qp_init_attr with = { .send_cq = narrow, .recv_cq = narrow,
						 .qp_type = IBV_QPT_RC, .cap = { 1, 4, 1, 1, 0 } };
		struct ibv_qp_attr to_init = { .qp_state = IBV_QPS_INIT, .port_num = 1 },
				   broken = { .qp_state = IBV_QPS_ERR };
		struct ibv_recv_wr recv = { 0 }, *bad;
		MADE(qp, ibv_create_qp(pd, &with));
		DONE(ibv_modify_qp(qp, &to_init, INIT));
		for (int count = 0; count < 4; count++)
			CHECK(!ibv_post_recv(qp, &recv, &bad));
		DONE(ibv_modify_qp(qp, &broken, IBV_QP_STATE));
		do
			if ((is = ibv_start_poll(ex, &plain)) == 0)
				ibv_end_poll(ex);
		while (is == ENOENT || (is == 0 && deep == 1));
		if (deep == 8) {
			REFUSED(EINVAL, ibv_resize_cq(narrow, 2));
			CHECK(narrow->cqe == 8);
			DONE(ibv_resize_cq(narrow, 3));
			CHECK(narrow->cqe == 3);
		} else {
			CHECK(is == EBUSY);
			REFUSED(EBUSY, ibv_start_poll(ex, &plain));
		}
		DONE(ibv_destroy_qp(qp));
		DONE(ibv_destroy_cq(narrow));
	}
}

int main(void)
{
	begin();
	what_is_used_stays_and_works();
	a_queue_pair_in_a_group_stays();
	regions_and_windows();
	lists_are_posted_as_far_as_they_go();
	a_built_list_is_posted_or_not();
	questions();
	ways_back();
	of_two_contexts();
	a_queue_with_too_much();
	CHECK(writes_to(mr->rkey) == IBV_WC_SUCCESS);
	printf("all as expected\n");
	return 0;
}
