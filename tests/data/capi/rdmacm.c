// What librdmacm tells programs of connections, ids and ports over Rocinante's rdma_cm: both sides
// in one process, at the address that is its argument. It prints a line for each test, and ends with
// 1 at the first answer that is not as the kernel gives it.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static const char *address;

static struct sockaddr *at(const char *ip, int port)
{
	static struct sockaddr_in all[8];
	static int next;
	struct sockaddr_in *one = &all[next++ % 8];
	memset(one, 0, sizeof *one);
	one->sin_family = AF_INET;
	one->sin_port = htons(port);
	inet_pton(AF_INET, ip, &one->sin_addr);
	return (struct sockaddr *)one;
}

static struct rdma_event_channel *channel(void)
{
	struct rdma_event_channel *it = rdma_create_event_channel();
	CHECK(it);
	return it;
}

static struct rdma_cm_id *id(struct rdma_event_channel *on, enum rdma_port_space space)
{
	struct rdma_cm_id *it;
	CHECK(!rdma_create_id(on, &it, (void *)0x77, space));
	return it;
}

// The next event, which is of this kind.
static struct rdma_cm_event *event(struct rdma_event_channel *on, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *it;
	CHECK(!rdma_get_cm_event(on, &it));
	if (it->event != kind) {
		printf("%s, status %d in place of %s\n", rdma_event_str(it->event), it->status,
		       rdma_event_str(kind));
		exit(1);
	}
	return it;
}

static int status_of(struct rdma_event_channel *on, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *it = event(on, kind);
	int status = it->status;
	CHECK(!rdma_ack_cm_event(it));
	return status;
}

static int is_readable(struct rdma_event_channel *on, int milliseconds)
{
	struct pollfd one = { .fd = on->fd, .events = POLLIN };
	return poll(&one, 1, milliseconds) == 1;
}

static struct rdma_cm_id *listener(struct rdma_event_channel *on, enum rdma_port_space space,
				   int port, int backlog)
{
	struct rdma_cm_id *it = id(on, space);
	CHECK(!rdma_bind_addr(it, at(address, port)));
	CHECK(!rdma_listen(it, backlog));
	return it;
}

static int try_queue_pair(struct rdma_cm_id *of)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = of->qp_type,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	return rdma_create_qp(of, NULL, &attr) ? errno : 0;
}

static void queue_pair(struct rdma_cm_id *of)
{
	CHECK(!try_queue_pair(of));
}

