// A pretend libcuda.so.1: enough of the driver for the real cuda.bindings to run against without a GPU.
//
// Every call is printed with the arguments that matter and succeeds, unless STUB_STATUS names it:
// "cuMemAlloc=2 cuLaunchKernel=700". STUB_MISSING names a function that this "driver" is too old for.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Status;
typedef void* Handle;

enum { kInvalidValue = 1, kNotFound = 500 };

static Status status_of(const char* call) {
    const char* statuses = getenv("STUB_STATUS");
    const size_t length = strlen(call);
    for (const char* at = statuses; at && (at = strstr(at, call)); at += length) {
        if ((at == statuses || at[-1] == ' ') && at[length] == '=') return atoi(at + length + 1);
    }
    return 0;
}

#define CALL(name, ...)                      \
    do {                                     \
        printf(name " " __VA_ARGS__);        \
        printf("\n");                        \
        fflush(stdout);                      \
        const Status failed = status_of(name); \
        if (failed) return failed;           \
    } while (0)

static Status init(unsigned flags) { CALL("cuInit", "%u", flags); return 0; }
static Status device_count(int* count) { CALL("cuDeviceGetCount"); *count = 1; return 0; }
static Status driver_version(int* version) { *version = 13000; return status_of("cuDriverGetVersion"); }
static Status device_name(char* name, int length, int device) {
    CALL("cuDeviceGetName", "%d", device);
    snprintf(name, length, "Stub GPU");
    return 0;
}
static Status device_attribute(int* value, int attribute, int device) {
    CALL("cuDeviceGetAttribute", "%d %d", attribute, device);
    *value = 132;
    return 0;
}
static Status ctx_current(Handle* context) { CALL("cuCtxGetCurrent"); *context = (Handle)0xc0; return 0; }
static Status stream_create(Handle* stream, unsigned flags) {
    CALL("cuStreamCreate", "%u", flags);
    *stream = (Handle)0x7f0000000010;
    return 0;
}
static Status stream_synchronize(Handle stream) {
    CALL("cuStreamSynchronize", "%p", stream);
    usleep(300000);
    return 0;
}
static Status stream_query(Handle stream) { CALL("cuStreamQuery", "%p", stream); return 0; }
static Status event_create(Handle* event, unsigned flags) {
    CALL("cuEventCreate", "%u", flags);
    *event = (Handle)0xe0;
    return 0;
}
static Status mem_alloc(uint64_t* ptr, size_t nbytes) {
    CALL("cuMemAlloc", "%zu", nbytes);
    *ptr = 0xfffffffffffff000;
    return 0;
}
static Status copy_htod(uint64_t dst, const void* src, size_t nbytes, Handle stream) {
    CALL("cuMemcpyHtoDAsync", "%#lx %p %zu %p", dst, src, nbytes, stream);
    return 0;
}
static Status copy_dtoh(void* dst, uint64_t src, size_t nbytes, Handle stream) {
    CALL("cuMemcpyDtoHAsync", "%p %#lx %zu %p", dst, src, nbytes, stream);
    return 0;
}
static Status fill(uint64_t dst, unsigned char value, size_t count, Handle stream) {
    CALL("cuMemsetD8Async", "%#lx %u %zu %p", dst, value, count, stream);
    return 0;
}
static Status pointer_attribute(void* data, int attribute, uint64_t ptr) {
    const int kDeviceOrdinal = 9;
    CALL("cuPointerGetAttribute", "%d %#lx", attribute, ptr);
    *(int*)data = attribute == kDeviceOrdinal ? 3 : 2;
    return 0;
}
static Status module_load(Handle* module, const char* image, unsigned count, int* options, void** values) {
    strcpy(values[0], "ptxas says why");
    CALL("cuModuleLoadDataEx", "%s", image);
    *module = (Handle)0xd0;
    return 0;
}
static Status module_function(Handle* function, Handle module, const char* name) {
    CALL("cuModuleGetFunction", "%p %s", module, name);
    *function = (Handle)0xf0;
    return strcmp(name, "alpha") && strcmp(name, "beta") ? kNotFound : 0;
}
static Status function_count(unsigned* count, Handle module) { *count = 2; return 0; }
static Status functions(Handle* function, unsigned count, Handle module) {
    for (unsigned i = 0; i < count; ++i) function[i] = (Handle)(uintptr_t)(0xf1 - i);
    return 0;
}
static Status function_name(const char** name, Handle function) {
    *name = function == (Handle)0xf0 ? "alpha" : "beta";
    return 0;
}
static Status param_info(Handle function, size_t index, size_t* offset, size_t* size) {
    if (index >= 3) return kInvalidValue;
    *offset = index * 8;
    *size = index == 1 ? 4 : 8;
    return status_of("cuFuncGetParamInfo");
}
static Status set_attribute(Handle function, int attribute, int value) {
    CALL("cuFuncSetAttribute", "%p %d %d", function, attribute, value);
    return 0;
}
static Status launch(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                     unsigned shared_bytes, Handle stream, void** params, void** extra) {
    CALL("cuLaunchKernel", "%p (%u %u %u) (%u %u %u) %u %p %p %p", function, gx, gy, gz, bx, by, bz, shared_bytes, stream,
         (void*)params, (void*)extra);
    return 0;
}
static Status begin_capture(Handle stream, int mode) { CALL("cuStreamBeginCapture", "%p %d", stream, mode); return 0; }
static Status end_capture(Handle stream, Handle* graph) {
    *graph = NULL;
    CALL("cuStreamEndCapture", "%p", stream);
    *graph = (Handle)0xa0;
    return 0;
}
static Status is_capturing(Handle stream, int* capture) {
    CALL("cuStreamIsCapturing", "%p", stream);
    *capture = 2;
    return 0;
}
static Status exchange_mode(int* mode) {
    CALL("cuThreadExchangeStreamCaptureMode", "%d", *mode);
    *mode = 0;
    return 0;
}
static Status graph_nodes(Handle graph, Handle* nodes, size_t* count) {
    if (!nodes) *count = 3;
    for (size_t i = 0; nodes && i < *count; ++i) nodes[i] = (Handle)(uintptr_t)(0x10 + i);
    return 0;
}
static Status node_type(Handle node, int* type) { *type = (int)((uintptr_t)node - 0x10); return 0; }
static Status graph_launch(Handle graph, Handle stream) { CALL("cuGraphLaunch", "%p %p", graph, stream); return 0; }
static Status replace_address(Handle tensor_map, Handle address) {
    CALL("cuTensorMapReplaceAddress", "%p %p", tensor_map, address);
    return 0;
}
static Status free_async(uint64_t ptr, Handle stream) { CALL("cuMemFreeAsync", "0x%lx %p", ptr, stream); return 0; }
static Status capture_info(Handle stream, int* status, uint64_t* id, Handle* graph, Handle** nodes, void** edges,
                           size_t* count) {
    static Handle dependencies[] = {(Handle)0x10, (Handle)0x12};
    static uint64_t plain_edges[2];
    CALL("cuStreamGetCaptureInfo", "%p", stream);
    *status = 1;
    if (id) *id = 1;
    if (graph) *graph = (Handle)0xa0;
    if (nodes) *nodes = dependencies;
    if (edges) *edges = plain_edges;
    if (count) *count = 2;
    return 0;
}
static Status graph_edges(Handle graph, Handle* from, Handle* to, void* data, size_t* count) {
    if (!from) *count = 2;
    for (size_t i = 0; from && i < *count; ++i) {
        from[i] = (Handle)(uintptr_t)(0x10 + i);
        to[i] = (Handle)(uintptr_t)(0x11 + i);
    }
    return 0;
}

