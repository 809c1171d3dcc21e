/* Looks at paths below /sys in each way that libc has, and prints what it finds. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#define CLASS "/sys/class/infiniband"

static int visited;

static int visit(const char *path, const struct stat *file, int kind, struct FTW *at)
{
	(void)file;
	(void)kind;
	if (!strcmp(path + at->base, "roce0") && strcmp(path, CLASS "/roce0"))
		printf("nftw calls it %s\n", path);
	visited++;
	return 0;
}

int main(void)
{
	static const char *paths[] = {
		CLASS, CLASS "/roce0", CLASS "/roce0/", CLASS "/roce0/..", CLASS "/roce0/../roce0",
		CLASS "/roce0/device", CLASS "/roce0/device/../..", CLASS "/roce0/subsystem",
		CLASS "/roce0/ports/1/../../..", CLASS "/../net", "//sys/class/infiniband",
		"/sys/./class/infiniband", "/sys//class//infiniband/", "/usr/../sys/class/infiniband",
		"/sys/class/net/../infiniband/roce0", CLASS "/nosuch", CLASS "/nosuch/..",
		"/sys/devices/rocinante/roce0/infiniband_verbs/uverbs0/device/infiniband",
	};
	char found[PATH_MAX];
	for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
		char *real = realpath(paths[i], found);
		printf("%s is %s\n", paths[i], real ? real : "nothing");
	}
	glob_t list;
	int status = glob(CLASS "*/*/ports/*/state", 0, NULL, &list);
	printf("glob %d\n", status);
	for (size_t i = 0; i < list.gl_pathc; i++)
		printf("%s\n", list.gl_pathv[i]);
	status = glob("/sys/class/*/roce0", 0, NULL, &list);
	printf("glob %d %s\n", status, status ? "" : list.gl_pathv[0]);
	status = nftw(CLASS, visit, 8, FTW_PHYS);
	printf("nftw %d %s\n", status, visited > 2 ? "several" : "few");

	char *roots[] = { CLASS, "/sys/class/net", NULL };
	FTS *walk = fts_open(roots, FTS_PHYSICAL, NULL);
	FTSENT *entry;
	int entries = 0;
	while ((entry = fts_read(walk))) {
		entries++;
		if (entry->fts_pathlen != strlen(entry->fts_path))
			printf("fts counts %d of %s\n", entry->fts_pathlen, entry->fts_path);
		if (!strcmp(entry->fts_name, "roce0"))
			printf("fts calls it %s\n", entry->fts_path);
	}
	printf("fts %s\n", entries > 6 ? "several" : "few");
	fts_close(walk);

	struct statfs filesystem;
	struct statvfs other;
	printf("statfs %d\n", statfs(CLASS, &filesystem) + statvfs(CLASS "/roce0/", &other));

	int class = open("/sys/class", O_RDONLY | O_DIRECTORY);
	int inside = openat(class, "infiniband", O_RDONLY | O_DIRECTORY);
	struct stat file, same;
	status = fstatat(inside, "roce0/ports/1/state", &file, 0);
	status += fstatat(class, "infiniband/roce0/ports/1/state", &same, 0);
	printf("fstatat %d %d\n", status, file.st_ino == same.st_ino);
	printf("out of it %d\n", faccessat(inside, "../net/lo", F_OK, 0));
	ssize_t len = readlinkat(inside, "roce0", found, sizeof found - 1);
	printf("readlinkat %.*s\n", (int)len, found);
	int at = inotify_init();
	printf("inotify %d\n", inotify_add_watch(at, CLASS "/roce0/ports/1", IN_ALL_EVENTS) >= 0);

	status = chdir("/sys/class");
	printf("chdir %d %d\n", status, access("infiniband/roce0", R_OK));
	status = chdir("infiniband/roce0");
	printf("chdir %d %d\n", status, access("ports/1/state", R_OK));
	printf("in %s\n", getcwd(found, sizeof found));
	printf("out of it %d\n", access("../../../../../class/net/lo", F_OK));
	printf("short %d\n", getcwd(found, 8) != NULL);
	status = fchdir(inside);
	printf("fchdir %d %s\n", status, getcwd(found, sizeof found));
	printf("relative %s\n", realpath("roce0/..", found));

	DIR *stream = opendir("/sys/class");
	struct dirent *name;
	long begin = telldir(stream);
	for (int round = 0; round < 2; round++) {
		int ours = 0;
		while ((name = readdir(stream)))
			ours += !strcmp(name->d_name, "infiniband") + !strcmp(name->d_name, "net");
		ours += readdir(stream) != NULL;
		printf("listed %d\n", ours);
		if (round)
			rewinddir(stream);
		else
			seekdir(stream, begin);
	}
	closedir(stream);
	return 0;
}