// The id of the next request, which is acknowledged.
static struct rdma_cm_id *request(struct rdma_event_channel *on)
{
	struct rdma_cm_event *asked = event(on, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	return child;
}

static void serve(struct rdma_cm_id *child)
{
	queue_pair(child);
	struct rdma_conn_param answer = { .rnr_retry_count = 7 };
	CHECK(!rdma_accept(child, &answer));
}

// An id that has found the way to the port.
static struct rdma_cm_id *routed_alone(struct rdma_event_channel *on, enum rdma_port_space space,
				       int port)
{
	struct rdma_cm_id *it = id(on, space);
	CHECK(!rdma_resolve_addr(it, NULL, at(address, port), 1000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	CHECK(it->verbs && it->port_num == 1);
	CHECK(!rdma_resolve_route(it, 1000));
	CHECK(status_of(on, RDMA_CM_EVENT_ROUTE_RESOLVED) == 0);
	return it;
}

// As well, with a queue pair.
static struct rdma_cm_id *routed(struct rdma_event_channel *on, enum rdma_port_space space, int port)
{
	struct rdma_cm_id *it = routed_alone(on, space, port);
	queue_pair(it);
	return it;
}

static void ask(struct rdma_cm_id *of, const char *private)
{
	struct rdma_conn_param param = {
		.private_data = private,
		.private_data_len = strlen(private),
		.responder_resources = 3,
		.initiator_depth = 2,
		.retry_count = 5,
		.rnr_retry_count = 6,
	};
	CHECK(!rdma_connect(of, &param));
}

static enum ibv_qp_state state(struct rdma_cm_id *of)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(of->qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

static void gone(struct rdma_cm_id *it)
{
	if (it->qp)
		rdma_destroy_qp(it);
	CHECK(!rdma_destroy_id(it));
}

struct both {
	struct rdma_event_channel *here, *there;
	struct rdma_cm_id *listener, *client, *server;
};

static struct both connected_in(enum rdma_port_space space, int port)
{
	struct both it = { .here = channel(), .there = channel() };
	it.listener = listener(it.there, space, port, 4);
	it.client = routed(it.here, space, port);
	ask(it.client, "hello");
	struct rdma_cm_event *asked = event(it.there, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(asked->listen_id == it.listener && asked->id->context == (void *)0x77);
	struct rdma_conn_param *param = &asked->param.conn;
	CHECK(param->private_data_len == 56 && !memcmp(param->private_data, "hello", 6));
	// What one may begin the other serves.
	CHECK(param->responder_resources == 2 && param->initiator_depth == 3);
	CHECK(param->retry_count == 5 && param->rnr_retry_count == 6);
	CHECK(param->qp_num == it.client->qp->qp_num);
	it.server = asked->id;
	CHECK(ntohs(rdma_get_src_port(it.server)) == port);
	CHECK(rdma_get_dst_port(it.server) == rdma_get_src_port(it.client));
	CHECK(!rdma_ack_cm_event(asked));
	queue_pair(it.server);
	struct rdma_conn_param answer = { .private_data = "welcome", .private_data_len = 7,
					  .responder_resources = 1, .initiator_depth = 1,
					  .rnr_retry_count = 7 };
	CHECK(!rdma_accept(it.server, &answer));
	struct rdma_cm_event *ours = event(it.here, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(ours->id == it.client && ours->param.conn.private_data_len == 196);
	CHECK(!memcmp(ours->param.conn.private_data, "welcome", 8));
	CHECK(ours->param.conn.qp_num == it.server->qp->qp_num);
	CHECK(!rdma_ack_cm_event(ours));
	CHECK(status_of(it.there, RDMA_CM_EVENT_ESTABLISHED) == 0);
	CHECK(state(it.client) == IBV_QPS_RTS && state(it.server) == IBV_QPS_RTS);
	return it;
}

static struct both connected(int port)
{
	return connected_in(RDMA_PS_TCP, port);
}

static void over(struct both it)
{
	gone(it.client);
	gone(it.server);
	CHECK(!rdma_destroy_id(it.listener));
	rdma_destroy_event_channel(it.here);
	rdma_destroy_event_channel(it.there);
}

static void a_connection_ends_on_both_sides(void)
{
	struct both it = connected(5001);
	CHECK(!rdma_disconnect(it.client));
	CHECK(state(it.client) == IBV_QPS_ERR);
	CHECK(status_of(it.there, RDMA_CM_EVENT_DISCONNECTED) == 0);
	CHECK(status_of(it.here, RDMA_CM_EVENT_DISCONNECTED) == 0);
	// The end of the connection is nothing to the other queue pair.
	CHECK(state(it.server) == IBV_QPS_RTS);
	CHECK(!rdma_disconnect(it.server) && state(it.server) == IBV_QPS_ERR);
	CHECK(!rdma_disconnect(it.server) && !rdma_disconnect(it.client));
	CHECK(status_of(it.there, RDMA_CM_EVENT_TIMEWAIT_EXIT) == 0);
	CHECK(status_of(it.here, RDMA_CM_EVENT_TIMEWAIT_EXIT) == 0);
	CHECK(!is_readable(it.here, 0) && !is_readable(it.there, 0));
	over(it);
}

static void ports_are_given_once(void)
{
	struct rdma_event_channel *on = channel();
	struct rdma_cm_id *first = id(on, RDMA_PS_TCP), *second = id(on, RDMA_PS_TCP);
	struct rdma_cm_id *datagrams = id(on, RDMA_PS_UDP), *any = id(on, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(first, at(address, 5002)));
	CHECK(first->verbs);
	CHECK(rdma_bind_addr(second, at(address, 5002)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(second, at("0.0.0.0", 5002)) == -1 && errno == EADDRNOTAVAIL);
	CHECK(rdma_bind_addr(second, at("10.254.254.254", 1)) == -1 && errno == EADDRNOTAVAIL);
	CHECK(!rdma_bind_addr(datagrams, at(address, 5002)));
	CHECK(!rdma_bind_addr(any, at("0.0.0.0", 0)) && !any->verbs);
	CHECK(!rdma_bind_addr(second, at(address, 0)));
	CHECK(rdma_get_src_port(any) && rdma_get_src_port(second) != rdma_get_src_port(any));
	CHECK(rdma_bind_addr(second, at(address, 0)) == -1 && errno == EINVAL);
	// Two that reuse an address may both have it, and one may listen.
	struct rdma_cm_id *reusing[2];
	int yes = 1;
	for (int which = 0; which < 2; which++) {
		reusing[which] = id(on, RDMA_PS_TCP);
		CHECK(!rdma_set_option(reusing[which], RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR,
				       &yes, sizeof yes));
		CHECK(!rdma_bind_addr(reusing[which], at(address, 5003)));
	}
	CHECK(rdma_listen(reusing[0], 1) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_destroy_id(reusing[1]));
	CHECK(!rdma_listen(reusing[0], 1));
	CHECK(rdma_listen(reusing[0], 1) == -1 && errno == EINVAL);
	// It does not share its port any more, and may not again.
	reusing[1] = id(on, RDMA_PS_TCP);
	CHECK(!rdma_set_option(reusing[1], RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes,
			       sizeof yes));
	CHECK(rdma_bind_addr(reusing[1], at(address, 5003)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_set_option(reusing[0], RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes,
			      sizeof yes) == -1 && errno == EINVAL);
	// An id that is bound already may begin to, and not cease.
	int no = 0;
	CHECK(!rdma_set_option(first, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
	CHECK(rdma_set_option(first, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &no, sizeof no)
	      == -1 && errno == EINVAL);
	CHECK(!rdma_bind_addr(reusing[1], at(address, 5002)));
	CHECK(!rdma_destroy_id(reusing[1]));
	struct rdma_cm_id *all[] = { first, second, datagrams, any, reusing[0] };
	for (int which = 0; which < 5; which++)
		CHECK(!rdma_destroy_id(all[which]));
	// Where the way to a peer begins an id has its port, and nowhere else.
	first = id(on, RDMA_PS_TCP);
	CHECK(!rdma_resolve_addr(first, NULL, at(address, 1), 1000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	int its = ntohs(rdma_get_src_port(first));
	second = id(on, RDMA_PS_TCP);
	CHECK(rdma_bind_addr(second, at(address, its)) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_bind_addr(second, at("127.0.0.1", its)));
	CHECK(!rdma_destroy_id(first) && !rdma_destroy_id(second));
	// The port is free again.
	first = id(on, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(first, at(address, 5002)));
	CHECK(!rdma_destroy_id(first));
	// An ordinary user has no port below 1024.
	first = id(on, RDMA_PS_TCP);
	CHECK(rdma_bind_addr(first, at(address, 1023)) == -1 && errno == EACCES);
	CHECK(!rdma_bind_addr(first, at(address, 1024)));
	CHECK(!rdma_destroy_id(first));
	rdma_destroy_event_channel(on);
}

static void who_is_not_there_or_refuses(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *client = routed(here, RDMA_PS_TCP, 5004);
	ask(client, "");
	// Nobody listens.
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 8);
	CHECK(state(client) == IBV_QPS_ERR);
	gone(client);
	struct rdma_cm_id *server = listener(there, RDMA_PS_TCP, 5004, 4);
	client = routed(here, RDMA_PS_TCP, 5004);
	ask(client, "please");
	struct rdma_cm_event *asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(!rdma_reject(asked->id, "no", 2));
	struct rdma_cm_event *refused = event(here, RDMA_CM_EVENT_REJECTED);
	CHECK(refused->status == 28 && refused->param.conn.private_data_len == 148);
	CHECK(!memcmp(refused->param.conn.private_data, "no", 3));
	CHECK(!rdma_ack_cm_event(refused));
	struct rdma_cm_id *child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	// It is decided.
	CHECK(rdma_reject(child, "no", 2) == -1 && errno == EINVAL);
	queue_pair(child);
	struct rdma_conn_param late = { .rnr_retry_count = 7 };
	CHECK(rdma_accept(child, &late) == -1 && errno == EINVAL);
	gone(child);
	gone(client);
	// An answer that cannot be sent is a refusal.
	client = routed(here, RDMA_PS_TCP, 5004);
	ask(client, "please");
	asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	queue_pair(child);
	char long_private[200] = "";
	struct rdma_conn_param answer = { .private_data = long_private, .private_data_len = 200 };
	CHECK(rdma_accept(child, &answer) == -1 && errno == EINVAL);
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
	gone(child);
	gone(client);
	// The listener goes with a request that nobody has read.
	client = routed(here, RDMA_PS_TCP, 5004);
	ask(client, "please");
	CHECK(is_readable(there, 5000));
	CHECK(!rdma_destroy_id(server) && !is_readable(there, 0));
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
	gone(client);
	// There is no way.
	client = id(here, RDMA_PS_TCP);
	CHECK(rdma_resolve_addr(client, NULL, at("203.0.113.1", 1), 1000) == -1);
	CHECK(errno == ENETUNREACH && !is_readable(here, 0));
	CHECK(!rdma_destroy_id(client));
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

static void a_backlog_is_of_unread_requests(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *server = listener(there, RDMA_PS_TCP, 5005, 1);
	struct rdma_cm_id *first = routed(here, RDMA_PS_TCP, 5005);
	struct rdma_cm_id *second = routed(here, RDMA_PS_TCP, 5005);
	ask(first, "1");
	CHECK(is_readable(there, 5000));
	ask(second, "2");
	struct rdma_cm_event *refused = event(here, RDMA_CM_EVENT_REJECTED);
	CHECK(refused->id == second);
	CHECK(!rdma_ack_cm_event(refused));
	struct rdma_cm_event *asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	gone(second);
	// Read is not answered, and there is room again.
	second = routed(here, RDMA_PS_TCP, 5005);
	ask(second, "2");
	asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(!memcmp(asked->param.conn.private_data, "2", 2));
	struct rdma_cm_id *other = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	gone(child);
	gone(other);
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
	gone(first);
	gone(second);
	gone(server);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

// Two of one channel.
static void each_listener_has_a_backlog(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *servers[2], *clients[2];
	for (int which = 0; which < 2; which++) {
		servers[which] = listener(there, RDMA_PS_TCP, 5042 + which, 1);
		clients[which] = routed(here, RDMA_PS_TCP, 5042 + which);
		ask(clients[which], "");
	}
	// A refusal would come after half a second.
	CHECK(!is_readable(here, 1500));
	for (int which = 0; which < 2; which++) {
		struct rdma_cm_event *asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
		struct rdma_cm_id *child = asked->id;
		CHECK(asked->listen_id == servers[which] && !rdma_ack_cm_event(asked));
		gone(child);
		CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
		gone(clients[which]);
	}
	gone(servers[0]);
	gone(servers[1]);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

static void nothing(int signal)
{
	(void)signal;
}

static void waiting_ends_as_a_read_does(void)
{
	struct rdma_event_channel *on = channel();
	struct rdma_cm_event *none;
	CHECK(fcntl(on->fd, F_SETFL, fcntl(on->fd, F_GETFL) | O_NONBLOCK) == 0);
	CHECK(rdma_get_cm_event(on, &none) == -1 && errno == EAGAIN);
	CHECK(fcntl(on->fd, F_SETFL, fcntl(on->fd, F_GETFL) & ~O_NONBLOCK) == 0);
	struct sigaction action = { .sa_handler = nothing };
	struct itimerval timer = { .it_value = { .tv_usec = 50000 } };
	CHECK(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &timer, NULL));
	CHECK(rdma_get_cm_event(on, &none) == -1 && errno == EINTR);
	CHECK(!is_readable(on, 0));
	rdma_destroy_event_channel(on);
}

static void events_move_with_their_id(void)
{
	struct rdma_event_channel *from = channel(), *to = channel();
	struct rdma_cm_id *mover = id(from, RDMA_PS_TCP), *stayer = id(from, RDMA_PS_TCP);
	CHECK(!rdma_resolve_addr(mover, NULL, at(address, 1), 1000));
	CHECK(!rdma_resolve_addr(stayer, NULL, at(address, 2), 1000));
	CHECK(!rdma_migrate_id(mover, to));
	CHECK(is_readable(from, 0) && is_readable(to, 0));
	struct rdma_cm_event *moved = event(to, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(moved->id == mover && !rdma_ack_cm_event(moved) && !is_readable(to, 0));
	struct rdma_cm_event *stayed = event(from, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(stayed->id == stayer && !rdma_ack_cm_event(stayed) && !is_readable(from, 0));
	gone(mover);
	gone(stayer);
	// The request to a listener moves along, and is decided on there.
	struct rdma_event_channel *here = channel();
	struct rdma_cm_id *server = listener(from, RDMA_PS_TCP, 5041, 1);
	struct rdma_cm_id *client = routed(here, RDMA_PS_TCP, 5041);
	ask(client, "");
	CHECK(is_readable(from, 5000));
	CHECK(!rdma_migrate_id(server, to) && !is_readable(from, 0) && is_readable(to, 0));
	struct rdma_cm_event *asked = event(to, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = asked->id;
	CHECK(asked->listen_id == server && !rdma_reject(child, NULL, 0));
	CHECK(!rdma_ack_cm_event(asked));
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
	gone(child);
	gone(client);
	gone(server);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(from);
	rdma_destroy_event_channel(to);
}

// librspreload before 63 loses the events of a socket that has a higher number than its channel.
static void channels_have_high_numbers(void)
{
	int low = open("/dev/null", O_RDONLY), top = 0;
	CHECK(low >= 0 && low < 100);
	struct rdma_event_channel *high = channel(), *other = channel();
	CHECK(high->fd > low + 300 && other->fd > low + 300 && high->fd != other->fd);
	CHECK(high->fd < FD_SETSIZE && other->fd < FD_SETSIZE);
	// Numbers that select(2) takes run out: low ones do as well.
	struct rlimit limit, more;
	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	more = (struct rlimit){ .rlim_cur = limit.rlim_max, .rlim_max = limit.rlim_max };
	if (more.rlim_cur > 2 * FD_SETSIZE)
		more.rlim_cur = 2 * FD_SETSIZE;
	CHECK(!setrlimit(RLIMIT_NOFILE, &more));
	int taken[FD_SETSIZE], many = 0;
	while (top >= 0 && top < FD_SETSIZE - 1)
		if ((top = fcntl(low, F_DUPFD, 512)) >= 0)
			taken[many++] = top;
	CHECK(many > 100);
	struct rdma_event_channel *late = channel();
	CHECK(late->fd > low && late->fd < 512);
	struct rdma_cm_id *it = id(late, RDMA_PS_TCP);
	CHECK(!rdma_resolve_addr(it, NULL, at(address, 1), 1000));
	CHECK(status_of(late, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	gone(it);
	rdma_destroy_event_channel(late);
	while (many)
		close(taken[--many]);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	rdma_destroy_event_channel(high);
	rdma_destroy_event_channel(other);
	close(low);
}

static void a_closed_channel_ends_its_connections(void)
{
	struct both it = connected(5006), other = connected(5007);
	close(it.here->fd);
	// Not librdmacm's own call: nobody notices. Its call is.
	rdma_destroy_event_channel(it.here);
	CHECK(!is_readable(other.there, 200));
	rdma_destroy_event_channel(other.here);
	CHECK(status_of(other.there, RDMA_CM_EVENT_DISCONNECTED) == 0);
	gone(other.server);
	gone(other.listener);
	rdma_destroy_event_channel(other.there);
}

static void a_datagram_service_is_found(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *server = listener(there, RDMA_PS_UDP, 5008, 4);
	struct rdma_cm_id *client = routed(here, RDMA_PS_UDP, 5008);
	ask(client, "where");
	struct rdma_cm_event *asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(asked->param.ud.private_data_len == 180);
	CHECK(!memcmp(asked->param.ud.private_data, "where", 6));
	struct rdma_cm_id *child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	queue_pair(child);
	struct rdma_conn_param answer = { .private_data = "here", .private_data_len = 4,
					  .qp_num = child->qp->qp_num };
	CHECK(!rdma_accept(child, &answer));
	struct rdma_cm_event *found = event(here, RDMA_CM_EVENT_ESTABLISHED);
	struct rdma_ud_param *param = &found->param.ud;
	CHECK(param->qp_num == child->qp->qp_num && param->qkey == RDMA_UDP_QKEY);
	CHECK(param->private_data_len == 136 && !memcmp(param->private_data, "here", 5));
	CHECK(param->ah_attr.is_global && param->ah_attr.port_num == 1);
	struct ibv_ah *ah = ibv_create_ah(client->pd, &param->ah_attr);
	CHECK(ah && !ibv_destroy_ah(ah));
	CHECK(!rdma_ack_cm_event(found));
	gone(client);
	// A refusal says why.
	client = routed(here, RDMA_PS_UDP, 5008);
	ask(client, "where");
	asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *refused = asked->id;
	CHECK(!rdma_ack_cm_event(asked) && !rdma_reject(refused, "no", 2));
	found = event(here, RDMA_CM_EVENT_UNREACHABLE);
	param = &found->param.ud;
	// IB_SIDR_REJECT.
	CHECK(found->status == 2 && param->private_data_len == 136);
	CHECK(!memcmp(param->private_data, "no", 3) && !rdma_ack_cm_event(found));
	gone(client);
	gone(refused);
	// Nobody is at another port.
	client = routed(here, RDMA_PS_UDP, 5009);
	ask(client, "");
	CHECK(status_of(here, RDMA_CM_EVENT_UNREACHABLE) != 0);
	gone(client);
	gone(child);
	gone(server);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

// RDMA_PS_IB has connections and ports of its own.
static void the_space_of_infiniband_is_one_more(void)
{
	struct rdma_event_channel *on = channel();
	struct rdma_cm_id *stream = listener(on, RDMA_PS_TCP, 5014, 4);
	struct both it = connected_in(RDMA_PS_IB, 5014);
	CHECK(it.client->ps == RDMA_PS_IB && it.client->qp_type == IBV_QPT_RC);
	CHECK(it.server->ps == RDMA_PS_IB && it.server->qp_type == IBV_QPT_RC);
	struct rdma_cm_id *second = id(on, RDMA_PS_IB);
	CHECK(rdma_bind_addr(second, at(address, 5014)) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_disconnect(it.client));
	CHECK(status_of(it.there, RDMA_CM_EVENT_DISCONNECTED) == 0);
	CHECK(status_of(it.here, RDMA_CM_EVENT_DISCONNECTED) == 0);
	CHECK(status_of(it.here, RDMA_CM_EVENT_TIMEWAIT_EXIT) == 0);
	over(it);
	CHECK(!is_readable(on, 0));
	CHECK(!rdma_bind_addr(second, at(address, 5014)));
	gone(second);
	gone(stream);
	rdma_destroy_event_channel(on);
}

// RDMA_PS_IPOIB has the Q_Key of a group that IP over InfiniBand joined. RoCE has none, so there are
// ports, ways and questions, and no queue pair.
static void the_space_of_ipoib_has_no_queue_pairs(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *server = listener(there, RDMA_PS_IPOIB, 5015, 4);
	struct rdma_cm_id *other = listener(there, RDMA_PS_UDP, 5015, 4);
	struct rdma_cm_id *client = routed_alone(here, RDMA_PS_IPOIB, 5015);
	CHECK(client->qp_type == IBV_QPT_UD && try_queue_pair(client) == ENODEV);
	ask(client, "where");
	struct rdma_cm_event *asked = event(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(asked->listen_id == server && !memcmp(asked->param.ud.private_data, "where", 6));
	struct rdma_cm_id *child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	CHECK(child->ps == RDMA_PS_IPOIB && try_queue_pair(child) == ENODEV);
	struct rdma_conn_param answer = { .qp_num = 77 };
	CHECK(rdma_accept(child, &answer) == -1 && errno == ENODEV);
	// IB_SIDR_REJECT.
	CHECK(status_of(here, RDMA_CM_EVENT_UNREACHABLE) == 2);
	gone(client);
	gone(child);
	// A group is joined, without a Q_Key.
	struct rdma_cm_id *member = id(here, RDMA_PS_IPOIB);
	CHECK(!rdma_bind_addr(member, at(address, 0)));
	struct sockaddr *group = at("239.1.2.5", 0);
	CHECK(!rdma_join_multicast(member, group, NULL));
	struct rdma_cm_event *joined = event(here, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(joined->status == 0 && joined->param.ud.qkey == 0);
	CHECK(!rdma_ack_cm_event(joined));
	CHECK(!rdma_leave_multicast(member, group));
	gone(member);
	gone(server);
	gone(other);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

static void options_reach_the_queue_pair(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *server = listener(there, RDMA_PS_TCP, 5011, 4);
	struct rdma_cm_id *client = id(here, RDMA_PS_TCP);
	uint8_t tos = 0x68, timeout = 19;
	CHECK(!rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos));
	CHECK(!rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout,
			       sizeof timeout));
	CHECK(rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, (void *)8, 1) == -1
	      && errno == EFAULT);
	struct rdma_cm_id *datagrams = id(here, RDMA_PS_UDP);
	CHECK(rdma_set_option(datagrams, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout,
			      sizeof timeout) == -1
	      && errno == EINVAL);
	gone(datagrams);
	CHECK(!rdma_resolve_addr(client, NULL, at(address, 5011), 1000));
	CHECK(status_of(here, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	CHECK(!rdma_resolve_route(client, 1000));
	CHECK(status_of(here, RDMA_CM_EVENT_ROUTE_RESOLVED) == 0);
	CHECK(client->route.num_paths == 1 && client->route.path_rec->traffic_class == tos);
	queue_pair(client);
	ask(client, "");
	struct rdma_cm_id *child = request(there);
	CHECK(child->route.num_paths == 1 && child->route.path_rec->traffic_class == tos);
	serve(child);
	CHECK(status_of(here, RDMA_CM_EVENT_ESTABLISHED) == 0);
	// The RTU comes by itself, and to say so beside it harms nothing.
	CHECK(status_of(there, RDMA_CM_EVENT_ESTABLISHED) == 0);
	CHECK(!rdma_notify(child, IBV_EVENT_COMM_EST));
	CHECK(rdma_notify(child, IBV_EVENT_PATH_MIG) == -1 && errno == EINVAL);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(client->qp, &attr, IBV_QP_AV | IBV_QP_TIMEOUT, &init));
	CHECK(attr.timeout == timeout && attr.ah_attr.grh.traffic_class == tos);
	// The kernel's: 655 ms; and the class of the request.
	CHECK(!ibv_query_qp(child->qp, &attr, IBV_QP_AV | IBV_QP_MIN_RNR_TIMER, &init));
	CHECK(attr.min_rnr_timer == 0 && attr.ah_attr.grh.traffic_class == tos);
	gone(client);
	CHECK(status_of(there, RDMA_CM_EVENT_DISCONNECTED) == 0);
	gone(child);
	gone(server);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

static int timeout_of(struct rdma_cm_id *it)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(it->qp, &attr, IBV_QP_TIMEOUT, &init));
	return attr.timeout;
}

// The program's option, or that of a packet's life of 16. Of none at all the peer hears nothing.
static void an_answer_has_the_kernels_time(void)
{
	static const int cases[][3] = { { -1, 17, 17 }, { 12, 12, 12 }, { 0, 0, 17 } };
	for (int which = 0; which < 3; which++) {
		const int *its = cases[which];
		struct rdma_event_channel *here = channel(), *there = channel();
		struct rdma_cm_id *server = listener(there, RDMA_PS_TCP, 5016, 4);
		struct rdma_cm_id *client = id(here, RDMA_PS_TCP);
		uint8_t timeout = its[0];
		CHECK(its[0] < 0 || !rdma_set_option(client, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT,
						     &timeout, sizeof timeout));
		CHECK(!rdma_resolve_addr(client, NULL, at(address, 5016), 1000));
		CHECK(status_of(here, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
		CHECK(!rdma_resolve_route(client, 1000));
		CHECK(status_of(here, RDMA_CM_EVENT_ROUTE_RESOLVED) == 0);
		CHECK(client->route.path_rec->packet_life_time == its[2] - 1);
		queue_pair(client);
		ask(client, "");
		struct rdma_cm_id *child = request(there);
		serve(child);
		CHECK(status_of(here, RDMA_CM_EVENT_ESTABLISHED) == 0);
		CHECK(timeout_of(client) == its[1] && timeout_of(child) == its[2]);
		gone(client);
		gone(child);
		gone(server);
		rdma_destroy_event_channel(here);
		rdma_destroy_event_channel(there);
	}
}

// The six tries that the server has, each as long as the kernel's, outlast a receive that is late.
static void a_late_receive_is_waited_for(void)
{
	struct both it = connected(5013);
	static char bytes[8];
	struct ibv_mr *from = rdma_reg_msgs(it.server, bytes, sizeof bytes);
	struct ibv_mr *to = rdma_reg_msgs(it.client, bytes, sizeof bytes);
	CHECK(from && to);
	CHECK(!rdma_post_send(it.server, NULL, bytes, 4, from, IBV_SEND_SIGNALED));
	usleep(100000);
	CHECK(!rdma_post_recv(it.client, NULL, bytes, 4, to));
	struct ibv_wc wc;
	CHECK(rdma_get_send_comp(it.server, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(!rdma_dereg_mr(from) && !rdma_dereg_mr(to));
	over(it);
}

// Each device takes some bytes inline of a queue pair that asked for none: rdma_xclient sends 16.
static void some_inline_data_is_always_taken(void)
{
	struct both it = connected(5017);
	static char bytes[16];
	struct ibv_mr *to = rdma_reg_msgs(it.client, bytes, sizeof bytes);
	struct ibv_wc wc;
	CHECK(to && !rdma_post_recv(it.client, NULL, bytes, sizeof bytes, to));
	char sent[16] = "fifteen letters";
	CHECK(!rdma_post_send(it.server, NULL, sent, sizeof sent, NULL,
			      IBV_SEND_SIGNALED | IBV_SEND_INLINE));
	CHECK(rdma_get_send_comp(it.server, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(it.client, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(wc.byte_len == sizeof sent && !memcmp(bytes, sent, sizeof sent));
	CHECK(!rdma_dereg_mr(to));
	over(it);
}

static void groups_are_joined_and_left(void)
{
	struct rdma_event_channel *on = channel();
	struct rdma_cm_id *member = id(on, RDMA_PS_UDP);
	CHECK(rdma_join_multicast(member, at("239.1.2.3", 0), NULL) == -1 && errno == EINVAL);
	CHECK(!rdma_bind_addr(member, at(address, 0)));
	queue_pair(member);
	struct sockaddr *groups[2] = { at("239.1.2.3", 0), at("239.1.2.4", 0) };
	for (int which = 0; which < 2; which++) {
		CHECK(!rdma_join_multicast(member, groups[which], groups[which]));
		struct rdma_cm_event *joined = event(on, RDMA_CM_EVENT_MULTICAST_JOIN);
		struct rdma_ud_param *param = &joined->param.ud;
		CHECK(joined->status == 0 && param->private_data == groups[which]);
		CHECK(param->qp_num == 0xffffff && param->qkey == RDMA_UDP_QKEY);
		CHECK(param->ah_attr.grh.dgid.raw[15] == 3 + which);
		CHECK(!rdma_ack_cm_event(joined));
	}
	CHECK(!rdma_leave_multicast(member, groups[0]));
	CHECK(rdma_leave_multicast(member, groups[0]) == -1 && errno == EADDRNOTAVAIL);
	CHECK(!rdma_leave_multicast(member, groups[1]));
	gone(member);
	rdma_destroy_event_channel(on);
}

struct reader {
	struct rdma_event_channel on;
	_Atomic int tid;
	_Atomic int returned;
};

static void *reads(void *arg)
{
	struct reader *it = arg;
	struct rdma_cm_event *none;
	it->tid = gettid();
	rdma_get_cm_event(&it->on, &none);
	it->returned = 1;
	return NULL;
}

static int sleeps(int tid)
{
	char path[64], state = 0;
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
	FILE *stat = fopen(path, "r");
	CHECK(stat && fscanf(stat, "%*d (%*[^)]) %c", &state) == 1);
	fclose(stat);
	return state == 'S';
}

// The descriptor is gone at once, for all threads, though one sleeps in a call: it sleeps on.
static void a_channel_is_closed_beside_a_reader(void)
{
	struct rdma_event_channel *on = channel(), *other = channel();
	static struct reader reader;
	struct rdma_cm_event *none;
	pthread_t thread;
	reader.on = *on;
	CHECK(!pthread_create(&thread, NULL, reads, &reader));
	while (!reader.tid || !sleeps(reader.tid))
		usleep(1000);
	rdma_destroy_event_channel(on);
	CHECK(fcntl(reader.on.fd, F_GETFD) == -1 && errno == EBADF);
	CHECK(rdma_get_cm_event(&reader.on, &none) == -1 && errno == EBADF);
	CHECK(!is_readable(other, 50) && !reader.returned);
	CHECK(!pthread_detach(thread));
	rdma_destroy_event_channel(other);
}

// A child of fork(2) in the middle of a connection gets errors, and channels of its own.
static void a_child_begins_anew(void)
{
	struct rdma_event_channel *here = channel(), *there = channel();
	struct rdma_cm_id *server = listener(there, RDMA_PS_TCP, 5012, 4);
	struct rdma_cm_id *client = routed(here, RDMA_PS_TCP, 5012);
	ask(client, "");
	pid_t child = fork();
	if (!child) {
		struct rdma_cm_event *none;
		CHECK(rdma_get_cm_event(here, &none) == -1 && errno == EINVAL);
		CHECK(rdma_destroy_id(client) == -1 && errno == EINVAL);
		struct rdma_event_channel *own = channel();
		CHECK(!rdma_destroy_id(id(own, RDMA_PS_TCP)));
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	struct rdma_cm_id *other = request(there);
	gone(other);
	CHECK(status_of(here, RDMA_CM_EVENT_REJECTED) == 28);
	gone(client);
	gone(server);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

static struct rdma_cm_id *reusing(struct rdma_event_channel *on, int port)
{
	struct rdma_cm_id *it = id(on, RDMA_PS_TCP);
	int yes = 1;
	CHECK(!rdma_set_option(it, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
	CHECK(!rdma_bind_addr(it, at(address, port)));
	return it;
}

static int port_0(struct rdma_event_channel *on)
{
	struct rdma_cm_id *it = id(on, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(it, at(address, 0)));
	int port = ntohs(rdma_get_src_port(it));
	CHECK(!rdma_destroy_id(it));
	return port;
}

// Has ports, and those after the number that it reads, until it is killed.
static void hold(int in, int out)
{
	struct rdma_event_channel *on = channel();
	struct rdma_cm_id *any = id(on, RDMA_PS_TCP);
	int next;
	CHECK(!rdma_bind_addr(id(on, RDMA_PS_TCP), at(address, 5031)));
	CHECK(!rdma_bind_addr(any, at("0.0.0.0", 5032)));
	reusing(on, 5033);
	reusing(on, 5034);
	CHECK(!rdma_bind_addr(id(on, RDMA_PS_TCP), at("127.0.0.1", 5035)));
	CHECK(read(in, &next, sizeof next) == sizeof next);
	for (int more = 1; more <= 3; more++)
		CHECK(!rdma_bind_addr(id(on, RDMA_PS_TCP), at(address, next + more)));
	CHECK(write(out, &next, sizeof next) == sizeof next);
	// Killed, or alone.
	CHECK(read(in, &next, sizeof next) == 0);
	exit(1);
}

// Ports that another process has bound are in the way, until it ends.
static void neighbours(void)
{
	int to[2], from[2];
	CHECK(!pipe(to) && !pipe(from));
	pid_t child = fork();
	if (!child) {
		close(to[1]);
		hold(to[0], from[1]);
	}
	struct rdma_event_channel *on = channel();
	int next = port_0(on), held;
	CHECK(write(to[1], &next, sizeof next) == sizeof next);
	// It ends at once if the other process does.
	close(from[1]);
	CHECK(read(from[0], &held, sizeof held) == sizeof held && held == next);
	CHECK(port_0(on) == next + 4);
	struct rdma_cm_id *it = id(on, RDMA_PS_TCP), *other = id(on, RDMA_PS_UDP);
	CHECK(rdma_bind_addr(it, at(address, 5031)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(it, at("0.0.0.0", 5031)) == -1 && errno == EADDRNOTAVAIL);
	CHECK(rdma_bind_addr(it, at(address, 5032)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(it, at("127.0.0.1", 5032)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(it, at(address, 5033)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(it, at("127.0.0.1", 5035)) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(it, at(address, next + 2)) == -1 && errno == EADDRINUSE);
	// Another port space, another address, and both reuse it.
	CHECK(!rdma_bind_addr(other, at(address, 5031)));
	CHECK(!rdma_bind_addr(it, at(address, 5035)));
	struct rdma_cm_id *shared = reusing(on, 5033), *second = reusing(on, 5034);
	CHECK(rdma_listen(shared, 1) == -1 && errno == EADDRINUSE);
	CHECK(!rdma_destroy_id(second));
	gone(it);
	CHECK(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
	for (int port = 5031; port <= 5035; port++) {
		if (port == 5033)
			continue;
		it = id(on, RDMA_PS_TCP);
		CHECK(!rdma_bind_addr(it, at("0.0.0.0", port)));
		gone(it);
	}
	CHECK(!rdma_listen(shared, 1));
	gone(shared);
	gone(other);
	rdma_destroy_event_channel(on);
	printf("all as expected\n");
}

// Whatever forbids it that a page becomes writable.
static void forbid_mprotect(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

// librdmacm asks the kernel, which may have no such file. Verbs go on.
static void slotless(void)
{
	forbid_mprotect();
	for (int again = 0; again < 2; again++) {
		struct rdma_event_channel *it = rdma_create_event_channel();
		CHECK(it ? !access("/dev/infiniband/rdma_cm", F_OK) : errno == ENOENT);
		if (it)
			rdma_destroy_event_channel(it);
	}
	int count;
	struct ibv_device **devices = ibv_get_device_list(&count);
	CHECK(devices && count == 2);
	ibv_free_device_list(devices);
	printf("all as expected\n");
}

// Listens, and waits for the end of the connection that comes.
static void watch(void)
{
	struct rdma_event_channel *there = channel();
	struct rdma_cm_id *server = listener(there, RDMA_PS_TCP, 5010, 1);
	fprintf(stderr, "listens\n");
	struct rdma_cm_id *child = request(there);
	serve(child);
	CHECK(status_of(there, RDMA_CM_EVENT_ESTABLISHED) == 0);
	CHECK(is_readable(there, 3000));
	CHECK(status_of(there, RDMA_CM_EVENT_DISCONNECTED) == 0);
	gone(child);
	gone(server);
	rdma_destroy_event_channel(there);
	printf("ended\n");
}

// Connects, and is gone.
static void leave(void)
{
	struct rdma_event_channel *here = channel();
	struct rdma_cm_id *client = routed(here, RDMA_PS_TCP, 5010);
	ask(client, "");
	CHECK(status_of(here, RDMA_CM_EVENT_ESTABLISHED) == 0);
	exit(0);
}

// Asks at port 5023 of an own address, where `any` listens.
static void is_asked(struct rdma_cm_id *any, struct rdma_event_channel *on, const char *address)
{
	struct rdma_cm_id *client = id(on, RDMA_PS_TCP);
	CHECK(!rdma_resolve_addr(client, NULL, at(address, 5023), 1000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	CHECK(!rdma_resolve_route(client, 1000));
	CHECK(status_of(on, RDMA_CM_EVENT_ROUTE_RESOLVED) == 0);
	queue_pair(client);
	ask(client, "");
	struct rdma_cm_event *asked = event(on, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *late = asked->id;
	CHECK(asked->listen_id == any && !rdma_ack_cm_event(asked));
	gone(late);
	CHECK(status_of(on, RDMA_CM_EVENT_REJECTED) == 28);
	gone(client);
}

static int is_up(const char *name)
{
	struct ifreq it = { 0 };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	strcpy(it.ifr_name, name);
	int up = !ioctl(fd, SIOCGIFFLAGS, &it) && it.ifr_flags & IFF_RUNNING;
	close(fd);
	return up;
}

// The device goes: each id on it is told so once, and then is good for its destruction only.
static void lose(void)
{
	struct both first = connected(5021), second = connected(5022);
	struct rdma_event_channel *on = channel();
	struct rdma_cm_id *any = id(on, RDMA_PS_TCP), *idle = id(on, RDMA_PS_TCP);
	struct rdma_cm_id *way = routed(on, RDMA_PS_TCP, 5023);
	CHECK(!rdma_bind_addr(any, at("0.0.0.0", 5023)) && !rdma_listen(any, 1));
	// A request that nobody has read, and one that nobody has answered.
	struct rdma_cm_id *unread = routed(first.here, RDMA_PS_TCP, 5021);
	ask(unread, "");
	CHECK(is_readable(first.there, 5000));
	struct rdma_cm_id *unanswered = routed(second.here, RDMA_PS_TCP, 5022);
	ask(unanswered, "");
	struct rdma_cm_event *asked = event(second.there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = asked->id;
	CHECK(!rdma_ack_cm_event(asked));
	fprintf(stderr, "has all\n");
	CHECK(is_readable(first.here, 10000));
	struct rdma_cm_id *told[] = { first.client, first.server, first.listener, unread,
				      second.client, second.server, second.listener, unanswered };
	struct rdma_event_channel *channels[] = { first.here, first.there, second.here,
						  second.there };
	unsigned seen = 0;
	for (int which = 0; which < 4; which++) {
		// librdmacm passes over a request whose id is good for nothing.
		for (int count = 0; count < 2; count++) {
			struct rdma_cm_event *it = event(channels[which], RDMA_CM_EVENT_DEVICE_REMOVAL);
			CHECK(it->status == 0);
			for (int one = 0; one < 8; one++)
				if (told[one] == it->id)
					seen |= 1 << one;
			CHECK(!rdma_ack_cm_event(it));
		}
		CHECK(!is_readable(channels[which], 300));
	}
	CHECK(seen == 0xff);
	CHECK(rdma_disconnect(first.client) == -1 && errno == ENXIO);
	CHECK(rdma_reject(child, NULL, 0) == -1 && errno == ENXIO);
	CHECK(rdma_listen(second.listener, 1) == -1 && errno == ENXIO);
	// An id that did nothing is on none either.
	CHECK(!rdma_bind_addr(idle, at("127.0.0.1", 5024)) && !rdma_listen(idle, 1));
	// A wildcard is on no device.
	struct rdma_cm_event *last = event(on, RDMA_CM_EVENT_DEVICE_REMOVAL);
	CHECK(last->id == way && !rdma_ack_cm_event(last) && !is_readable(on, 0));
	// It listens on at those that are left, and at one that comes.
	is_asked(any, on, "127.0.0.1");
	fprintf(stderr, "asks for another\n");
	while (!is_up("eth0"))
		usleep(1000);
	is_asked(any, on, "10.99.7.1");
	// Another comes under its name before it is seen to be gone.
	unsigned index = if_nametoindex("eth0");
	fprintf(stderr, "asks for one more\n");
	while (if_nametoindex("eth0") == index || !is_up("eth0"))
		usleep(1000);
	is_asked(any, on, "10.99.7.2");
	gone(unread);
	gone(unanswered);
	gone(child);
	over(first);
	over(second);
	gone(way);
	gone(any);
	gone(idle);
	// The ports are free.
	any = id(on, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(any, at("0.0.0.0", 5021)));
	gone(any);
	rdma_destroy_event_channel(on);
	printf("all as expected\n");
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		{ "a connection ends on both sides", a_connection_ends_on_both_sides },
		{ "ports are given once", ports_are_given_once },
		{ "who is not there, or refuses", who_is_not_there_or_refuses },
		{ "a backlog is of unread requests", a_backlog_is_of_unread_requests },
		{ "each listener has a backlog", each_listener_has_a_backlog },
		{ "waiting ends as a read does", waiting_ends_as_a_read_does },
		{ "events move with their id", events_move_with_their_id },
		{ "channels have high numbers", channels_have_high_numbers },
		{ "a closed channel ends its connections", a_closed_channel_ends_its_connections },
		{ "a channel is closed beside a reader", a_channel_is_closed_beside_a_reader },
		{ "a datagram service is found", a_datagram_service_is_found },
		{ "the space of InfiniBand is one more", the_space_of_infiniband_is_one_more },
		{ "the space of IPoIB has no queue pairs", the_space_of_ipoib_has_no_queue_pairs },
		{ "options reach the queue pair", options_reach_the_queue_pair },
		{ "an answer has the kernel's time", an_answer_has_the_kernels_time },
		{ "a late receive is waited for", a_late_receive_is_waited_for },
		{ "some inline data is always taken", some_inline_data_is_always_taken },
		{ "groups are joined and left", groups_are_joined_and_left },
		{ "a child begins anew", a_child_begins_anew },
	};
	if (argc < 2)
		return 2;
	address = argv[1];
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 3) {
		if (!strcmp(argv[2], "lose"))
			lose();
		else if (!strcmp(argv[2], "neighbours"))
			neighbours();
		else if (!strcmp(argv[2], "slotless"))
			slotless();
		else
			strcmp(argv[2], "watch") ? leave() : watch();
		return 0;
	}
	for (unsigned which = 0; which < sizeof tests / sizeof *tests; which++) {
		printf("%s\n", tests[which].name);
		tests[which].run();
	}
	printf("all as expected\n");
	return 0;
}
