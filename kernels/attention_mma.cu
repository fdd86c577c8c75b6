// Attention for f16 and bf16 on the tensor cores of sm_80 and later, through mma.sync, ldmatrix and cp.async.
//
//   output[b,h,i,:] = sum_j w_j value[b,h/group,j,:] / sum_j w_j
//   w_j = exp(softcap(scale * q[b,h,i,:] . key[b,h/group,j,:]) + mask[b,h,i,j] - max over j)
//
//   q, output   [B, H, sq, D]
//   key, value  [B, H/group, kv_capacity, D], of which the first sk rows of a plane are read
//   mask        rows [sq, sk] at b * mask_batch_stride + h * mask_head_stride, in elements
//
// A block owns BLOCK_QUERIES rows of one plane, 32 to a warp, and walks their keys from the last block of
// BLOCK_KEYS to the first. Blocks of keys and of values alternate in a ring of STAGES tiles of shared memory,
// filled STAGES - 1 ahead. A warp keeps its scores and its 32 x D sums in registers: one read of a tile serves
// two matrix products, without which shared memory would be the limit. The weights are the left operand of the
// second product as they come.
//
// A row's weights are measured from a maximum that it has seen, which need not be its latest: the origin moves
// when a score exceeds it by more than the headroom of the type. Most blocks then need neither the maximum of
// the whole row, which four lanes share, nor new sums. f16 weights are scaled by 2^12, and the headroom is 2^3:
// 2^15 is the greatest power of two, and weights down to 2^-36 of the largest survive.
//
// 0 * NaN is NaN on a tensor core too. A tile is first computed as if all values were finite. Only if a sum is
// not, and keys of a block were hidden from some row, is the tile computed again, and then values that are not
// finite are taken out of such blocks and added afterwards, to the rows that may see them.
#include "common/attention_tile.cuh"
#include "common/half_element.cuh"
#include "common/mma.cuh"

constexpr int kBlockQueries = BLOCK_QUERIES;
// From sm_100 on the compiler finds no registers for a larger block beyond a head_dim of 64.
constexpr int kBlockKeys = __CUDA_ARCH__ >= 1000 && HEAD_DIM > 64 && BLOCK_KEYS > 48 ? 48 : BLOCK_KEYS;
constexpr int kStages = STAGES;
constexpr int kMaskWidth = MASK_WIDTH;  // mask elements that one access may read
constexpr int kWarpRows = 32;
constexpr int kRowTiles = kWarpRows / 16;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kPaddedDim = (kHeadDim + 15) / 16 * 16;
constexpr int kDimTiles = kPaddedDim / 8;
constexpr int kRowColumns = kHeadDim <= 64 ? 64 : 128;  // of a row in shared memory
constexpr int kRowBytes = kRowColumns * sizeof(Element);
static_assert(sizeof(Element) == 2, "f16 or bf16");
static_assert(kHeadDim % 8 == 0, "a row is a whole number of 16-byte chunks");
static_assert(kBlockQueries == kThreads / 32 * kWarpRows, "a warp owns 32 query rows");
static_assert(kBlockKeys % 16 == 0, "a block of keys is a whole number of products");

using Rows = TileRows<kWarpRows>;

// Beside the tiles lies what does not change while a tile of rows is computed: registers are short.
struct Smem {
    Element q[kBlockQueries][kRowColumns];  // and at the end the output
    Element ring[kStages][BLOCK_KEYS][kRowColumns];
    Rows rows;
    KeyBlocks blocks;
    const Element* planes[2];  // of keys and of values
};
static_assert(sizeof(Smem) == SHARED_BYTES, "host and kernel agree on the shared memory");

constexpr float kLog2E = 1.4426950408889634f;

// Where a 16-byte chunk of a row lies in a tile. The chunks of eight rows at one column hit all 32 banks.
__device__ __forceinline__ constexpr unsigned int chunk_offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ row % 8) * 16;
}

