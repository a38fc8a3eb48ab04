/* Two TAP devices joined by a delay line in both directions, for kernels without netem.
 *
 *     delay_line A B MICROSECONDS MBIT      0 Mbit/s: no limit of the rate. Prints "ready"; then A and B may be moved into namespaces.
 *
 * A frame leaves on the other side when all frames before it have left, its own bits have passed at the rate, and the delay is over.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 16384 /* frames on their way; more are dropped */
#define FRAME 65600 /* bytes of the largest frame */
#define BATCH 64    /* frames that are read before those that are due are written */

struct frame {
    char *bytes;
    int length;
    int64_t due;
};

struct direction {
    int in, out;
    int64_t delay;
    double mbit;
};

static int open_tap(const char *name)
{
    struct ifreq request;
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0) {
        perror("/dev/net/tun");
        exit(1);
    }
    return fd;
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *carry(void *argument)
{
    struct direction *d = argument;
    struct frame *line = calloc(SLOTS, sizeof *line);
    char *read_into = malloc(FRAME);
    int64_t free_at = 0;
    unsigned first = 0, end = 0;
    prctl(PR_SET_TIMERSLACK, 1000);
    for (;;) {
        struct pollfd wait = {d->in, POLLIN, 0};
        struct timespec left, *timeout = NULL;
        int64_t time = now();
        for (; first != end && line[first % SLOTS].due <= time; first++) {
            struct frame *f = &line[first % SLOTS];
            (void)!write(d->out, f->bytes, f->length);
            free(f->bytes);
        }
        if (first != end) {
            int64_t until = line[first % SLOTS].due - now();
            until = until < 0 ? 0 : until;
            left.tv_sec = until / 1000000000;
            left.tv_nsec = until % 1000000000;
            timeout = &left;
        }
        if (ppoll(&wait, 1, timeout, NULL) <= 0)
            continue;
        for (int i = 0; i < BATCH; i++) {
            int length = read(d->in, read_into, FRAME);
            struct frame *f = &line[end % SLOTS];
            if (length <= 0)
                break;
            if (end - first >= SLOTS)
                continue;
            time = now();
            free_at = free_at < time ? time : free_at;
            if (d->mbit > 0)
                free_at += (int64_t)(length * 8 * 1000.0 / d->mbit);
            f->bytes = malloc(length);
            memcpy(f->bytes, read_into, length);
            f->length = length;
            f->due = free_at + d->delay;
            end++;
        }
    }
    return NULL;
}

int main(int count, char **given)
{
    pthread_t thread;
    if (count != 5) {
        fprintf(stderr, "usage: delay_line A B MICROSECONDS MBIT\n");
        return 2;
    }
    int a = open_tap(given[1]), b = open_tap(given[2]);
    int64_t delay = atoll(given[3]) * 1000;
    double mbit = atof(given[4]);
    struct direction there = {a, b, delay, mbit}, back = {b, a, delay, mbit};
    printf("ready\n");
    fflush(stdout);
    pthread_create(&thread, NULL, carry, &there);
    carry(&back);
    return 0;
}
