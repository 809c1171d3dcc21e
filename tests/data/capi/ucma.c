// Commands to rdma_cm that librdmacm would not give, at the address that is its argument: cut short,
// of unknown numbers, about ids that are not there, with memory that is not there, and of random
// bytes. None may end the program, or wait for ever. Random ones have memory for their answers.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_user_cm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// A module that imports this is taken for librdmacm.
void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *, void *);
const char *ibv_get_sysfs_path(void);

#include "check.h"

static uint64_t state;

static uint32_t random_below(uint32_t below)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(state >> 33) % below;
}

// Room for each answer, and what options are read from.
static unsigned char answer[65536], zone[64];

static int open_file(void)
{
	struct stat stat;
	int fd = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0 && !fstat(fd, &stat) && S_ISCHR(stat.st_mode));
	CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	return fd;
}

static int command(int fd, uint32_t number, const void *body, uint16_t len, uint16_t room)
{
	unsigned char whole[2048] = { 0 };
	struct rdma_ucm_cmd_hdr header = { number, len, room };
	memcpy(whole, &header, sizeof header);
	memcpy(whole + sizeof header, body, len);
	return write(fd, whole, sizeof header + len) == (ssize_t)(sizeof header + len) ? 0 : errno;
}

static uint32_t create(int fd, uint16_t space)
{
	struct rdma_ucm_create_id_resp id;
	struct rdma_ucm_create_id body = { .uid = 1, .response = (uintptr_t)&id, .ps = space,
					   .qp_type = space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC };
	CHECK(!command(fd, RDMA_USER_CM_CMD_CREATE_ID, &body, sizeof body, sizeof id));
	return id.id;
}

// Puts a place to write where the command has its pointer for an answer.
static void point(uint32_t number, unsigned char *body)
{
	uint64_t to = (uintptr_t)answer;
	uint64_t option = (uintptr_t)zone;
	if (number == RDMA_USER_CM_CMD_CREATE_ID)
		memcpy(body + 8, &to, 8);
	else if (number == RDMA_USER_CM_CMD_SET_OPTION)
		memcpy(body, &option, 8);
	else
		memcpy(body, &to, 8);
}

