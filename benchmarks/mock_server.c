/* The fast mock of benchmarks/batch.py: one thread, epoll, HTTP/1.1 keep-alive.
 *
 * Answers every request with the same 200 and JSON body. It only looks for the end of the headers and the
 * content-length, so its own ceiling lies far above that of any Python client.
 * usage: mock_server BODY_FILE [LATENCY_MS]     prints the port it listens on, ends when stdin closes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 65536, BUF = 65536, RING = 1 << 20 };

struct conn { char *buf; size_t have, skip; };
struct due { long long at; int fd; unsigned gen; };

static struct conn conns[MAX_FD];
static unsigned gens[MAX_FD];
static struct due ring[RING];
static size_t head, tail;
static char *reply;
static size_t reply_len;

static long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void drop(int fd) {
    close(fd);
    free(conns[fd].buf);
    memset(&conns[fd], 0, sizeof conns[fd]);
    gens[fd]++;
}

static void answer(int fd) {
    size_t sent = 0;
    while (sent < reply_len) {
        ssize_t n = send(fd, reply + sent, reply_len - sent, MSG_NOSIGNAL);
        if (n > 0) sent += (size_t)n;
        else if (errno != EAGAIN && errno != EINTR) return;
    }
}

/* Bytes of the whole request at the start of the buffer, 0 when it is not complete. */
static size_t whole(struct conn *c) {
    c->buf[c->have] = 0;
    char *end = memmem(c->buf, c->have, "\r\n\r\n", 4);
    if (!end) return 0;
    char *field = strcasestr(c->buf, "content-length:");
    size_t body = field && field < end ? strtoul(field + 15, NULL, 10) : 0;
    return (size_t)(end - c->buf) + 4 + body;
}

static void readable(int fd, long long latency) {
    struct conn *c = &conns[fd];
    ssize_t n = recv(fd, c->buf + c->have, BUF - 1 - c->have, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) { drop(fd); return; }
    if (n < 0) return;
    c->have += (size_t)n;
    size_t len = whole(c);
    if (!len || c->have < len) return;
    memmove(c->buf, c->buf + len, c->have - len);
    c->have -= len;
    if (!latency) { answer(fd); return; }
    ring[tail++ % RING] = (struct due){now_us() + latency, fd, gens[fd]};
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    long long latency = argc > 2 ? (long long)(atof(argv[2]) * 1000) : 0;
    FILE *f = fopen(argv[1], "rb");
    if (!f) return 2;
    static char body[1 << 20];
    size_t body_len = fread(body, 1, sizeof body, f);
    reply = malloc(body_len + 256);
    reply_len = (size_t)sprintf(reply, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", body_len);
    memcpy(reply + reply_len, body, body_len);
    reply_len += body_len;

    int one = 1, s = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t al = sizeof a;
    if (bind(s, (void *)&a, sizeof a) || listen(s, 4096) || getsockname(s, (void *)&a, &al)) return 1;
    printf("%d\n", ntohs(a.sin_port));
    fflush(stdout);

    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = s}, evs[512];
    epoll_ctl(e, EPOLL_CTL_ADD, s, &ev);
    ev.data.fd = 0;
    epoll_ctl(e, EPOLL_CTL_ADD, 0, &ev);
    for (;;) {
        int wait = -1;
        if (head != tail) {
            long long left = ring[head % RING].at - now_us();
            wait = left <= 0 ? 0 : (int)((left + 999) / 1000);
        }
        int n = epoll_wait(e, evs, 512, wait);
        for (int i = 0; i < n; i++) {
            int fd = evs[i].data.fd;
            if (fd == 0) return 0;
            if (fd != s) { readable(fd, latency); continue; }
            for (int c; (c = accept4(s, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
                if (c >= MAX_FD) { close(c); continue; }
                setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                conns[c].buf = malloc(BUF);
                ev.data.fd = c;
                ev.events = EPOLLIN;
                epoll_ctl(e, EPOLL_CTL_ADD, c, &ev);
            }
        }
        for (long long t = now_us(); head != tail && ring[head % RING].at <= t; head++)
            if (gens[ring[head % RING].fd] == ring[head % RING].gen) answer(ring[head % RING].fd);
    }
}
