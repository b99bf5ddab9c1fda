/* CUDA driver of a Hopper GPU that runs nothing: it accepts machine code and launches, and writes
   down what was launched. Triton compiles its launchers against the real header, so that their
   calls are those of a real driver. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int Result;
typedef void *Pointer;
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200 };
enum { ROOM = 4096, LENGTH = 256 };

static char record[ROOM][LENGTH];
static int launches;

int stub_launches(void) { return launches; }
const char *stub_launched(int index) { return record[index % ROOM]; }

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = 0; return SUCCESS; }

/* an H100 as far as the compiler asks; 1 for the attributes that nobody computes with */
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {
        {8, 49152},    /* shared memory per block */
        {10, 32},      /* warp size */
        {12, 65536},   /* registers per block */
        {13, 1755000}, /* clock rate, kHz */
        {16, 132},     /* multiprocessors */
        {36, 2619000}, /* memory clock rate, kHz */
        {37, 5120},    /* memory bus width */
        {39, 2048},    /* threads per multiprocessor */
        {75, 9},       /* compute capability, major */
        {76, 0},       /* compute capability, minor */
        {81, 233472},  /* shared memory per multiprocessor */
        {82, 65536},   /* registers per multiprocessor */
        {97, 232448},  /* shared memory per block, opt-in */
    };
    *value = 1;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Pointer *context, int device) { *context = (Pointer)1; return SUCCESS; }
Result cuCtxGetCurrent(Pointer *context) { *context = (Pointer)1; return SUCCESS; }
Result cuCtxSetCurrent(Pointer context) { return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
Result cuCtxSynchronize(void) { return SUCCESS; }
Result cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return SUCCESS; }
Result cuGetErrorString(int error, const char **text) { *text = "refused by the stub driver"; return SUCCESS; }

Result cuModuleLoadData(Pointer *module, const void *image) {
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    *module = (Pointer)1;
    return SUCCESS;
}
Result cuModuleUnload(Pointer module) { return SUCCESS; }

/* a function is its name */
Result cuModuleGetFunction(Pointer *function, Pointer module, const char *name) {
    *function = strdup(name);
    return SUCCESS;
}
Result cuFuncGetAttribute(int *value, int attribute, Pointer function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads per block; registers */
    return SUCCESS;
}
Result cuFuncSetAttribute(Pointer function, int attribute, int value) { return SUCCESS; }
Result cuFuncSetCacheConfig(Pointer function, int config) { return SUCCESS; }
Result cuOccupancyMaxActiveClusters(int *count, Pointer function, const void *config) { *count = 1; return SUCCESS; }

/* any address is one of the device */
Result cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    memcpy(value, &address, sizeof address);
    return SUCCESS;
}
Result cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t address) {
    for (unsigned i = 0; i < count; i++) memcpy(values[i], &address, sizeof address);
    return SUCCESS;
}
Result cuTensorMapEncodeTiled(void) { return SUCCESS; }
Result cuTensorMapEncodeIm2col(void) { return SUCCESS; }
Result cuStreamIsCapturing(Pointer stream, int *status) { *status = 0; return SUCCESS; }
Result cuStreamSynchronize(Pointer stream) { return SUCCESS; }

typedef struct { unsigned grid[3], block[3], shared; } Config;

Result cuLaunchKernelEx(const Config *config, Pointer function, void **parameters, void **extra) {
    if (!parameters || !parameters[0] || !config->grid[0] || config->block[0] % 32) return INVALID_VALUE;
    snprintf(record[launches++ % ROOM], LENGTH, "%s %u %u %u %u", (char *)function,
             config->grid[0], config->grid[1], config->grid[2], config->block[0]);
    return SUCCESS;
}
Result cuLaunchKernel(Pointer function, unsigned x, unsigned y, unsigned z, unsigned threads,
                      unsigned by, unsigned bz, unsigned shared, Pointer stream, void **parameters,
                      void **extra) {
    Config config = {{x, y, z}, {threads, by, bz}, shared};
    return cuLaunchKernelEx(&config, function, parameters, extra);
}
Result cuLaunchCooperativeKernel(Pointer function, unsigned x, unsigned y, unsigned z,
                                 unsigned threads, unsigned by, unsigned bz, unsigned shared,
                                 Pointer stream, void **parameters) {
    return cuLaunchKernel(function, x, y, z, threads, by, bz, shared, stream, parameters, 0);
}
