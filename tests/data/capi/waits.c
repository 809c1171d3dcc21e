/* Waits until there is a file, for a minute, and prints what it has. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int main(int count, char **words)
{
	char text[256];
	fputs("ready\n", stderr);
	for (int round = 0; count > 1 && round < 6000; round++) {
		int file = open(words[1], O_RDONLY);
		ssize_t len = file < 0 ? 0 : read(file, text, sizeof text);
		if (len > 0) {
			printf("%.*s", (int)len, text);
			return 0;
		}
		usleep(10000);
	}
	return 1;
}
