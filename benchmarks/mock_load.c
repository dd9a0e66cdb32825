/* Loads mock_server to find its own ceiling: usage mock_load PORT CONNECTIONS REQUESTS BODY_FILE.
 *
 * Keeps one request in flight a connection, reads replies by their content-length of the first one,
 * and prints requests per second.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    int port = atoi(argv[1]), conns = atoi(argv[2]), one = 1;
    long todo = atol(argv[3]), sent = 0, done = 0;
    static char body[1 << 16], request[1 << 17], buf[1 << 17];
    FILE *f = fopen(argv[4], "rb");
    if (!f) return 2;
    size_t body_len = fread(body, 1, sizeof body, f);
    size_t len = (size_t)sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %zu\r\n\r\n", body_len);
    memcpy(request + len, body, body_len);
    len += body_len;
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN}, evs[512];
    size_t *have = calloc(65536, sizeof *have), reply = 0;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (int i = 0; i < conns; i++) {
        int s = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(s, (void *)&a, sizeof a)) return 1;
        setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        ev.data.fd = s;
        epoll_ctl(e, EPOLL_CTL_ADD, s, &ev);
        if (send(s, request, len, 0) != (ssize_t)len) return 1;
        sent++;
    }
    while (done < sent) {
        int n = epoll_wait(e, evs, 512, -1);
        for (int i = 0; i < n; i++) {
            int s = evs[i].data.fd;
            ssize_t got = recv(s, buf, sizeof buf - 1, 0);
            if (got <= 0) return 1;
            if (!reply) {
                buf[got] = 0;
                char *end = strstr(buf, "\r\n\r\n"), *field = strcasestr(buf, "content-length:");
                if (!end || !field) return 1;
                reply = (size_t)(end - buf) + 4 + strtoul(field + 15, NULL, 10);
            }
            have[s] += (size_t)got;
            if (have[s] < reply) continue;
            have[s] -= reply;
            done++;
            if (sent < todo) {
                if (send(s, request, len, 0) != (ssize_t)len) return 1;
                sent++;
            }
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &t1);
    printf("%.0f\n", done / ((t1.tv_sec - t0.tv_sec) + (t1.tv_nsec - t0.tv_nsec) / 1e9));
    return 0;
}
