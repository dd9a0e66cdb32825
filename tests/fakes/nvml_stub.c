/* A libnvidia-ml.so.1 whose GPUs stand in a text file, read again on every call.
 *
 * It is called `devices` and lies beside the library; `tests/fakes/nvml.py` writes it. One line each,
 * tab-separated:
 *
 *   init   RETURN_CODE                     what nvmlInit answers; -1: nothing, ever, -2: it crashes
 *   memory RETURN_CODE_V1 RETURN_CODE_V2   what the memory queries answer
 *   gpu    UUID NAME TOTAL RESERVED USED MAJOR MINOR MIG_MODE RETURN_CODE
 *   mig    PLACE UUID NAME TOTAL RESERVED USED     a MIG device of the last gpu
 *   proc   PID USED                                of the last gpu or mig device
 *
 * Sizes are bytes. A handle is (number of the gpu + 1) * 64 + place of the MIG device + 1 (or 0).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, PLACES = 7 };
typedef unsigned long long u64;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct {
    size_t handle;
    char uuid[96], name[96];
    u64 total, reserved, used;
    int major, minor, mig_mode, result, process_count;
    process_t processes[64];
} device_t;

static device_t devices[64];
static int device_count, init_result, memory_v1_result, memory_v2_result;

static FILE *open_devices(void) {
    Dl_info library;
    char path[4096];
    if (!dladdr((void *)open_devices, &library)) return NULL;
    const char *end = strrchr(library.dli_fname, '/');
    int length = end ? (int)(end - library.dli_fname) : 1;
    const char *folder = end ? library.dli_fname : ".";
    if (snprintf(path, sizeof path, "%.*s/devices", length, folder) >= (int)sizeof path) return NULL;
    return fopen(path, "r");
}

static void load(void) {
    char line[1024];
    size_t gpu = 0;
    device_t *last = NULL;
    device_count = init_result = memory_v1_result = memory_v2_result = 0;
    FILE *file = open_devices();
    if (!file) { init_result = 9; return; }
    while (fgets(line, sizeof line, file)) {
        device_t d;
        size_t place;
        process_t p = {0};
        memset(&d, 0, sizeof d);
        if (sscanf(line, "init\t%d", &init_result) == 1) continue;
        if (sscanf(line, "memory\t%d\t%d", &memory_v1_result, &memory_v2_result) == 2) continue;
        if (last && sscanf(line, "proc\t%u\t%llu", &p.pid, &p.used) == 2) {
            last->processes[last->process_count++] = p;
        } else if (sscanf(line, "gpu\t%95[^\t]\t%95[^\t]\t%llu\t%llu\t%llu\t%d\t%d\t%d\t%d", d.uuid,
                          d.name, &d.total, &d.reserved, &d.used, &d.major, &d.minor, &d.mig_mode,
                          &d.result) == 9) {
            d.handle = ++gpu * 64;
            last = &devices[device_count++];
            *last = d;
        } else if (gpu && sscanf(line, "mig\t%zu\t%95[^\t]\t%95[^\t]\t%llu\t%llu\t%llu", &place,
                                 d.uuid, d.name, &d.total, &d.reserved, &d.used) == 6) {
            d.handle = gpu * 64 + place + 1;
            last = &devices[device_count++];
            *last = d;
        }
    }
    fclose(file);
}

static device_t *find(size_t handle) {
    load();
    for (int i = 0; i < device_count; i++)
        if (devices[i].handle == handle) return &devices[i];
    return NULL;
}

#define DEVICE(handle)                    \
    device_t *d = find((size_t)(handle)); \
    if (!d) return INVALID;               \
    if (d->result) return d->result;

static int text(const char *from, char *to, unsigned size) {
    if (strlen(from) + 1 > size) return TOO_SMALL;
    strcpy(to, from);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    load();
    while (init_result == -1) pause();
    if (init_result == -2) abort();
    return init_result;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text("580.95.05", to, size); }
int nvmlSystemGetNVMLVersion(char *to, unsigned size) { return text("13.580.95.05", to, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }

const char *nvmlErrorString(int result) {
    switch (result) {
    case OK: return "Success";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    load();
    *count = 0;
    for (int i = 0; i < device_count; i++) *count += devices[i].handle % 64 == 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t *handle) {
    DEVICE((index + 1) * 64);
    *handle = d->handle;
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, size_t *handle) {
    load();
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) { *handle = devices[i].handle; return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(size_t handle, unsigned *index) {
    DEVICE(handle);
    *index = (unsigned)(handle / 64 - 1);
    return OK;
}

int nvmlDeviceGetUUID(size_t handle, char *to, unsigned size) {
    DEVICE(handle);
    return text(d->uuid, to, size);
}

int nvmlDeviceGetName(size_t handle, char *to, unsigned size) {
    DEVICE(handle);
    return text(d->name, to, size);
}

int nvmlDeviceGetMemoryInfo(size_t handle, u64 *total_free_used) {
    DEVICE(handle);
    if (memory_v1_result) return memory_v1_result;
    total_free_used[0] = d->total;
    total_free_used[1] = d->total - d->reserved - d->used;
    total_free_used[2] = d->reserved + d->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(size_t handle, u64 *version_total_reserved_free_used) {
    DEVICE(handle);
    if (memory_v2_result) return memory_v2_result;
    u64 values[] = {d->total, d->reserved, d->total - d->reserved - d->used, d->used};
    memcpy(version_total_reserved_free_used + 1, values, sizeof values);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(size_t handle, int *major, int *minor) {
    DEVICE(handle);
    if (handle % 64) return NOT_SUPPORTED;
    *major = d->major;
    *minor = d->minor;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(size_t handle, unsigned *count, process_t *to) {
    DEVICE(handle);
    unsigned room = *count;
    *count = (unsigned)d->process_count;
    if (room < *count) return TOO_SMALL;
    if (*count) memcpy(to, d->processes, *count * sizeof *to);
    return OK;
}

int nvmlDeviceGetMigMode(size_t handle, unsigned *current, unsigned *pending) {
    DEVICE(handle);
    if (d->mig_mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)d->mig_mode;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(size_t handle, unsigned *count) {
    DEVICE(handle);
    *count = PLACES;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(size_t handle, unsigned place, size_t *mig) {
    device_t *d = find(handle + place + 1);
    if (!d) return NOT_FOUND;
    *mig = d->handle;
    return OK;
}