static void known_mistakes(int fd, const char *address)
{
	unsigned char body[1024] = { 0 };
	uint32_t none = 0xffff, id = create(fd, RDMA_PS_TCP), other;
	CHECK(write(fd, body, 0) == -1 && errno == EINVAL);
	CHECK(write(fd, body, 7) == -1 && errno == EINVAL);
	struct rdma_ucm_cmd_hdr longer = { RDMA_USER_CM_CMD_LISTEN, 8, 0 };
	CHECK(write(fd, &longer, sizeof longer) == -1 && errno == EINVAL);
	CHECK(command(fd, 23, body, 8, 0) == ENOSYS);
	CHECK(command(fd, UINT32_MAX, body, 8, 0) == ENOSYS);
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_OPTION, body, 8, 0) == ENOSYS);
	struct rdma_ucm_listen listen = { none, 1 };
	CHECK(command(fd, RDMA_USER_CM_CMD_LISTEN, &listen, sizeof listen, 0) == ENOENT);
	struct rdma_ucm_get_event get = { (uintptr_t)answer };
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_EVENT, &get, sizeof get, 323) == ENOSPC);
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_EVENT, &get, sizeof get, 336) == EAGAIN);
	struct rdma_ucm_query query = { (uintptr_t)answer, id, 3 };
	CHECK(command(fd, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 1024) == ENOSYS);
	query.option = RDMA_USER_CM_QUERY_ADDR;
	CHECK(command(fd, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 271) == ENOSPC);
	CHECK(!command(fd, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 280));
	// An id is its file's.
	int second = open_file();
	CHECK(command(second, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 280) == EINVAL);
	struct rdma_ucm_migrate_id migrate = { (uintptr_t)answer, id, 9999 };
	CHECK(command(second, RDMA_USER_CM_CMD_MIGRATE_ID, &migrate, sizeof migrate, 4) == EINVAL);
	migrate.fd = fd;
	CHECK(!command(second, RDMA_USER_CM_CMD_MIGRATE_ID, &migrate, sizeof migrate, 4));
	CHECK(command(fd, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 280) == EINVAL);
	CHECK(!command(second, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 280));
	close(second);
	CHECK(write(second, body, 8) == -1 && errno == EBADF);
	// Each in a state that has no use for it.
	id = create(fd, RDMA_PS_TCP), other = create(fd, RDMA_PS_UDP);
	struct rdma_ucm_connect connect = { .conn_param.valid = 1, .id = id };
	CHECK(command(fd, RDMA_USER_CM_CMD_CONNECT, &connect, sizeof connect, 0) == EINVAL);
	struct rdma_ucm_accept accept = { .conn_param.valid = 1, .id = id };
	CHECK(command(fd, RDMA_USER_CM_CMD_ACCEPT, &accept, sizeof accept, 0) == EINVAL);
	struct rdma_ucm_reject reject = { .id = id };
	CHECK(command(fd, RDMA_USER_CM_CMD_REJECT, &reject, sizeof reject, 0) == EINVAL);
	CHECK(command(fd, RDMA_USER_CM_CMD_DISCONNECT, &id, 4, 0) == EINVAL);
	struct rdma_ucm_notify notify = { id, IBV_EVENT_COMM_EST };
	CHECK(command(fd, RDMA_USER_CM_CMD_NOTIFY, &notify, sizeof notify, 0) == EINVAL);
	struct rdma_ucm_init_qp_attr attr = { (uintptr_t)answer, id, IBV_QPS_RTR };
	CHECK(command(fd, RDMA_USER_CM_CMD_INIT_QP_ATTR, &attr, sizeof attr, 144) == EINVAL);
	struct rdma_ucm_bind bind = { .id = id, .addr_size = 16 };
	CHECK(command(fd, RDMA_USER_CM_CMD_BIND, &bind, sizeof bind, 0) == EINVAL);
	struct sockaddr_in *in = (struct sockaddr_in *)&bind.addr;
	in->sin_family = AF_INET;
	inet_pton(AF_INET, address, &in->sin_addr);
	CHECK(!command(fd, RDMA_USER_CM_CMD_BIND, &bind, sizeof bind, 0));
	struct rdma_ucm_set_option option = { (uintptr_t)zone, other, 0, 3, 1 };
	zone[0] = 31;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == EINVAL);
	option.id = id;
	zone[0] = 32;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == EINVAL);
	zone[0] = 31;
	CHECK(!command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0));
	option.optlen = 1 << 30;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == EINVAL);
	option.optname = 77, option.optlen = 1;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == ENOSYS);
	struct rdma_ucm_destroy_id destroy = { (uintptr_t)answer, id, 0 };
	CHECK(!command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, 4));
	CHECK(command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, 4) == ENOENT);
	CHECK(command(fd, RDMA_USER_CM_CMD_LEAVE_MCAST, &destroy, sizeof destroy, 4) == ENOENT);
}

// Four pages: one to read and write, one to read, a hole, and one to read and write.
static uint64_t page, rw, ro, hole, last;

static void make_pages(void)
{
	page = sysconf(_SC_PAGESIZE);
	void *start = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(start != MAP_FAILED);
	rw = (uintptr_t)start, ro = rw + page, hole = ro + page, last = hole + page;
	CHECK(!mprotect((void *)ro, page, PROT_READ) && !munmap((void *)hole, page));
}

static int options_from(int fd, uint32_t id, uint64_t from, uint32_t len)
{
	struct rdma_ucm_set_option option = { from, id, 0, 1, len };
	return command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0);
}

static int query_into(int fd, uint32_t id, uint64_t to)
{
	struct rdma_ucm_query query = { to, id, RDMA_USER_CM_QUERY_ADDR };
	return command(fd, RDMA_USER_CM_CMD_QUERY, &query, sizeof query, 280);
}

static uint32_t bound(int fd, uint16_t space, const char *address)
{
	uint32_t id = create(fd, space);
	struct rdma_ucm_bind bind = { .id = id, .addr_size = 16 };
	struct sockaddr_in *in = (struct sockaddr_in *)&bind.addr;
	in->sin_family = AF_INET;
	inet_pton(AF_INET, address, &in->sin_addr);
	CHECK(!command(fd, RDMA_USER_CM_CMD_BIND, &bind, sizeof bind, 0));
	return id;
}

// The compiler need not know what is wrong with it.
static int given(int fd, volatile uint64_t at, volatile size_t len)
{
	return write(fd, (void *)at, len) < 0 ? errno : 0;
}

