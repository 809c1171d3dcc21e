// Threads that sleep in a call of the library are cancelled (pthreads(7)), as those of rdma-core,
// which sleep in read(2) and write(2). Their objects go on, and so does the device: with
// `ask ADDRESS` it asks a listener at another address.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "check.h"

enum { PORT = 7471, QUEUES = 2, SLEEPERS = 2 * QUEUES + 2 };

static struct ibv_context *device;
static struct ibv_comp_channel *channels[QUEUES];
static struct ibv_cq *cqs[QUEUES];
// The first has ids, the second has none.
static struct rdma_event_channel *ways[2];
static int cleaned;

static struct sockaddr *at(const char *ip, int port)
{
	static struct sockaddr_in all[2];
	static int next;
	struct sockaddr_in *one = &all[next++ % 2];
	*one = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port) };
	inet_pton(AF_INET, ip, &one->sin_addr);
	return (struct sockaddr *)one;
}

static void next_is(enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event;
	CHECK(!rdma_get_cm_event(ways[0], &event));
	if (event->event != kind)
		printf("%s\n", rdma_event_str(event->event));
	CHECK(event->event == kind && !rdma_ack_cm_event(event));
}

static void clean(void *none)
{
	(void)none;
	__atomic_add_fetch(&cleaned, 1, __ATOMIC_SEQ_CST);
}

// Sleeps in a call; its argument is a number below SLEEPERS.
static void *sleeps(void *argument)
{
	struct ibv_async_event async;
	struct rdma_cm_event *event;
	struct ibv_cq *cq;
	void *context;
	size_t which = (size_t)argument;
	pthread_cleanup_push(clean, NULL);
	if (which < 2 * QUEUES)
		ibv_get_cq_event(channels[which % QUEUES], &cq, &context);
	else if (which == 2 * QUEUES)
		ibv_get_async_event(device, &async);
	else
		rdma_get_cm_event(ways[1], &event);
	pthread_cleanup_pop(0);
	return NULL;
}

// The call is not made where the thread was cancelled before.
static void *cancels_itself(void *argument)
{
	pthread_cancel(pthread_self());
	return sleeps(argument);
}

static void is_cancelled(pthread_t thread)
{
	struct timespec until;
	void *result;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 30;
	CHECK(!pthread_timedjoin_np(thread, &result, &until) && result == PTHREAD_CANCELED);
}

static struct ibv_qp *pair(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CHECK(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						      IBV_QP_ACCESS_FLAGS));
	return qp;
}

static void serve(const char *address)
{
	pthread_t threads[SLEEPERS];
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
	void *context;

	CHECK(!rdma_create_id(ways[0], &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(id, at(address, PORT)) && !rdma_listen(id, 1));
	device = id->verbs;
	struct ibv_pd *pd = ibv_alloc_pd(device);
	for (int i = 0; i < QUEUES; i++) {
		channels[i] = ibv_create_comp_channel(device);
		cqs[i] = ibv_create_cq(device, 4, &cqs[i], channels[i], 0);
		CHECK(cqs[i] && !ibv_req_notify_cq(cqs[i], 0));
	}
	for (size_t i = 0; i < SLEEPERS; i++)
		CHECK(!pthread_create(&threads[i], NULL, sleeps, (void *)i));
	usleep(200000);
	for (int i = 0; i < SLEEPERS; i++)
		CHECK(!pthread_cancel(threads[i]));
	for (int i = 0; i < SLEEPERS; i++)
		is_cancelled(threads[i]);
	CHECK(cleaned == SLEEPERS);

	// No thread is in a call of the library: its own see what comes.
	struct pollfd readable = { .fd = ways[0]->fd, .events = POLLIN };
	fputs("listens\n", stderr);
	CHECK(poll(&readable, 1, 30000) == 1);
	next_is(RDMA_CM_EVENT_CONNECT_REQUEST);

	// Flushed receives are completions. A call that a cancelled thread begins takes none of them.
	for (int i = 0; i < QUEUES; i++) {
		struct ibv_recv_wr receive = { .wr_id = 1 }, *bad;
		struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
		struct ibv_qp *qp = pair(pd, cqs[i]);
		CHECK(!ibv_post_recv(qp, &receive, &bad));
		CHECK(!ibv_modify_qp(qp, &error, IBV_QP_STATE));
		CHECK(!pthread_create(&threads[i], NULL, cancels_itself, (void *)(size_t)i));
		is_cancelled(threads[i]);
		CHECK(!ibv_get_cq_event(channels[i], &cq, &context));
		CHECK(cq == cqs[i] && context == &cqs[i]);
		ibv_ack_cq_events(cq, 1);
	}
	puts("all as expected");
}

static void ask(const char *address)
{
	struct rdma_conn_param parameters = { .qp_num = 77, .retry_count = 7 };
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(ways[0], &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, at(address, PORT), 10000));
	next_is(RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 10000));
	next_is(RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_connect(id, &parameters));
	// The program that has taken the request ends.
	next_is(RDMA_CM_EVENT_REJECTED);
}

int main(int count, char **words)
{
	for (int i = 0; i < 2; i++)
		CHECK(ways[i] = rdma_create_event_channel());
	if (count == 3)
		ask(words[2]);
	else
		serve(words[1]);
	return 0;
}
