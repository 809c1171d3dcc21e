// Addresses that are resolved, bound and listened on: both families' wildcards, link-local ones of
// two interfaces, those that no machine has; and what a program is told when its peer is cut off.
//
//   ways serve
//   ways ask PEER DEAD     PEER serves; both links are eth0, with fe80::a here and fe80::b there,
//                          and eth1 here has fe80::a, too
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <net/if.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { SERVED = 7601, OWN = 7602 };

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

// `link` is the interface of a link-local address, or NULL.
static struct sockaddr *at(const char *ip, const char *link, int port)
{
	static struct sockaddr_storage all[8];
	static int next;
	struct sockaddr_storage *one = &all[next++ % 8];
	struct sockaddr_in *v4 = (void *)one;
	struct sockaddr_in6 *v6 = (void *)one;
	memset(one, 0, sizeof *one);
	v4->sin_port = htons(port);
	v4->sin_family = strchr(ip, ':') ? AF_INET6 : AF_INET;
	void *to = strchr(ip, ':') ? (void *)&v6->sin6_addr : &v4->sin_addr;
	CHECK(inet_pton(v4->sin_family, ip, to));
	if (link)
		v6->sin6_scope_id = if_nametoindex(link);
	return (struct sockaddr *)one;
}

static struct rdma_cm_id *id(struct rdma_event_channel *on, int only_its_family)
{
	struct rdma_cm_id *it;
	CHECK(!rdma_create_id(on, &it, NULL, RDMA_PS_TCP));
	CHECK(!only_its_family || !rdma_set_option(it, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY,
						   &only_its_family, sizeof only_its_family));
	return it;
}

static int status_of(struct rdma_event_channel *on, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *it;
	CHECK(!rdma_get_cm_event(on, &it));
	int status = it->status;
	if (it->event != kind) {
		printf("%s, status %d in place of %s\n", rdma_event_str(it->event), status,
		       rdma_event_str(kind));
		exit(1);
	}
	CHECK(!rdma_ack_cm_event(it));
	return status;
}

static void queue_pair(struct rdma_cm_id *of)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	CHECK(!rdma_create_qp(of, NULL, &attr));
}

static int scope_of(struct sockaddr *of)
{
	return of->sa_family == AF_INET6 ? ((struct sockaddr_in6 *)of)->sin6_scope_id : 0;
}

// Accepts the next request, and says which listener it came to.
static struct rdma_cm_id *accept_with(struct rdma_event_channel *on, char answer)
{
	struct rdma_cm_event *asked;
	CHECK(!rdma_get_cm_event(on, &asked));
	if (asked->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
		CHECK(!rdma_ack_cm_event(asked));
		return NULL;
	}
	struct rdma_cm_id *child = asked->id;
	if (!answer)
		answer = asked->listen_id->route.addr.src_addr.sa_family == AF_INET ? '4' : '6';
	CHECK(!rdma_ack_cm_event(asked));
	queue_pair(child);
	struct rdma_conn_param param = { .private_data = &answer, .private_data_len = 1 };
	CHECK(!rdma_accept(child, &param));
	return child;
}

static void listens(struct rdma_cm_id *it, struct sockaddr *where)
{
	CHECK(!rdma_bind_addr(it, where));
	CHECK(!rdma_listen(it, 4));
}

static void serve(void)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	listens(id(on, 1), at("0.0.0.0", NULL, SERVED));
	listens(id(on, 1), at("::", NULL, SERVED));
	fprintf(stderr, "listens\n");
	for (;;)
		accept_with(on, 0);
}

