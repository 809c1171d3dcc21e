// Commands to rdma_cm that librdmacm would not give, at the address that is its argument: cut short,
// of unknown numbers, about ids that are not there, and of random bytes. None may end the program,
// or wait for ever. What a command has for an answer is memory here, as the kernel would check.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_user_cm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
	zone[0] = 32;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == EINVAL);
	zone[0] = 31;
	CHECK(!command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0));
	option.optlen = 1 << 30;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == EINVAL);
	option.optname = 77;
	CHECK(command(fd, RDMA_USER_CM_CMD_SET_OPTION, &option, sizeof option, 0) == ENOSYS);
	struct rdma_ucm_destroy_id destroy = { (uintptr_t)answer, id, 0 };
	CHECK(!command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, 4));
	CHECK(command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, 4) == ENOENT);
	CHECK(command(fd, RDMA_USER_CM_CMD_LEAVE_MCAST, &destroy, sizeof destroy, 4) == ENOENT);
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
	random_commands(fd, argv[1]);
	CHECK(!close(fd));
	printf("all as expected\n");
	return 0;
}