// As above, `chunks` further on along the row from the address of a chunk without that bit set.
__device__ __forceinline__ unsigned int advance_chunks(unsigned int address, int chunks) {
    return address ^ chunks * 16;
}

struct TileLayout {
    static constexpr int kColumns = kPaddedDim;
    static __device__ __forceinline__ unsigned int offset(int row, int column) {
        return chunk_offset(row, column / 8) + column % 8 * sizeof(Element);
    }
};

// What a lane holds of its warp's 32 rows: element [m][n][i] is of row 16 m + 8 (i / 2) and column 8 n + i % 2
// from the lane's first on, which are row lane / 4 and column 2 (lane % 4).
using Scores = float[kRowTiles][kKeyTiles][4];
using Sums = float[kRowTiles][kDimTiles][4];

// A lane's four rows, [m][i / 2] as above.
struct RowState {
    float offset[kRowTiles][2];  // what is subtracted from a score before the exponential; -inf: no score yet
    float sum[kRowTiles][2];     // of the weights of this lane's keys
};

constexpr float kUnit = kHasMask ? kLog2E : 1.0f;  // of a score, in units of log2

// Beyond this the offset is the maximum itself: neither the exponent of the weight at the maximum nor the
// headroom would be exact.
constexpr float kLargeOffset = 65536.0f;

__device__ __forceinline__ float offset_of(float row_max) {
    return fabsf(row_max) < kLargeOffset ? row_max - Traits::kWeightExponent / kUnit : row_max;
}

// The greatest score that needs no new offset.
__device__ __forceinline__ float limit_of(float offset) {
    constexpr float kAbove = (Traits::kWeightExponent + Traits::kHeadroom) / kUnit;
    return fabsf(offset) < kLargeOffset ? offset + kAbove : offset;
}

// What turns a dot product into a score. Scores count in units of log2, but with a mask in natural ones: the
// lowest mask times log2(e) would overflow.
struct ScoreScale {
    float dot;   // one of a dot product in a score; with softcap, in the exponent of its tanh
    float tanh;  // one of the tanh in a score

    __device__ __forceinline__ ScoreScale(float scale, float softcap) {
        const float unit = kHasMask ? 1.0f : kLog2E;
        dot = kHasSoftcap ? 2.0f * kLog2E * (scale / softcap) : scale * unit;
        tanh = softcap * unit;
    }

    __device__ __forceinline__ float score(float product) const {
        const float scaled = __fmul_rn(product, dot);
        if (!kHasSoftcap) return scaled;
        return tanh * fmaf(-2.0f, rcp(ex2(scaled) + 1.0f), 1.0f);  // tanh(x) = 1 - 2 / (e^2x + 1)
    }
};

// scores = q . the keys of a tile; `q` and `keys` are where the lane's matrices begin.
__device__ __forceinline__ void multiply_keys(Scores& scores, unsigned int q, unsigned int keys) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
        }
    }