typedef struct {
    Handle function;
    unsigned grid[3], block[3], shared_bytes;
    void **params, **extra;
    Handle kernel, context;
} KernelNode;

typedef struct {
    size_t x, y, z, lod;
    int memory_type;
    void* host;
    uint64_t device;
    Handle array;
    void* reserved;
    size_t pitch, height;
} CopySide;

typedef struct {
    CopySide source, destination;
    size_t width, height, depth;
} CopyNode;

typedef struct {
    uint64_t destination;
    size_t pitch;
    unsigned value, element_size;
    size_t width, height;
} FillNode;

typedef struct {
    int result;
    Handle node, from;
} UpdateResult;

static Status update_kernel(Handle exec, Handle node, const KernelNode* to) {
    CALL("cuGraphExecKernelNodeSetParams", "%p %p: %p (%u %u %u) (%u %u %u) %u %p %p %p %p", exec, node, to->function,
         to->grid[0], to->grid[1], to->grid[2], to->block[0], to->block[1], to->block[2], to->shared_bytes,
         (void*)to->params, (void*)to->extra, to->kernel, to->context);
    return 0;
}
static Status update_copy(Handle exec, Handle node, const CopyNode* to, Handle context) {
    CALL("cuGraphExecMemcpyNodeSetParams", "%p %p: %d 0x%lx from %d 0x%lx, %zu x %zu x %zu, %p", exec, node,
         to->destination.memory_type, to->destination.device, to->source.memory_type, to->source.device, to->width,
         to->height, to->depth, context);
    return 0;
}
static Status update_fill(Handle exec, Handle node, const FillNode* to, Handle context) {
    CALL("cuGraphExecMemsetNodeSetParams", "%p %p: 0x%lx = %u, %u x %zu x %zu, %p", exec, node, to->destination,
         to->value, to->element_size, to->width, to->height, context);
    return 0;
}
static Status set_kernel(Handle node, const KernelNode* to) {
    CALL("cuGraphKernelNodeSetParams", "%p: %p %p", node, to->function, (void*)to->params);
    return 0;
}
static Status set_copy(Handle node, const CopyNode* to) {
    CALL("cuGraphMemcpyNodeSetParams", "%p: 0x%lx 0x%lx %zu", node, to->destination.device, to->source.device, to->width);
    return 0;
}
static Status set_fill(Handle node, const FillNode* to) {
    CALL("cuGraphMemsetNodeSetParams", "%p: 0x%lx %u %zu", node, to->destination, to->value, to->width);
    return 0;
}
static Status update_graph(Handle exec, Handle graph, UpdateResult* result) {
    memset(result, 0, sizeof *result);
    result->result = status_of("cuGraphExecUpdate") ? 2 : 0;
    CALL("cuGraphExecUpdate", "%p %p", exec, graph);
    return 0;
}
static Status error_string(int error, const char** text) { *text = "the driver's own words"; return 0; }
static Status any(void) { return 0; }