static struct rdma_cm_id *resolved(struct rdma_event_channel *on, struct sockaddr *from,
				   struct sockaddr *to)
{
	struct rdma_cm_id *it = id(on, 0);
	CHECK(!rdma_resolve_addr(it, from, to, 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	CHECK(!rdma_resolve_route(it, 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ROUTE_RESOLVED) == 0);
	queue_pair(it);
	struct rdma_conn_param param = { .retry_count = 3 };
	CHECK(!rdma_connect(it, &param));
	return it;
}

// The first byte that the peer's program gave.
static char established(struct rdma_event_channel *on)
{
	struct rdma_cm_event *it;
	CHECK(!rdma_get_cm_event(on, &it) && it->event == RDMA_CM_EVENT_ESTABLISHED);
	char answer = *(char *)it->param.conn.private_data;
	CHECK(!rdma_ack_cm_event(it));
	return answer;
}

static void gone(struct rdma_cm_id *it)
{
	if (it->qp)
		rdma_destroy_qp(it);
	CHECK(!rdma_destroy_id(it));
}

static void over(struct rdma_event_channel *on, struct rdma_cm_id *it)
{
	CHECK(!rdma_disconnect(it));
	CHECK(status_of(on, RDMA_CM_EVENT_DISCONNECTED) == 0);
	gone(it);
}

static void refused(struct rdma_cm_id *it, struct sockaddr *where, int error)
{
	CHECK(rdma_bind_addr(it, where) == -1 && errno == error);
}

// A wildcard that is for its family alone leaves the other's to others; else it has both. One of
// IPv4 is so by default.
static void wildcards(struct rdma_event_channel *on, const char *peer)
{
	static const char *any[] = { "0.0.0.0", "::" };
	for (int first = 0; first < 2; first++)
		for (int options = 0; options < 4; options++) {
			struct rdma_cm_id *one = id(on, options & 1), *two = id(on, options >> 1);
			listens(one, at(any[first], NULL, OWN));
			int of_v6 = first ? options & 1 : options >> 1;
			if (of_v6)
				listens(two, at(any[!first], NULL, OWN));
			else
				refused(two, at(any[!first], NULL, OWN), EADDRNOTAVAIL);
			struct rdma_cm_id *three = id(on, 1);
			refused(three, at(any[first], NULL, OWN), EADDRNOTAVAIL);
			gone(one);
			gone(two);
			// What is refused has taken nothing.
			listens(three, at(any[first], NULL, OWN));
			gone(three);
		}
	for (int family = 0; family < 2; family++) {
		struct rdma_event_channel *there = rdma_create_event_channel();
		struct rdma_cm_id *server = id(there, 0);
		int both = 0;
		if (!family) {
			listens(server, at(any[family], NULL, OWN));
			struct rdma_cm_id *other = resolved(on, NULL, at("fe80::a", "eth0", OWN));
			CHECK(status_of(on, RDMA_CM_EVENT_REJECTED) == 8);
			gone(other);
			gone(server);
			server = id(there, 0);
			CHECK(!rdma_set_option(server, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &both,
					       sizeof both));
		}
		listens(server, at(any[family], NULL, OWN));
		struct rdma_cm_id *client = resolved(on, NULL, at("fe80::a", "eth0", OWN));
		struct rdma_cm_id *child = accept_with(there, '=');
		CHECK(established(on) == '=');
		CHECK(status_of(there, RDMA_CM_EVENT_ESTABLISHED) == 0);
		int eth0 = if_nametoindex("eth0");
		CHECK(scope_of(rdma_get_local_addr(child)) == eth0);
		CHECK(scope_of(rdma_get_peer_addr(child)) == eth0);
		over(on, client);
		gone(child);
		gone(server);
		rdma_destroy_event_channel(there);
	}
	struct rdma_cm_id *by_v4 = resolved(on, NULL, at(peer, NULL, SERVED));
	CHECK(established(on) == '4');
	over(on, by_v4);
}

// A link-local address is one of each link.
static void links(struct rdma_event_channel *on)
{
	int eth0 = if_nametoindex("eth0");
	for (int named = 0; named < 2; named++) {
		struct sockaddr *from = named ? at("fe80::a", "eth0", 0) : NULL;
		struct rdma_cm_id *it = resolved(on, from, at("fe80::b", "eth0", SERVED));
		CHECK(scope_of(rdma_get_local_addr(it)) == eth0);
		CHECK(scope_of(rdma_get_peer_addr(it)) == eth0);
		CHECK(established(on) == '6');
		over(on, it);
	}
	struct rdma_cm_id *both[2], *third = id(on, 0);
	static const char *names[] = { "eth0", "eth1" };
	refused(third, at("fe80::a", NULL, OWN), EINVAL);
	refused(third, at("fe80::a", "lo", OWN), EADDRNOTAVAIL);
	for (int which = 0; which < 2; which++) {
		both[which] = id(on, 0);
		CHECK(!rdma_bind_addr(both[which], at("fe80::a", names[which], OWN)));
		int link = if_nametoindex(names[which]);
		CHECK(scope_of(rdma_get_local_addr(both[which])) == link);
		refused(third, at("fe80::a", names[which], OWN), EADDRINUSE);
		CHECK(!rdma_listen(both[which], 1));
	}
	CHECK(strcmp(both[0]->verbs->device->name, both[1]->verbs->device->name));
	gone(both[0]);
	CHECK(!rdma_bind_addr(third, at("fe80::a", "eth0", OWN)));
	CHECK(third->verbs->device != both[1]->verbs->device);
	gone(third);
	gone(both[1]);
	// From an address of one link to one of the other.
	struct rdma_cm_id *astray = id(on, 0);
	CHECK(rdma_resolve_addr(astray, at("fe80::a", "eth1", 0), at("fe80::b", "eth0", SERVED),
				300) == -1 && errno == EINVAL);
	gone(astray);
}

// The time that was given is kept, and the id can be used again.
static void no_answer(struct rdma_event_channel *on, const char *dead, const char *peer)
{
	struct rdma_cm_id *it = id(on, 0), *other = id(on, 0), *given_up = id(on, 0);
	double begin = now();
	CHECK(!rdma_resolve_addr(it, NULL, at(dead, NULL, 1), 700));
	CHECK(!rdma_resolve_addr(given_up, NULL, at(dead, NULL, 1), 700));
	CHECK(rdma_resolve_addr(it, NULL, at(peer, NULL, 1), 700) == -1 && errno == EINVAL);
	gone(given_up);
	// Another one does not wait for it.
	CHECK(!rdma_resolve_addr(other, NULL, at(peer, NULL, 1), 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_ERROR) == -ETIMEDOUT);
	CHECK(now() - begin > 0.6 && now() - begin < 20);
	CHECK(!rdma_resolve_addr(it, NULL, at(peer, NULL, 1), 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	gone(it);
	gone(other);
	// It is bound to no device again, and another one has the way.
	struct rdma_cm_id *elsewhere = id(on, 0);
	CHECK(!rdma_resolve_addr(elsewhere, NULL, at(dead, NULL, 1), 300));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_ERROR) == -ETIMEDOUT);
	CHECK(!rdma_resolve_addr(elsewhere, NULL, at("127.0.0.1", NULL, 1), 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	struct sockaddr_in *own = (void *)rdma_get_local_addr(elsewhere);
	CHECK(own->sin_addr.s_addr == htonl(INADDR_LOOPBACK));
	gone(elsewhere);
}

static unsigned access_of(struct rdma_cm_id *it)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	int mask;
	CHECK(!rdma_init_qp_attr(it, &attr, &mask));
	return attr.qp_access_flags;
}

// A connection that is refused at once can be asked for again, and peers have no rights till then.
static void too_long(struct rdma_event_channel *on, const char *peer)
{
	static const char words[57];
	struct rdma_cm_id *it = id(on, 0);
	CHECK(!rdma_resolve_addr(it, NULL, at(peer, NULL, SERVED), 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
	CHECK(!rdma_resolve_route(it, 20000));
	CHECK(status_of(on, RDMA_CM_EVENT_ROUTE_RESOLVED) == 0);
	queue_pair(it);
	struct rdma_conn_param param = { .private_data = words, .private_data_len = 57 };
	CHECK(access_of(it) == 0);
	CHECK(rdma_connect(it, &param) == -1 && errno == EINVAL);
	CHECK(access_of(it) == 0);
	param.private_data_len = 56;
	CHECK(!rdma_connect(it, &param));
	CHECK(established(on) == '4');
	over(on, it);
}

static void nothing(int signal)
{
}

static void ask(const char *peer, const char *dead)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	CHECK(on);
	wildcards(on, peer);
	links(on);
	no_answer(on, dead, peer);
	too_long(on, peer);
	struct rdma_cm_id *it = resolved(on, NULL, at(peer, NULL, SERVED));
	CHECK(established(on) == '4');
	sigset_t cut;
	sigemptyset(&cut);
	sigaddset(&cut, SIGUSR1);
	sigprocmask(SIG_BLOCK, &cut, NULL);
	fprintf(stderr, "cut\n");
	CHECK(sigwaitinfo(&cut, NULL) == SIGUSR1);
	CHECK(!rdma_disconnect(it));
	CHECK(status_of(on, RDMA_CM_EVENT_DISCONNECTED) == -ETIMEDOUT);
	CHECK(status_of(on, RDMA_CM_EVENT_TIMEWAIT_EXIT) == 0);
	gone(it);
	rdma_destroy_event_channel(on);
	printf("all as expected\n");
}

// net.ipv6.bindv6only is 1, and net.ipv4.ip_local_port_range "50000 50010".
static void by_sysctl(void)
{
	struct rdma_event_channel *on = rdma_create_event_channel();
	listens(id(on, 0), at("::", NULL, OWN));
	listens(id(on, 0), at("0.0.0.0", NULL, OWN));
	for (int given = 50000; given <= 50010; given++) {
		struct rdma_cm_id *it = id(on, 0);
		CHECK(!rdma_bind_addr(it, at("127.0.0.1", NULL, 0)));
		int port = ntohs(rdma_get_src_port(it));
		CHECK(port >= 50000 && port <= 50010);
	}
	refused(id(on, 0), at("127.0.0.1", NULL, 0), EADDRNOTAVAIL);
	puts("all as expected");
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGUSR1, nothing);
	argc == 4 ? ask(argv[2], argv[3]) : argc == 2 && !strcmp(argv[1], "serve") ? serve() : by_sysctl();
	return 0;
}