#pragma unroll
    for (int d = 0; d < kPaddedDim; d += 16) {
        unsigned int a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(a[m], advance_chunks(q, d / 8) + m * 16 * kRowBytes);
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            unsigned int b[4];
            ldmatrix_x4(b, advance_chunks(keys, d / 8) + n * 8 * kRowBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<Element>(scores[m][n], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(scores[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// sums += weights . the values of a tile.
__device__ __forceinline__ void add_values(Sums& sums, const Scores& weights, unsigned int values) {
#pragma unroll
    for (int k = 0; k < kKeyTiles; k += 2) {
        unsigned int a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = &weights[m][k + i / 2][i % 2 * 2];
                a[m][i] = Traits::pack(pair[0], pair[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
            unsigned int b[4];
            ldmatrix_x4_trans(b, advance_chunks(values, n) + k * 8 * kRowBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<Element>(sums[m][n], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Dot products to scores, and -inf where a row may not see the key. `first_key` is of the lane's first column.
__device__ __forceinline__ void finish_scores(Scores& scores, const Rows& rows, const ScoreScale& scale,
                                              int first_key, bool is_partial, unsigned int& has_key) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] = scale.score(scores[m][n][i]);
        }
    }
    if (!kHasMask && !is_partial) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange range = rows.range(m * 2 + r);
            const int begin = static_cast<int>(range.begin) - first_key;
            const int end = static_cast<int>(range.end) - first_key;
            const Element* const mask = kHasMask ? rows.mask(m * 2 + r) + first_key : nullptr;
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
                const unsigned int pair = kHasMask ? load_pair<kMaskWidth>(mask + n * 8, end - n * 8) : 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = n * 8 + i;
                    float& score = scores[m][n][r * 2 + i];
                    bool is_allowed = column < end && (!kHasWindow || begin <= column);
                    if (kHasMask) {
                        const float bias = Traits::unpack(pair, i);
                        is_allowed &= bias != negative_infinity();
                        score += bias;
                        has_key |= static_cast<unsigned int>(is_allowed) << (m * 2 + r);
                    }
                    if (!is_allowed) score = negative_infinity();
                }
            }
        }
    }
}

// Where a score exceeds its row's limit, move the origins of the warp's rows to their maxima, and rescale the
// sums.
__device__ __forceinline__ void move_origins(const Scores& scores, RowState& state, Sums& sums) {
    float max[kRowTiles][2];
    bool must_move = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            max[m][r] = scores[m][0][r * 2];
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) max[m][r] = fmaxf(max[m][r], scores[m][n][r * 2 + i]);
            }
            must_move |= max[m][r] > limit_of(state.offset[m][r]);
        }
    }
    if (!__any_sync(kFullWarp, must_move)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float row_max = fmaxf(max[m][r], __shfl_xor_sync(kFullWarp, max[m][r], 1));
            row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
            if (!(row_max > limit_of(state.offset[m][r]))) continue;
            const float offset = offset_of(row_max);
            const float rescale = ex2((state.offset[m][r] - offset) * kUnit);
            state.offset[m][r] = offset;
            state.sum[m][r] *= rescale;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                sums[m][n][r * 2] *= rescale;
                sums[m][n][r * 2 + 1] *= rescale;
            }
        }
    }
}

// Turn scores into weights, and add them to the rows' sums.
__device__ __forceinline__ void weigh(Scores& scores, RowState& state) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float offset = softmax_origin(state.offset[m][r]);
            float sums[2] = {};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[m][n][r * 2 + i];
                    score = ex2(kHasMask ? (score - offset) * kLog2E : score - offset);
                    sums[i] += score;
                }
            }
            state.sum[m][r] += sums[0] + sums[1];
        }
    }
}

// Replace what is not finite in a tile of values by zeros; returns whether there was anything.
__device__ __forceinline__ bool take_out_spoilt(Element (&values)[BLOCK_KEYS][kRowColumns]) {
    constexpr int kChunks = kPaddedDim / 8;
    bool found = false;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlockKeys * kChunks; i += kThreads) {
        unsigned int* const words =
            reinterpret_cast<unsigned int*>(&values[0][0]) + chunk_offset(i / kChunks, i % kChunks) / 4;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            unsigned int word = words[w];
            if (!is_finite(Traits::unpack(word, 0))) word &= 0xffff0000u;
            if (!is_finite(Traits::unpack(word, 1))) word &= 0x0000ffffu;
            found |= word != words[w];
            words[w] = word;
        }
    }
    return found;
}

