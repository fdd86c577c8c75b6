// Warp matrix multiply-accumulate (mma.sync, sm_80 and later): one PTX instruction to a wrapper.
//
// Lane l of a warp stands in row g = l / 4 and column t = l % 4 of an 8 x 4 grid. Of a 16 x 8 accumulator it
// holds {[g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1]}.
//
// 16-bit operands, 16 deep, in registers of two neighbours along the depth: of A the pairs at depth 2t of rows
// g and g + 8, then those at depth 2t + 8; of B those at depths 2t and 2t + 8 of column g. So two neighbouring
// accumulators, once rounded, are an operand A, and no lane has to move anything.
//
// TF32 operands, 8 deep, one to a register: of A depth t of rows g and g + 8, then depth t + 4; of B depths t
// and t + 4 of column g.
#pragma once

#include "common/element.cuh"
#include "common/ptx.cuh"

// ldmatrix.x4: four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8,
// and receives of each matrix the pair [g][2t], [g][2t + 1]. Of 32-bit elements that is [g][t].
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&matrices)[4], unsigned int address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// ldmatrix.x4.trans: the same of the transposed matrices: the pair [2t][g], [2t + 1][g].
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&matrices)[4], unsigned int address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// movmatrix.trans: an 8 x 8 matrix of 16-bit elements, of which a lane has [g][2t], [g][2t + 1], transposed.
__device__ __forceinline__ unsigned int movmatrix_trans(unsigned int matrix) {
    unsigned int transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

// mma.m16n8k16 of f16 or bf16: c += a b.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(
    float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(
    float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(
    float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.m16n8k8 of tf32: c += a b.
__device__ __forceinline__ void mma_m16n8k8_tf32(
    float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

