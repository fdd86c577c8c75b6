// DsaIndexSelect, certified: what the bias says about each row and each tile of scores.
//
//     bias [B, S, T] f32   ->   allowed [B, S, W] u32, bit t % 32 of word t / 32: whether bias[t] > -1e30
//                               rows    [B, S] u32, the accounts: how many keys a row allows, and kBiased
//                               tiles   [B, T / kBlockKeys, S / kTileRows] u8: whether the tile needs scores
//
// Quotients round up and W is as many words as the blocks of keys have. A row needs scores if it allows more than
// top_k keys, and a tile if one of its rows that need scores allows one of its keys. Tiles are followed by zeros up to
// a multiple of 16 bytes.
//
// One block a tile of rows; a warp takes every kWarps-th block of keys.
#include "common/block_scan.cuh"
#include "common/dsa_layout.cuh"
#include "common/strict_score.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kTileRows = TILE_ROWS;
static_assert(kTileRows <= 8, "a byte has one bit for each row of a tile");

struct Smem {
    unsigned char rows_with_keys[kMaxKeyBlocks];  // of each key block: bit r if row r of the tile allows a key
    unsigned int counts[kTileRows];
    unsigned int biased[kTileRows];
};

extern "C" __global__ void __launch_bounds__(kThreads) dsa_index_select_prepare(
    const float* __restrict__ bias, unsigned int* __restrict__ allowed, unsigned int* __restrict__ rows,
    unsigned char* __restrict__ tiles, unsigned int batch, unsigned int q_seq, unsigned int key_seq,
    unsigned int top_k) {
    __shared__ Smem smem;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const unsigned int key_blocks = (key_seq + kBlockKeys - 1) / kBlockKeys;
    const unsigned int row_tiles = (q_seq + kTileRows - 1) / kTileRows;
    const unsigned long long n_tiles = 1ull * batch * key_blocks * row_tiles;
    if (blockIdx.x == 0 && threadIdx.x < -n_tiles % 16) tiles[n_tiles + threadIdx.x] = 0;

    for (unsigned int tile = blockIdx.x; tile < batch * row_tiles; tile += gridDim.x) {
        const unsigned int b = tile / row_tiles;
        const unsigned int s0 = tile % row_tiles * kTileRows;
        const int tile_rows = min(kTileRows, q_seq - s0);
        for (unsigned int i = threadIdx.x; i < key_blocks; i += kThreads) smem.rows_with_keys[i] = 0;
        if (threadIdx.x < kTileRows) smem.counts[threadIdx.x] = smem.biased[threadIdx.x] = 0;
        __syncthreads();

        for (int r = 0; r < tile_rows; ++r) {
            const unsigned long long row = 1ull * b * q_seq + s0 + r;
            const float* row_bias = bias + row * key_seq;
            unsigned int* row_words = allowed + row * key_blocks * kBlockWords;
            unsigned int count = 0;
            bool biased = false;
            for (unsigned int block = warp; block < key_blocks; block += kWarps) {
                float values[kBlockWords];
#pragma unroll
                for (int i = 0; i < kBlockWords; ++i) {
                    const unsigned int t = block * kBlockKeys + i * 32 + lane;
                    values[i] = t < key_seq ? row_bias[t] : masked_score();
                }
                unsigned int own_word = 0;
                unsigned int any = 0;
#pragma unroll
                for (int i = 0; i < kBlockWords; ++i) {
                    const unsigned int word = __ballot_sync(kFullWarp, is_allowed(values[i]));
                    biased = biased || (is_allowed(values[i]) && values[i] != 0.0f);
                    if (lane == i) own_word = word;
                    any |= word;
                    count += __popc(word);
                }
                if (lane < kBlockWords) row_words[block * kBlockWords + lane] = own_word;
                if (lane == 0 && any != 0) smem.rows_with_keys[block] |= 1 << r;
            }
            biased = __any_sync(kFullWarp, biased);
            if (lane == 0) {
                atomicAdd(&smem.counts[r], count);
                if (biased) smem.biased[r] = 1;
            }
        }
        __syncthreads();

        unsigned int needy_rows = 0;
        for (int r = 0; r < tile_rows; ++r) needy_rows |= (smem.counts[r] > top_k) << r;
        for (unsigned int i = threadIdx.x; i < key_blocks; i += kThreads) {
            tiles[(1ull * b * key_blocks + i) * row_tiles + s0 / kTileRows] =
                (smem.rows_with_keys[i] & needy_rows) != 0;
        }
        if (threadIdx.x < tile_rows) {
            rows[1ull * b * q_seq + s0 + threadIdx.x] =
                smem.counts[threadIdx.x] | (smem.biased[threadIdx.x] ? kBiased : 0);
        }
        __syncthreads();
    }
}