// The commands themselves, in memory that is not there or ends right behind them.
static void commands_from_bad_memory(int fd)
{
	struct {
		struct rdma_ucm_cmd_hdr header;
		struct rdma_ucm_get_event body;
	} get = { { RDMA_USER_CM_CMD_GET_EVENT, sizeof get.body, 336 }, { rw } };
	CHECK(given(fd, 0, 8) == EFAULT);
	CHECK(given(fd, hole, 8) == EFAULT);
	CHECK(given(fd, hole - 7, 8) == EFAULT);
	CHECK(given(fd, -8, 8) == EFAULT);
	CHECK(given(fd, -4, 16) == EFAULT);
	CHECK(!mprotect((void *)ro, page, PROT_READ | PROT_WRITE));
	memcpy((void *)(hole - sizeof get.header), &get, sizeof get.header);
	CHECK(given(fd, hole - sizeof get.header, sizeof get) == EFAULT);
	memcpy((void *)(hole - sizeof get), &get, sizeof get);
	CHECK(!mprotect((void *)ro, page, PROT_READ));
	CHECK(given(fd, hole - sizeof get, sizeof get) == EAGAIN);
	// What is behind the command is nobody's business, however much there is.
	CHECK(given(fd, hole - sizeof get, 1 << 30) == EAGAIN);
	CHECK(given(fd, hole - sizeof get, 8) == EINVAL);
	CHECK(given(fd, hole - sizeof get, SIZE_MAX) == EINVAL);
}

static void options_and_answers_in_bad_memory(int fd, uint32_t id)
{
	const struct {
		uint64_t at;
		int in, out;
	} places[] = {
		{ 0, EFAULT, EFAULT },
		{ 1, EFAULT, EFAULT },
		{ UINT64_MAX, EFAULT, EFAULT },
		{ UINT64_MAX - 300, EFAULT, EFAULT },
		{ 1ull << 63, EFAULT, EFAULT },
		{ rw, 0, 0 },
		{ rw + page - 280, 0, 0 },
		{ rw + page - 279, 0, EFAULT },
		{ rw + page - 1, 0, EFAULT },
		{ ro, 0, EFAULT },
		{ hole - 4, 0, EFAULT },
		{ hole - 3, EFAULT, EFAULT },
		{ hole, EFAULT, EFAULT },
		{ last - 1, EFAULT, EFAULT },
		{ last + 1, 0, 0 },
	};
	for (unsigned which = 0; which < sizeof places / sizeof *places; which++) {
		CHECK(options_from(fd, id, places[which].at, 4) == places[which].in);
		CHECK(query_into(fd, id, places[which].at) == places[which].out);
	}
	// Options are read before anybody knows what they are, over many pages.
	CHECK(options_from(fd, id, rw, 2 * page) == EINVAL);
	CHECK(options_from(fd, id, rw, 2 * page + 1) == EFAULT);
	CHECK(options_from(fd, id, rw, 4 * page) == EFAULT);
	struct rdma_ucm_set_option unknown = { hole, id, 9, 9, 4 };
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &unknown, sizeof unknown, 0) == EFAULT);
	CHECK(options_from(fd, 0xffff, hole, 4) == ENOENT);
}

