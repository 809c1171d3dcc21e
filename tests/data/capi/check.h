// Ends the program with 1, and says where, unless something is so.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what)) {                                                                     \
			printf("line %d: %s (errno %d)\n", __LINE__, #what, errno);                \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)
