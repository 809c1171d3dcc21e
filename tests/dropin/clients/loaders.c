/*
 * Finds libibverbs as loaders do that are not linked with it, and uses the first device that it
 * then finds. `system` and `others` have libraries of the distribution in the process besides.
 *
 *   cc loaders.c
 *   loaders NAME | deepbind | dlmopen | system | others
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(true)                                                                                \
	do {                                                                                       \
		if (!(true)) {                                                                     \
			fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #true,             \
				strerror(errno));                                                  \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* A function, as NCCL and others find it. */
#define FIND(type, name, arguments)                                                                \
	type(*name) arguments = dlvsym(library, "ibv_" #name, "IBVERBS_1.1");                      \
	CHECK(name)

static void *opened(const char *name, int flags)
{
	void *library = dlopen(name, flags);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return library;
}

/* Whatever it finds, it must not crash. */
static int count(void *library)
{
	int devices = -1;
	FIND(struct ibv_device **, get_device_list, (int *));
	FIND(void, free_device_list, (struct ibv_device **));
	struct ibv_device **list = get_device_list(&devices);
	if (list)
		free_device_list(list);
	return devices;
}

static void use(void *library)
{
	static char buffer[4096];
	FIND(struct ibv_device **, get_device_list, (int *));
	FIND(void, free_device_list, (struct ibv_device **));
	FIND(const char *, get_device_name, (struct ibv_device *));
	FIND(struct ibv_context *, open_device, (struct ibv_device *));
	FIND(int, close_device, (struct ibv_context *));
	FIND(struct ibv_pd *, alloc_pd, (struct ibv_context *));
	FIND(int, dealloc_pd, (struct ibv_pd *));
	FIND(struct ibv_mr *, reg_mr, (struct ibv_pd *, void *, size_t, int));
	FIND(int, dereg_mr, (struct ibv_mr *));
	FIND(struct ibv_cq *, create_cq,
	     (struct ibv_context *, int, void *, struct ibv_comp_channel *, int));
	FIND(int, destroy_cq, (struct ibv_cq *));
	FIND(struct ibv_qp *, create_qp, (struct ibv_pd *, struct ibv_qp_init_attr *));
	FIND(int, destroy_qp, (struct ibv_qp *));
	int devices = 0;
	struct ibv_device **list = get_device_list(&devices);
	CHECK(list && devices > 0 && !strncmp(get_device_name(list[0]), "roce", 4));
	struct ibv_context *context = open_device(list[0]);
	CHECK(context);
	struct ibv_pd *pd = alloc_pd(context);
	CHECK(pd);
	struct ibv_mr *mr = reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr && mr->length == sizeof(buffer));
	struct ibv_cq *cq = create_cq(context, 4, NULL, NULL, 0);
	CHECK(cq);
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 },
	};
	struct ibv_qp *qp = create_qp(pd, &attr);
	CHECK(qp && qp->qp_num > 1);
	struct ibv_wc wc;
	/* By the table of functions of its context. */
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
	CHECK(destroy_qp(qp) == 0 && destroy_cq(cq) == 0);
	CHECK(dereg_mr(mr) == 0 && dealloc_pd(pd) == 0);
	CHECK(close_device(context) == 0);
	free_device_list(list);
}

/* A second libibverbs, from where the distribution has it: beside libc. */
static void *systems(void)
{
	char path[4096];
	Dl_info libc;
	CHECK(dladdr((void *)strlen, &libc) || dladdr((void *)exit, &libc));
	const char *end = strrchr(libc.dli_fname, '/');
	CHECK(end);
	snprintf(path, sizeof(path), "%.*s/libibverbs.so.1", (int)(end - libc.dli_fname),
		 libc.dli_fname);
	return opened(path, RTLD_NOW);
}

int main(int count_of, char **words)
{
	CHECK(count_of == 2);
	const char *how = words[1];
	if (!strcmp(how, "deepbind")) {
		use(opened("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND));
		use(opened("libibverbs.so", RTLD_LAZY | RTLD_LOCAL | RTLD_DEEPBIND));
	} else if (!strcmp(how, "dlmopen")) {
		/* A second copy of ours. */
		void *other = dlmopen(LM_ID_NEWLM, "libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
		if (!other) {
			fprintf(stderr, "%s\n", dlerror());
			return 1;
		}
		use(other);
		use(opened("libibverbs.so.1", RTLD_NOW));
		use(other);
	} else if (!strcmp(how, "system")) {
		use(opened("libibverbs.so.1", RTLD_NOW));
		printf("%d devices of the other one\n", count(systems()));
		use(opened("libibverbs.so.1", RTLD_NOW));
	} else if (!strcmp(how, "others")) {
		const char *names[] = { "librdmacm.so.1", "libmlx5.so.1", "libmlx4.so.1", "libefa.so.1" };
		for (int i = 0; i < 4; i++) {
			void *other = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
			printf("%s %s\n", names[i], other ? "is there" : dlerror());
			CHECK(other || i > 0);
		}
		int devices = 0;
		void *rdmacm = opened("librdmacm.so.1", RTLD_NOW);
		struct ibv_context **(*get)(int *) = dlsym(rdmacm, "rdma_get_devices");
		void (*put)(struct ibv_context **) = dlsym(rdmacm, "rdma_free_devices");
		CHECK(get && put);
		struct ibv_context **all = get(&devices);
		CHECK(all && devices > 0 && all[0]);
		put(all);
		use(opened("libibverbs.so.1", RTLD_NOW));
	} else {
		use(opened(how, RTLD_NOW | RTLD_LOCAL));
	}
	puts("works");
	return 0;
}