// A command that cannot give its answer has done nothing, or, if it ends something, all.
static void commands_without_an_answer(int fd, const char *address)
{
	struct rdma_ucm_create_id make = { .uid = 1, .response = hole, .ps = RDMA_PS_TCP };
	// More than there are ids.
	for (int count = 0; count < 70000; count++)
		CHECK(command(fd, RDMA_USER_CM_CMD_CREATE_ID, &make, sizeof make, 4) == EFAULT);
	uint32_t id = bound(fd, RDMA_PS_UDP, address);
	struct rdma_ucm_join_mcast join = { .response = ro, .uid = 3, .id = id, .addr_size = 16 };
	struct sockaddr_in *group = (struct sockaddr_in *)&join.addr;
	group->sin_family = AF_INET;
	inet_pton(AF_INET, "239.1.2.3", &group->sin_addr);
	CHECK(command(fd, RDMA_USER_CM_CMD_JOIN_MCAST, &join, sizeof join, 4) == EFAULT);
	struct rdma_ucm_get_event get = { rw };
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_EVENT, &get, sizeof get, 336) == EAGAIN);
	join.response = rw;
	CHECK(!command(fd, RDMA_USER_CM_CMD_JOIN_MCAST, &join, sizeof join, 4));
	uint32_t joined = *(uint32_t *)rw;
	get.response = rw + page - 335;
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_EVENT, &get, sizeof get, 336) == EFAULT);
	get.response--;
	CHECK(!command(fd, RDMA_USER_CM_CMD_GET_EVENT, &get, sizeof get, 336));
	struct rdma_ucm_event_resp *event = (void *)(uintptr_t)get.response;
	CHECK(event->id == joined && event->uid == 3);
	int second = open_file();
	// Not by a file that it is not of: the group is there still.
	struct rdma_ucm_destroy_id early = { rw, joined, 0 };
	CHECK(command(second, RDMA_USER_CM_CMD_LEAVE_MCAST, &early, sizeof early, 4) == EINVAL);
	struct rdma_ucm_migrate_id migrate = { ro, id, fd };
	CHECK(command(second, RDMA_USER_CM_CMD_MIGRATE_ID, &migrate, sizeof migrate, 4) == EFAULT);
	CHECK(!query_into(second, id, rw));
	struct rdma_ucm_init_qp_attr attr = { ro, id, IBV_QPS_INIT };
	CHECK(command(second, RDMA_USER_CM_CMD_INIT_QP_ATTR, &attr, sizeof attr, 144) == EFAULT);
	struct rdma_ucm_query route = { .response = ro, .id = id };
	CHECK(command(second, RDMA_USER_CM_CMD_QUERY_ROUTE, &route, sizeof route, 224) == EFAULT);
	struct rdma_ucm_destroy_id destroy = { ro, joined, 0 };
	CHECK(command(second, RDMA_USER_CM_CMD_LEAVE_MCAST, &destroy, sizeof destroy, 4) == EFAULT);
	CHECK(command(second, RDMA_USER_CM_CMD_LEAVE_MCAST, &destroy, sizeof destroy, 4) == ENOENT);
	destroy.id = id;
	CHECK(command(second, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, 4) == EFAULT);
	CHECK(command(second, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, 4) == ENOENT);
	CHECK(!close(second));
}

static void random_commands(int fd, const char *address)
{
	unsigned char body[1024];
	struct in_addr ip;
	inet_pton(AF_INET, address, &ip);
	for (int round = 0; round < 60000; round++) {
		uint32_t number = random_below(26);
		uint16_t len = random_below(4) ? sizeof body : random_below(sizeof body);
		for (unsigned at = 0; at < sizeof body; at++)
			body[at] = random_below(3) ? 0 : random_below(256);
		// Ids that are there, addresses that are known, and parameters that count.
		static const uint16_t ids[] = { 0, 8, 16, 36, 44, 56, 176, 272, 280 };
		for (unsigned which = 0; which < sizeof ids / sizeof *ids; which++)
			if (random_below(2)) {
				uint32_t id = random_below(64);
				memcpy(body + ids[which], &id, 4);
			}
		static const uint16_t addresses[] = { 8, 16, 24, 28, 144 };
		for (unsigned which = 0; which < sizeof addresses / sizeof *addresses; which++)
			if (random_below(2)) {
				struct sockaddr_in in = { AF_INET, htons(random_below(9)), ip, { 0 } };
				memcpy(body + addresses[which], &in, sizeof in);
			}
		point(number, body);
		int failed = command(fd, number, body, len, random_below(2) ? 1024 : random_below(400));
		CHECK(failed >= 0 && failed < 133 && failed != EIO);
	}
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	state = strtoull(argv[2], NULL, 10);
	// It only has to be imported.
	void (*volatile mark)(struct ibv_qp_attr *, void *) = ibv_copy_qp_attr_from_kern;
	CHECK(mark);
	CHECK(ibv_get_sysfs_path());
	int fd = open_file();
	known_mistakes(fd, argv[1]);
	make_pages();
	commands_from_bad_memory(fd);
	options_and_answers_in_bad_memory(fd, create(fd, RDMA_PS_TCP));
	commands_without_an_answer(fd, argv[1]);
	random_commands(fd, argv[1]);
	CHECK(!close(fd));
	printf("all as expected\n");
	return 0;
}