Status cuDriverGetVersion(int* version) { return driver_version(version); }

// ctypes looks functions up by name, as the bindings do not.
Status cuGraphExecUpdate_v2(Handle exec, Handle graph, UpdateResult* result) { return update_graph(exec, graph, result); }
Status cuPointerGetAttribute(void* data, int attribute, uint64_t ptr) { return pointer_attribute(data, attribute, ptr); }

Status cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* found) {
    static const struct {
        const char* name;
        void* function;
    } known[] = {
        {"cuInit", init},
        {"cuDeviceGetCount", device_count},
        {"cuDriverGetVersion", driver_version},
        {"cuDeviceGetName", device_name},
        {"cuDeviceGetAttribute", device_attribute},
        {"cuCtxGetCurrent", ctx_current},
        {"cuStreamCreate", stream_create},
        {"cuStreamSynchronize", stream_synchronize},
        {"cuStreamQuery", stream_query},
        {"cuEventCreate", event_create},
        {"cuMemAlloc", mem_alloc},
        {"cuMemcpyHtoDAsync", copy_htod},
        {"cuMemcpyDtoHAsync", copy_dtoh},
        {"cuMemsetD8Async", fill},
        {"cuPointerGetAttribute", pointer_attribute},
        {"cuModuleLoadDataEx", module_load},
        {"cuModuleGetFunction", module_function},
        {"cuModuleGetFunctionCount", function_count},
        {"cuModuleEnumerateFunctions", functions},
        {"cuFuncGetName", function_name},
        {"cuFuncGetParamInfo", param_info},
        {"cuFuncSetAttribute", set_attribute},
        {"cuLaunchKernel", launch},
        {"cuStreamBeginCapture", begin_capture},
        {"cuStreamEndCapture", end_capture},
        {"cuStreamIsCapturing", is_capturing},
        {"cuThreadExchangeStreamCaptureMode", exchange_mode},
        {"cuGraphGetNodes", graph_nodes},
        {"cuGraphNodeGetType", node_type},
        {"cuGraphLaunch", graph_launch},
        {"cuTensorMapReplaceAddress", replace_address},
        {"cuGraphGetEdges", graph_edges},
        {"cuGraphExecKernelNodeSetParams", update_kernel},
        {"cuGraphExecMemcpyNodeSetParams", update_copy},
        {"cuGraphExecMemsetNodeSetParams", update_fill},
        {"cuGraphKernelNodeSetParams", set_kernel},
        {"cuGraphMemcpyNodeSetParams", set_copy},
        {"cuGraphMemsetNodeSetParams", set_fill},
        {"cuStreamGetCaptureInfo", capture_info},
        {"cuMemFreeAsync", free_async},
        {"cuGetErrorString", error_string},
        {"cuGetProcAddress", cuGetProcAddress_v2},
    };
    const char* missing = getenv("STUB_MISSING");
    if (found) *found = 0;
    *function = missing && !strcmp(missing, name) ? NULL : (void*)any;
    for (size_t i = 0; *function && i < sizeof known / sizeof *known; ++i) {
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    }
    return 0;
}