// Add the values of a block that are not finite to the rows that may see them. A finite positive weight does not
// change an infinity or a NaN, and a NaN weight has spoilt the row already.
__device__ __forceinline__ void add_spoilt_values(
    Sums& sums, const Element* values, const Rows& rows, unsigned int first_key) {
    const int lane_column = fresh_thread() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange range = rows.range(m * 2 + r);
            const unsigned int end = min(range.end, first_key + kBlockKeys);
#pragma unroll 1
            for (unsigned int key = max(range.begin, first_key); key < end; ++key) {
                if (kHasMask && to_f32(rows.mask(m * 2 + r)[key]) == negative_infinity()) continue;
                const Element* const row = values + static_cast<long long>(key) * kHeadDim;
#pragma unroll
                for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (n * 8 >= kHeadDim) continue;
                        const float value = to_f32(row[n * 8 + lane_column + i]);
                        if (!is_finite(value)) sums[m][n][r * 2 + i] += value;
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ bool are_finite(const Sums& sums) {
    float spoilt = 0.0f;  // becomes NaN
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) spoilt = fmaf(sums[m][n][i], 0.0f, spoilt);
        }
    }
    return spoilt == 0.0f;
}

// Divide by the denominators, round, and put the warp's rows into its own part of the tile.
__device__ __forceinline__ void stage_output(
    unsigned int tile, const Sums& sums, const RowState& state, const Rows& rows, unsigned int has_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = state.sum[m][r];
            sum += __shfl_xor_sync(kFullWarp, sum, 1);
            sum += __shfl_xor_sync(kFullWarp, sum, 2);
            const KeyRange range = rows.range(m * 2 + r);
            const bool has = kHasMask ? (has_key >> (m * 2 + r) & 1) != 0 : range.begin < range.end;
            // Over no key at all the result is 0; over keys whose scores are all -inf it is 0 * inf.
            const float factor = has ? rcp(sum) : 0.0f;
            const int row = threadIdx.x / 32 * kWarpRows + m * 16 + r * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                float pair[2] = {sums[m][n][r * 2] * factor, sums[m][n][r * 2 + 1] * factor};
                // The denominator sums weights that are not rounded: for that an average of finite values must
                // not become infinite.
                if (Traits::kMayOverflow) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (is_finite(pair[i])) pair[i] = fminf(fmaxf(pair[i], -Traits::kMax), Traits::kMax);
                    }
                }
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + chunk_offset(row, n) + lane % 4 * 4),
                             "r"(Traits::pack(pair[0], pair[1]))
                             : "memory");
            }
        }
    }
}

