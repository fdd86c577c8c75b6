// Warpgroup matrix multiply-accumulate (wgmma, sm_90a): one PTX instruction to a wrapper.
//
// Four warps hold a 64 x N accumulator in f32. Register i of a lane is row
// 16 * warp + lane / 4 + 8 * (i / 2 % 2), column 2 * (lane % 4) + i % 2 + 8 * (i / 4). An A operand of
// 64 x 16 in registers is four pairs of 16-bit elements a lane, and lies as two neighbouring groups of
// eight accumulator columns do once they are rounded: no lane has to move anything.
//
// The instructions run asynchronously. Between wgmma_fence() and the wait that covers a product, nothing
// may touch its registers.
#pragma once

#include "common/element.cuh"
#include "common/ptx.cuh"

// A matrix operand in shared memory: slabs of 64 16-bit columns, rows 128 bytes apart, with the 128-byte
// swizzle, as the tensor memory accelerator writes them. `slab_bytes` from one slab to the next matters
// where the slabs run along M or N ("MN-major"); along K each slab is addressed by itself.
//
// Bits 0-13 of a descriptor are the address / 16, 16-29 the slab stride / 16, 32-45 the stride of eight
// rows / 16, and 62-63 the swizzle. Slabs must be aligned to 1024 bytes.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* matrix, unsigned int slab_bytes) {
    constexpr unsigned long long kEightRows = 1024 / 16;
    constexpr unsigned long long kSwizzle128 = 1;
    return (shared_address(matrix) & 0x3ffff) / 16 | static_cast<unsigned long long>(slab_bytes / 16) << 16 |
           kEightRows << 32 | kSwizzle128 << 62;
}

// The descriptor of what lies `bytes` further on. The address must stay in the low 18 bits.
__device__ __forceinline__ unsigned long long advance(unsigned long long descriptor, unsigned int bytes) {
    return descriptor + bytes / 16;
}

// wgmma.fence: registers written so far are ready for the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the products since the last one form a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: at most kPending of the latest groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: what computes these registers comes before the waits that follow, and what reads them
// after the waits that precede. The compiler sees no other tie between a wait and arithmetic.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// wgmma.mma_async m64nNk16: accumulator = A B + (accumulate ? accumulator : 0).
//
// ss: A and B from shared memory, both K-major (rows of A, and columns of B, are contiguous).
// rs: A from registers; B from shared memory, MN-major (rows of B are contiguous).
// rs_k_major: A from registers; B from shared memory, K-major.
template <typename T, int kColumns>
struct Wgmma;

#define WGMMA_REGISTERS_16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_REGISTERS_16_16 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_16_32 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_REGISTERS_16_48 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_OUTPUTS_16(d, o) \
    "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), \
    "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7]), \
    "+f"(d[o + 8]), "+f"(d[o + 9]), "+f"(d[o + 10]), "+f"(d[o + 11]), \
    "+f"(d[o + 12]), "+f"(d[o + 13]), "+f"(d[o + 14]), "+f"(d[o + 15])

#define WGMMA_REGISTERS_32 WGMMA_REGISTERS_16_0
#define WGMMA_OUTPUTS_32(d) WGMMA_OUTPUTS_16(d, 0)
#define WGMMA_REGISTERS_64 WGMMA_REGISTERS_16_0 ", " WGMMA_REGISTERS_16_16
#define WGMMA_OUTPUTS_64(d) WGMMA_OUTPUTS_16(d, 0), WGMMA_OUTPUTS_16(d, 16)
#define WGMMA_REGISTERS_96 WGMMA_REGISTERS_64 ", " WGMMA_REGISTERS_16_32
#define WGMMA_OUTPUTS_96(d) WGMMA_OUTPUTS_64(d), WGMMA_OUTPUTS_16(d, 32)
#define WGMMA_REGISTERS_128 WGMMA_REGISTERS_96 ", " WGMMA_REGISTERS_16_48
#define WGMMA_OUTPUTS_128(d) WGMMA_OUTPUTS_96(d), WGMMA_OUTPUTS_16(d, 48)

// A from registers. The operands behind the accumulator's are numbered from N / 2 on.
#define WGMMA_FROM_REGISTERS(NAME, B_IS_MN_MAJOR, TYPE, N, O0, O1, O2, O3, O4, O5)                               \
    static __device__ __forceinline__ void NAME(                                                                 \
        float (&d)[N / 2], const unsigned int* a, unsigned long long b, bool accumulate) {                       \
        asm volatile(                                                                                            \
            "{\n"                                                                                                \
            ".reg .pred p;\n"                                                                                    \
            "setp.ne.b32 p, " O5 ", 0;\n"                                                                        \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_REGISTERS_##N "}, {"      \
            O0 ", " O1 ", " O2 ", " O3 "}, " O4 ", p, 1, 1, " B_IS_MN_MAJOR ";\n"                                \
            "}"                                                                                                  \
            : WGMMA_OUTPUTS_##N(d)                                                                               \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));            \
    }

#define WGMMA_WRAPPERS(T, TYPE, N, O0, O1, O2, O3, O4, O5)                                                       \
    template <>                                                                                                  \
    struct Wgmma<T, N> {                                                                                         \
        static __device__ __forceinline__ void ss(                                                               \
            float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {                    \
            asm volatile(                                                                                        \
                "{\n"                                                                                            \
                ".reg .pred p;\n"                                                                                \
                "setp.ne.b32 p, " O2 ", 0;\n"                                                                    \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_REGISTERS_##N "}, " O0 \
                ", " O1 ", p, 1, 1, 0, 0;\n"                                                                     \
                "}"                                                                                              \
                : WGMMA_OUTPUTS_##N(d)                                                                           \
                : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                            \
        }                                                                                                        \
        WGMMA_FROM_REGISTERS(rs, "1", TYPE, N, O0, O1, O2, O3, O4, O5)                                           \
        WGMMA_FROM_REGISTERS(rs_k_major, "0", TYPE, N, O0, O1, O2, O3, O4, O5)                                   \
    }

WGMMA_WRAPPERS(__half, "f16", 32, "%16", "%17", "%18", "%19", "%20", "%21");
WGMMA_WRAPPERS(__half, "f16", 64, "%32", "%33", "%34", "%35", "%36", "%37");
WGMMA_WRAPPERS(__half, "f16", 96, "%48", "%49", "%50", "%51", "%52", "%53");
WGMMA_WRAPPERS(__half, "f16", 128, "%64", "%65", "%66", "%67", "%68", "%69");
WGMMA_WRAPPERS(__nv_bfloat16, "bf16", 32, "%16", "%17", "%18", "%19", "%20", "%21");
WGMMA_WRAPPERS(__nv_bfloat16, "bf16", 64, "%32", "%33", "%34", "%35", "%36", "%37");
WGMMA_WRAPPERS(__nv_bfloat16, "bf16", 96, "%48", "%49", "%50", "%51", "%52", "%53");
WGMMA_WRAPPERS(__nv_bfloat16, "bf16", 128, "%64", "%65", "%66", "%67", "%68", "%69");
