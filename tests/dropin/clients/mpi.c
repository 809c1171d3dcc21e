/* Ranks that send each other messages of known bytes, and compare every byte that comes: around a
   ring, from all to all, and into windows that others PUT, GET and add to. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 3 };
static const int sizes[] = {0, 1, 8, 1000, 4096, 8193, 65536, 1000003};
enum { SIZES = sizeof sizes / sizeof *sizes, LONGEST = 1000003 };

static int rank, ranks;

/* Byte `at` of what `from` has for `to` in a round. */
static unsigned char byte_of(int from, int to, int round, int at)
{
    unsigned x = (unsigned)at * 2654435761u + (unsigned)from * 40503u + (unsigned)to * 9973u
        + (unsigned)round * 7919u;
    return (unsigned char)(x >> 13 ^ x >> 3);
}

static void fill(unsigned char *buffer, int len, int from, int to, int round)
{
    for (int at = 0; at < len; at++)
        buffer[at] = byte_of(from, to, round, at);
}

static void check(const char *what, const unsigned char *buffer, int len, int from, int to,
                  int round)
{
    for (int at = 0; at < len; at++) {
        if (buffer[at] != byte_of(from, to, round, at)) {
            fprintf(stderr, "%s: rank %d: byte %d of %d from rank %d is %d in the place of %d\n",
                    what, rank, at, len, from, buffer[at], byte_of(from, to, round, at));
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

static unsigned char *room(size_t len)
{
    unsigned char *buffer = malloc(len ? len : 1);
    if (!buffer) {
        fprintf(stderr, "no memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memset(buffer, 0xee, len);
    return buffer;
}

static void ring(void)
{
    unsigned char *out = room(LONGEST), *in = room(LONGEST);
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    for (int round = 0; round < ROUNDS * SIZES; round++) {
        int len = sizes[round % SIZES], got;
        MPI_Status status;
        fill(out, len, rank, next, round);
        memset(in, 0xee, LONGEST);
        MPI_Sendrecv(out, len, MPI_BYTE, next, round, in, LONGEST, MPI_BYTE, before, round,
                     MPI_COMM_WORLD, &status);
        MPI_Get_count(&status, MPI_BYTE, &got);
        if (got != len) {
            fprintf(stderr, "ring: %d bytes in the place of %d\n", got, len);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        check("ring", in, len, before, rank, round);
    }
    free(out);
    free(in);
}

static void all_to_all(void)
{
    for (int round = 0; round < ROUNDS * SIZES; round++) {
        int len = sizes[round % SIZES] / 4;
        unsigned char *out = room((size_t)len * ranks), *in = room((size_t)len * ranks);
        for (int to = 0; to < ranks; to++)
            fill(out + (size_t)to * len, len, rank, to, round);
        MPI_Alltoall(out, len, MPI_BYTE, in, len, MPI_BYTE, MPI_COMM_WORLD);
        for (int from = 0; from < ranks; from++)
            check("all to all", in + (size_t)from * len, len, from, rank, round);
        free(out);
        free(in);
    }
}

/* Each rank's window has a place for each other one, and a number that all add to. */
static void windows(void)
{
    enum { PLACE = 70000 };
    MPI_Win win, counts;
    unsigned char *place = room((size_t)PLACE * ranks), *mine = room(PLACE);
    long *count = (long *)room(sizeof *count);
    *count = 0;
    MPI_Win_create(place, (MPI_Aint)PLACE * ranks, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_create(count, sizeof *count, sizeof *count, MPI_INFO_NULL, MPI_COMM_WORLD, &counts);
    for (int round = 0; round < ROUNDS; round++) {
        MPI_Win_fence(0, win);
        for (int to = 0; to < ranks; to++) {
            fill(mine, PLACE, rank, to, round);
            MPI_Win_lock(MPI_LOCK_SHARED, to, 0, win);
            MPI_Put(mine, PLACE, MPI_BYTE, to, (MPI_Aint)PLACE * rank, PLACE, MPI_BYTE, win);
            MPI_Win_unlock(to, win);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        /* What this rank wrote, by a GET. */
        for (int to = 0; to < ranks; to++) {
            memset(mine, 0xee, PLACE);
            MPI_Win_lock(MPI_LOCK_SHARED, to, 0, win);
            MPI_Get(mine, PLACE, MPI_BYTE, to, (MPI_Aint)PLACE * rank, PLACE, MPI_BYTE, win);
            MPI_Win_unlock(to, win);
            check("get", mine, PLACE, rank, to, round);
        }
        MPI_Win_fence(0, win);
        for (int from = 0; from < ranks; from++)
            check("put", place + (size_t)PLACE * from, PLACE, from, rank, round);
    }
    MPI_Win_fence(0, counts);
    for (int to = 0; to < ranks; to++) {
        for (int n = 0; n < 20; n++) {
            long one = rank + 1, before;
            MPI_Win_lock(MPI_LOCK_SHARED, to, 0, counts);
            MPI_Fetch_and_op(&one, &before, MPI_LONG, to, 0, MPI_SUM, counts);
            MPI_Win_unlock(to, counts);
        }
    }
    MPI_Win_fence(0, counts);
    long sum = 20L * ranks * (ranks + 1) / 2;
    if (*count != sum) {
        fprintf(stderr, "windows: rank %d has %ld in the place of %ld\n", rank, *count, sum);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Win_free(&counts);
    MPI_Win_free(&win);
    free(count);
    free(place);
    free(mine);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    ring();
    all_to_all();
    windows();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks: every byte as it was sent\n", ranks);
    MPI_Finalize();
    return 0;
}