__device__ __forceinline__ void store_output(
    Element* output, const Element (&tile)[kBlockQueries][kRowColumns], const Rows& rows) {
    Element* const first_row = output + (static_cast<long long>(rows.plane) * rows.sq + rows.first) * kHeadDim;
    constexpr int kAccesses = kHeadDim / kLoadWidth;
    const int warp_row = threadIdx.x / 32 * kWarpRows;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < kWarpRows * kAccesses; i += 32) {
        const int row = warp_row + i / kAccesses;
        const int column = i % kAccesses * kLoadWidth;
        if (rows.first + row >= rows.sq) break;
        const Element* const source = &tile[0][0] + chunk_offset(row, column / 8) / sizeof(Element) + column % 8;
        store_pack(first_row + row * kHeadDim + column, load_pack<kLoadWidth>(source));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ENTRY(
    const Element* q, const Element* key, const Element* value, const Element* mask, const int* total_lengths,
    const int* past_lengths, Element* output, unsigned int* capture_error, int q_heads, int group, int sq, int sk,
    int kv_capacity, long long mask_batch_stride, long long mask_head_stride, int local_window, float scale,
    float softcap) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);

    const QueryTile<kBlockQueries> tile(q_heads, sq, tile_index<kBlockQueries>(sq, sk, group));
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * kWarpRows;
    const int lane_column = lane % 4 * 2;
    const Lengths lengths(total_lengths, past_lengths, tile.b, sq, sk, capture_error);
    if (threadIdx.x == 0) {
        const long long kv_plane = static_cast<long long>(tile.plane / group) * kv_capacity * kHeadDim;
        smem.rows = {lengths,      mask + tile.b * mask_batch_stride + tile.h * mask_head_stride,
                     tile.plane,   tile.first,
                     local_window, sq,
                     sk};
        smem.blocks = KeyBlocks(
            lengths.range(tile.first, local_window), lengths.range(tile.last, local_window), kBlockKeys);
        smem.planes[0] = key + kv_plane;
        smem.planes[1] = value + kv_plane;
    }
    const ScoreScale score_scale(scale, softcap);

    // Where the lane's matrices of a tile begin: of Q and V rows lie along lanes 0-15, of K along lanes 0-7 and
    // 16-23.
    const unsigned int q_tile = shared_address(smem.q);
    const unsigned int ring = shared_address(smem.ring);
    const unsigned int q_lane = q_tile + warp_row * kRowBytes + chunk_offset(lane % 16, lane / 16);
    const unsigned int key_lane = ring + chunk_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned int value_lane = ring + chunk_offset(lane % 16, lane / 16);
    constexpr unsigned int kStageBytes = sizeof(smem.ring[0]);

    load_tile<TileLayout, kBlockQueries>(q_tile, q + static_cast<long long>(tile.plane) * sq * kHeadDim, tile.first,
                                         KeyRange{0, static_cast<unsigned int>(sq)});
    __syncthreads();

    Sums sums;
    RowState state;
    unsigned int has_key = 0;  // with a mask: a bit a row, of this lane's keys
    bool is_guarded = false;
    while (true) {
        const int last_block = smem.blocks.end - 1;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                state.offset[m][r] = negative_infinity();
                state.sum[m][r] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
            }
        }

        // Items in the order of their use: the keys of the last block, its values, the keys of the one before.
        const auto load = [&](int item, int from_block, unsigned int stage) {
            const int block = from_block - item / 2;
            if (block >= smem.blocks.first) {
                load_tile<TileLayout, kBlockKeys>(ring + stage * kStageBytes, smem.planes[item % 2],
                                                  block * kBlockKeys, smem.blocks.seen);
            }
            copy_async_commit();
        };
        unsigned int next = 0;
        // Wait for item 0 or 1 of a block: its stage. All warps are done with the item before, and another is
        // loaded in its place.
        const auto wait_for = [&](int item, int block) {
            copy_async_wait<kStages - 2>();
            __syncthreads();
            load(item + kStages - 1, block, next == 0 ? kStages - 1 : next - 1);
            const unsigned int stage = next;
            next = next + 1 == kStages ? 0 : next + 1;
            return stage;
        };
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) load(i, last_block, i);

#pragma unroll 1
        for (int block = last_block; block >= smem.blocks.first; --block) {
            Scores scores;
            multiply_keys(scores, q_lane, key_lane + wait_for(0, block) * kStageBytes);
            finish_scores(scores, smem.rows, score_scale, block * kBlockKeys + lane_column,
                          smem.blocks.is_partial(block), has_key);
            move_origins(scores, state, sums);
            weigh(scores, state);

            const unsigned int value_stage = wait_for(1, block);
            bool is_spoilt = false;
            if (is_guarded && smem.blocks.is_partial(block)) {
                is_spoilt = __syncthreads_or(take_out_spoilt(smem.ring[value_stage]));
            }
            add_values(sums, scores, value_lane + value_stage * kStageBytes);
            if (is_spoilt) add_spoilt_values(sums, smem.planes[1], smem.rows, block * kBlockKeys);
        }
        copy_async_wait<0>();
        if (is_guarded || !smem.blocks.has_partial() || !__syncthreads_or(!are_finite(sums))) break;
        is_guarded = true;
    }

    if (kHasMask) {
        has_key |= __shfl_xor_sync(kFullWarp, has_key, 1);
        has_key |= __shfl_xor_sync(kFullWarp, has_key, 2);
    }
    // Where there was a block, the queries have arrived and only their own warp has read them; they make room for
    // its output.
    if (smem.blocks.first == smem.blocks.end) __syncthreads();
    __syncwarp();
    stage_output(q_tile, sums, state, smem.rows, has_key);
    __syncwarp();
    store_output(output, smem.q, smem.rows);
}
