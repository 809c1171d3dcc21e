// A library to preload that takes over what sockets of datagrams are used by, and ends a program
// that uses one of IP so.

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void look(const char *call, int domain, int type)
{
	if ((domain == AF_INET || domain == AF_INET6) && (type & 15) == SOCK_DGRAM) {
		dprintf(2, "%s is taken over\n", call);
		abort();
	}
}

static void look_at(const char *call, int fd)
{
	int domain = 0, type = 0;
	socklen_t len = sizeof(int);
	syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &domain, &len);
	syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_TYPE, &type, &len);
	look(call, domain, type);
}

// The symbol `name`, whatever the headers say of its parameters.
#define TAKEN(name, ...)                                                     \
	long taken_##name(int, long, long, long, long, long) __asm__(#name); \
	long taken_##name(int fd, long a, long b, long c, long d, long e)    \
	{                                                                    \
		look_at(#name, fd);                                          \
		return syscall(SYS_##name, fd, __VA_ARGS__);                 \
	}

TAKEN(bind, a, b, c, d, e)
TAKEN(connect, a, b, c, d, e)
TAKEN(getsockname, a, b, c, d, e)
TAKEN(getsockopt, a, b, c, d, e)
TAKEN(setsockopt, a, b, c, d, e)
TAKEN(sendto, a, b, c, d, e)
TAKEN(recvfrom, a, b, c, d, e)
TAKEN(sendmsg, a, b, c, d, e)
TAKEN(recvmsg, a, b, c, d, e)
TAKEN(sendmmsg, a, b, c, d, e)
TAKEN(recvmmsg, a, b, c, d, e)

int socket(int domain, int type, int protocol)
{
	look("socket", domain, type);
	return syscall(SYS_socket, domain, type, protocol);
}
